"""Tokens that stand in the place of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
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
