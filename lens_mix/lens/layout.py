"""The order of the tokens in a row that runs a prompt, and after it tokens of copies that see the prompt."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.lens.batches import Batch, Prompt


@dataclasses.dataclass(frozen=True)
class Layout:
    """The order of tokens in one row: the prompt, and then for each copy the positions that are run again.

    An index sees the tokens up to its position: of its own copy those that are run again, of the prompt all
    others. So if only a replaced token and the last position are run again, the tokens between them are those
    of the clean pass.

    Attributes:
        rerun: Which positions of each copy are run again.
        index: The index in the row of each position of each copy: the prompt's own if it is not run again.
        positions: The position of each index.
        allowed: Which keys each index may see.
    """

    rerun: Bool[Tensor, "copy pos"]
    index: Int[Tensor, "copy pos"]
    positions: Int[Tensor, "1 index"]
    allowed: Bool[Tensor, "1 index key"]

    @classmethod
    def of(cls, rerun: Bool[Tensor, "copy pos"]) -> Layout:
        """Return the layout of copies, from the positions that are run again."""
        rerun = rerun.cpu()
        count, prompt = rerun.shape[1], torch.arange(rerun.shape[1], device="cpu")
        owner, again = rerun.nonzero().unbind(1)
        index = prompt.repeat(len(rerun), 1)
        index[rerun] = count + torch.arange(len(again), device="cpu")
        positions = torch.cat([prompt, again])
        alone = torch.nn.functional.pad(prompt <= prompt[:, None], (0, len(again)))
        of_prompt = ~rerun[owner] & (prompt <= again[:, None])
        of_copy = (owner == owner[:, None]) & (again <= again[:, None])
        allowed = torch.cat([alone, torch.cat([of_prompt, of_copy], 1)])
        return cls(rerun, index, positions[None], allowed[None])

    def fill(self, tokens: Int[Tensor, " pos"], copies: Int[Tensor, "copy pos"]) -> Int[Tensor, "1 index"]:
        """Return the tokens of the row, from those of the prompt and of the copies."""
        return torch.cat([tokens, copies[self.rerun.to(copies.device)]])[None]

    def batch(
        self, tokens: Int[Tensor, "1 index"], allowed: Bool[Tensor, "1 index key"] | None, dtype: torch.dtype
    ) -> Batch:
        """Return the row as a batch.

        Args:
            tokens: The tokens of the row.
            allowed: Which keys each index may see; None if a hook masks the others.
            dtype: The dtype of the model.
        """
        inputs = {"position_ids": self.positions.to(tokens.device)}
        if allowed is not None:
            # transformers adds such a mask to the scores of every layer, instead of making one.
            mask = torch.zeros(allowed.shape, dtype=dtype, device=tokens.device)
            mask.masked_fill_(~allowed.to(mask.device), torch.finfo(dtype).min)
            inputs["attention_mask"] = mask[:, None]
        is_real = torch.ones_like(tokens, dtype=torch.bool)
        return Batch(tuple(map(Prompt, tokens)), tokens, is_real, None, None, inputs)
