"""Compute how much of a position's representation after attention is its own residual stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._blocks.states import states_of
from lens_mix.maps.spans import Group
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


@dataclasses.dataclass(frozen=True)
class ResidualShares(VectorMethod):
    """Compute the share of the residual stream in its sum with the output of attention, by proximity.

    score[l, i] = p(x) / (p(x) + p(a)), where x is the residual stream, a is the output of attention and
    y = x + a. p(s) = max(0, ‖y‖₁ − ‖y − s‖₁) is the proximity of Ferrando et al. (EMNLP 2022, eq. 6) of a
    component s. If both proximities are 0, the share is 1/2. Shape [layer, query, 1], values in 0..1.

    This is not one of `METHODS`, because it does not distinguish keys. `lm.run(..., residual_shares=True)`
    adds it to the maps, for `lm.rollout(m, residual="measured")`.
    """

    name: ClassVar[str] = "residual_shares"
    residual: ClassVar[float] = 0.0
    citation: ClassVar[str] = "ferrando-etal-2022-measuring"

    @override
    def key_groups(self, tokens: Sequence[str]) -> list[Group]:
        return [Group("residual", list(range(len(tokens))))]

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch query 1"]:
        states = states_of(block)
        return residual_shares(states.resid_pre, states.attention_sum)[..., None]


def residual_shares(
    resid_pre: Float[Tensor, "batch query d_model"], summed: Float[Tensor, "batch query d_model"]
) -> Float[Tensor, "batch query"]:
    """Return the share of the residual stream in its sum with the output of attention, in 0..1.

    Args:
        resid_pre: x, the residual stream that enters the block.
        summed: y, the residual stream after attention.
    """
    whole = summed.abs().sum(-1)
    residual = (whole - (summed - resid_pre).abs().sum(-1)).clamp(min=0)
    mixed = (whole - resid_pre.abs().sum(-1)).clamp(min=0)
    total = residual + mixed
    return torch.where(total > 0, residual / total.masked_fill(total == 0, 1), 0.5)
