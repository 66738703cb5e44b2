"""Copies of prompts in which one token is taken out, and tokens that stand in the place of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from lens_mix.arguments import several, whole_number
from lens_mix.hooks import HookPair
from lens_mix.lens.batches import Batch
from lens_mix.methods.bound_target import RowTargetMethod
from lens_mix.targets import Context

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


class TakesReplacements(RowTargetMethod):
    """Base of the methods that put other tokens in the place of a prompt's; each has these fields itself."""

    replacements: Sequence[str | int] | None
    n_samples: int
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("n_samples", self.n_samples, 1)
        whole_number("seed", self.seed, 0)
        if self.replacements is not None:
            tokens = several("replacements", self.replacements, "tokens", least=1)
            object.__setattr__(self, "replacements", tuple(tokens))

    def parameters(self) -> dict[str, object]:
        given = None if self.replacements is None else list(self.replacements)
        return {**super().parameters(), "replacements": given}

    def stand_ins(self, first: Block, tokens: Int[Tensor, " place"]) -> Int[Tensor, "place sample"]:
        """What to put in the place of tokens; for one that stands there already, the next in the vocabulary.

        Raises:
            TypeError, ValueError: a replacement that is no token of the model.
        """
        tokens = tokens[:, None]
        if self.replacements is None:
            special = set(getattr(first.tokenizer, "all_special_ids", ()))
            listed = [token for token in range(first.d_vocab) if token not in special]
            usable = torch.tensor(listed, dtype=torch.long, device=tokens.device)
            generator = torch.Generator().manual_seed(self.seed)
            chosen = torch.randperm(len(usable), generator=generator, device="cpu")[: self.n_samples]
            chosen = chosen.to(tokens.device)
            same = usable[chosen] == tokens
            return usable[torch.where(same, (chosen + 1) % len(usable), chosen)]
        # If a decoder is mapped alone, the target's tokens are replaced.
        decoder = first.batch.target is not None and first.tokens is first.logits_tokens
        as_target = decoder and not first.is_joint
        # Only the width is read.
        logits = torch.empty(1, first.d_vocab, dtype=torch.float32, device="meta")
        context = Context(first.tokens[0], logits, first.tokenizer, as_target=as_target)
        listed = [context.token_id(token, "replacements") for token in self.replacements]
        given = torch.tensor(listed, dtype=torch.long, device=tokens.device)
        return torch.where(given == tokens, (given + 1) % first.d_vocab, given)


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies of prompts in each of which one token is taken out.

    Attributes:
        prompts, positions: of which prompt a copy is, and which of its positions is taken out (padding in).
        tokens: what stands there instead.
        repeats: how many copies there are of every position.
    """

    prompts: Int[Tensor, " copy"]
    positions: Int[Tensor, " copy"]
    tokens: Int[Tensor, " copy"]
    repeats: int

    @classmethod
    def of(cls, first: Block, method: TakesReplacements, *, replaced: bool) -> Copies:
        """A copy of its prompt for every token; `replaced`: and for every one of the method's stand-ins."""
        prompts, positions = first.real_inputs.nonzero().unbind(-1)
        tokens = first.input_tokens[prompts, positions]
        tokens = method.stand_ins(first, tokens) if replaced else tokens[:, None]
        repeats = tokens.shape[1]
        prompts, positions = (each.repeat_interleave(repeats) for each in (prompts, positions))
        return cls(prompts, positions, tokens.flatten(), repeats)

    def chunk(self, chunk: slice) -> Copies:
        return Copies(self.prompts[chunk], self.positions[chunk], self.tokens[chunk], self.repeats)

    def taken_out(
        self, by: str, blocks: Sequence[Block], interventions: Callable[..., list[HookPair]]
    ) -> tuple[Batch | None, list[HookPair]]:
        """What takes the tokens out of a pass: the copies as another batch, or hooks in the blocks.

        Args:
            by: "replace", "mask" or "values", as `Occlusion.by`; so are `interventions`.
            blocks: of the whole model.

        Raises:
            UnsupportedModelError: hooks don't act; during the pass: no key can be hidden in the attention.
        """
        first, place = blocks[0], self.positions[:, None]
        if by == "replace":
            tokens = first.input_tokens[self.prompts].scatter(1, place, self.tokens[:, None])
            return first.altered_batch(self.prompts, tokens=tokens), []
        if by == "mask" and not _acts_on(first, interventions):
            masked = torch.zeros_like(first.tokens[self.prompts], dtype=torch.bool).scatter(1, place, True)
            return first.altered_batch(self.prompts, masked=masked), []
        layers = [
            interventions(block.layer, self.positions, attention=block.attention_template) for block in blocks
        ]
        return None, [pair for pairs in layers for pair in pairs]


def _acts_on(block: Block, interventions: Callable[..., list[HookPair]]) -> bool:
    """Return whether hooks can share weights out anew before they mix; if not, the mask hides a key."""
    pairs = interventions(block.layer, 0, attention=block.attention_template)
    try:
        block.replay(block.real.new_zeros(1, dtype=torch.long), pairs)
    except RuntimeError:
        return False
    return True
