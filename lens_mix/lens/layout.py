"""The order of the tokens in rows that run a prompt and what differs from it once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.lens.batches import Batch, Prompt


@dataclasses.dataclass(frozen=True)
class Layout:
    """The order of tokens in rows that run many copies of a prompt in one pass.

    The first pass has one row: the prompt, and then for each copy the positions that are run again. A later
    pass has rows of such positions alone, which see the prompt's keys and values of the first pass. An index
    sees the tokens up to its position: of its own copy those that are run again, of the prompt all others. So
    two kinds of copies are possible if token j is replaced:

    - All positions from j on are run again. Attention is causal, so this is the whole pass over the copy.
    - Only j and the last position are run again. The tokens between them are those of the clean pass.

    Attributes:
        rerun: Which positions of each copy are run again.
        index: The index of each position of each copy, counted over all rows: the prompt's own if it is not
            run again, which only the first pass has.
        positions: The position of each index.
        allowed: Which keys each index may see: those of the prompt, and then those of its row.
    """

    rerun: Bool[Tensor, "copy pos"]
    index: Int[Tensor, "copy pos"]
    positions: Int[Tensor, "row index"]
    allowed: Bool[Tensor, "row index key"]

    @classmethod
    def of(cls, rerun: Bool[Tensor, "copy pos"], rows: Sequence[Sequence[int]] | None = None) -> Layout:
        """Return the layout of copies, from the positions that are run again.

        Args:
            rerun: Which positions of each copy are run again.
            rows: The copies in each row of a later pass, without the last copy, which joins the row with
                the fewest tokens. None: the first pass, whose row has the prompt.
        """
        rerun, is_first = rerun.cpu(), rows is None
        lengths, prompt = rerun.sum(1).tolist(), torch.arange(rerun.shape[1], device="cpu")
        last = len(rerun) - 1
        rows = [list(range(last))] if rows is None else list(rows)
        shortest = min(range(len(rows)), key=lambda row: sum(lengths[copy] for copy in rows[row]))
        rows[shortest] = [*rows[shortest], last]
        width = max(sum(lengths[copy] for copy in row) for row in rows)
        owner = torch.full((len(rows), width), -1, dtype=torch.long, device="cpu")
        positions, index = torch.zeros_like(owner), prompt.repeat(len(rerun), 1)
        for number, row in enumerate(rows):
            place = 0
            for copy in row:
                of_copy = slice(place, place + lengths[copy])
                owner[number, of_copy] = copy
                positions[number, of_copy] = prompt[rerun[copy]]
                start = number * width + len(prompt) * is_first
                index[copy, rerun[copy]] = start + torch.arange(of_copy.start, of_copy.stop, device="cpu")
                place = of_copy.stop
        before = positions[:, None] <= positions[:, :, None]
        # The places behind the last copy of a row see each other, so that no row of the pattern is empty.
        of_row = (owner[:, :, None] == owner[:, None]) & before
        of_prompt = ~rerun[owner] & (owner >= 0)[..., None] & (prompt <= positions[..., None])
        allowed = torch.cat([of_prompt, of_row], 2)
        if is_first:
            positions = torch.cat([prompt[None], positions], 1)
            alone = torch.nn.functional.pad(prompt <= prompt[:, None], (0, width))
            allowed = torch.cat([alone[None], allowed], 1)
        return cls(rerun, index, positions, allowed)

    def fill(self, tokens: Int[Tensor, " pos"], copies: Int[Tensor, "copy pos"]) -> Int[Tensor, "row index"]:
        """Return the tokens of the pass, from those of the prompt and of the copies."""
        rerun, positions = self.rerun.to(copies.device), self.positions.to(copies.device)
        filled = tokens[positions].flatten()
        filled[self.index.to(copies.device)[rerun]] = copies[rerun]
        return filled.view(positions.shape)


def batch_of_rows(
    tokens: Int[Tensor, "row index"],
    positions: Int[Tensor, "row index"],
    allowed: Bool[Tensor, "row index key"] | None,
    dtype: torch.dtype,
) -> Batch:
    """Return rows of tokens at any positions as a batch.

    Args:
        tokens: The tokens of each row.
        positions: Their positions, which may repeat.
        allowed: Which keys each of them may see; None if a hook masks the others.
        dtype: The dtype of the model.
    """
    inputs = {"position_ids": positions.to(tokens.device)}
    if allowed is not None:
        # transformers adds such a mask to the scores of every layer, instead of making one.
        mask = torch.zeros(allowed.shape, dtype=dtype, device=tokens.device)
        mask.masked_fill_(~allowed.to(mask.device), torch.finfo(dtype).min)
        inputs["attention_mask"] = mask[:, None]
    is_real = torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tuple(map(Prompt, tokens)), tokens, is_real, None, None, inputs)
