"""Tokens that stand in the place of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.arguments import several, whole_number
from lens_mix.targets import Context

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


def check_replacements(method: Any) -> None:
    """Refuse options that are none, and keep `replacements` as a tuple, on a frozen method."""
    whole_number("n_samples", method.n_samples, 1)
    whole_number("seed", method.seed, 0)
    if method.replacements is not None:
        tokens = several("replacements", method.replacements, "tokens", least=1)
        object.__setattr__(method, "replacements", tuple(tokens))


def stand_ins(
    first: Block,
    tokens: Int[Tensor, "place 1"],
    replacements: Sequence[str | int] | None,
    n_samples: int,
    seed: int,
) -> Int[Tensor, "place sample"]:
    """For each place, the tokens to put there; for one that stands there already, the next in the vocabulary.

    Args:
        first: a block of the model.
        tokens: what stands there.
        replacements: texts of one token, or numbers; None: `n_samples` drawn without special tokens.
        n_samples, seed: how many are drawn, and from where.

    Raises:
        TypeError, ValueError: a replacement that is no token of the model.
    """
    if replacements is None:
        special = set(getattr(first.tokenizer, "all_special_ids", ()))
        usable = torch.tensor([token for token in range(first.d_vocab) if token not in special])
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(usable), generator=generator)[:n_samples].to(tokens.device)
        usable = usable.to(tokens.device)
        same = usable[chosen] == tokens
        return usable[torch.where(same, (chosen + 1) % len(usable), chosen)]
    context = Context(first.tokens[0], torch.empty(1, first.d_vocab), first.tokenizer)
    given = torch.tensor([context.token_id(token, "replacements") for token in replacements])
    given = given.to(tokens.device)
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
    def of(cls, first: Block, method: Any, *, replaced: bool) -> Copies:
        """A copy of its prompt for every token; `replaced`: and for every one of the method's stand-ins."""
        prompts, positions = first.real_inputs.nonzero().unbind(-1)
        tokens = first.input_tokens[prompts, positions][:, None]
        if replaced:
            tokens = stand_ins(first, tokens, method.replacements, method.n_samples, method.seed)
        repeats = tokens.shape[1]
        prompts, positions = (each.repeat_interleave(repeats) for each in (prompts, positions))
        return cls(prompts, positions, tokens.flatten(), repeats)

    def part(self, part: slice) -> Copies:
        return Copies(self.prompts[part], self.positions[part], self.tokens[part], self.repeats)

    def replaced(self, first: Block) -> Int[Tensor, "copy input"]:
        """The tokens of each copy, with its stand-in."""
        tokens = first.input_tokens[self.prompts].clone()
        tokens[torch.arange(len(tokens), device=tokens.device), self.positions] = self.tokens
        return tokens

    def masked(self, first: Block) -> Bool[Tensor, "copy pos"]:
        """Where in each copy the token is that is taken out."""
        masked = torch.zeros_like(first.tokens[self.prompts], dtype=torch.bool)
        masked[torch.arange(len(masked), device=masked.device), self.positions] = True
        return masked
