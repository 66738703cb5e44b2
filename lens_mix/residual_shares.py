"""How much of a position's representation after attention is its own residual stream."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.vectors import attention_vectors
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class ResidualShares(VectorMethod):
    """The residual stream's share in its sum with the attention branch, by proximity.

    With x the residual stream, a what the attention branch adds and y = x + a: p(x) / (p(x) + p(a)) with
    p(s) = max(0, ‖y‖₁ − ‖y − s‖₁), the proximity of Ferrando et al. (EMNLP 2022, eq. 6) for two parts;
    1/2 where both are 0. Shape [layer, query, 1], in 0..1. Not one of `METHODS`, as it tells no keys apart:
    `lm.run(..., residual_shares=True)` puts it into the maps, for `lm.rollout(m, residual="measured")`.
    """

    name: ClassVar[str] = "residual_shares"
    residual: ClassVar[float] = 0.0
    citation: ClassVar[str] = "ferrando-etal-2022-measuring"

    def key_groups(self, positions: int) -> list[list[int]]:
        return [list(range(positions))]

    def __call__(self, block: Block) -> Float[Tensor, "batch query 1"]:
        vectors = attention_vectors(block)
        return residual_shares(vectors.resid_pre, vectors.summed)[..., None]


def residual_shares(
    resid_pre: Float[Tensor, "batch query d_model"], summed: Float[Tensor, "batch query d_model"]
) -> Float[Tensor, "batch query"]:
    """The definition: the share of `resid_pre` in `summed`, the residual stream after attention."""
    whole = summed.abs().sum(-1)
    residual = (whole - (summed - resid_pre).abs().sum(-1)).clamp(min=0)
    mixed = (whole - resid_pre.abs().sum(-1)).clamp(min=0)
    total = residual + mixed
    return torch.where(total > 0, residual / total.masked_fill(total == 0, 1), 0.5)
