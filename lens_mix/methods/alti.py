"""Compute ALTI: how much closer the vector of a key brings the sum to the representation of the query."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.budget import attention_budget, distance_bytes
from lens_mix._algebra.distances import distances, lengths
from lens_mix._algebra.vectors import attention_vectors, head_vectors
from lens_mix.arguments import check_choice
from lens_mix.method import Method
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block

Distance = Literal["l1", "l2"]


@dataclasses.dataclass(frozen=True)
class Alti(VectorMethod):
    """Compute the contributions of ALTI (Ferrando et al., EMNLP 2022, eq. 9-11).

        score[l, i, j] = c_ij / Σ_k c_ik
        c_ij = max(0, ‖y_i‖ - ‖y_i - T_ij‖)

    y_i is the true representation after the attention branch, biases included. T_ij is the vector that key j
    contributes to it.

    Shape [layer, query, key], values in 0..1, and rows sum to 1. A row in which no key brings y_i closer is
    zero. The map contains the residual stream, so rollouts add no identity.

    In post-norm blocks, T_ij is taken after the norm, as in `attn_res_ln`. In pre-norm blocks, where the norm
    is inside the vectors, T_ij is as in `attn_res`: the decoder form of ALTI-Logit (Ferrando et al.,
    ACL 2023, eq. 7-8).

        >>> lm.run(model, "The Eiffel Tower is in the city of", lm.methods.Alti(distance="l2")).top(3)

    Args:
        distance: The vector norm ‖·‖: "l1" (as in the paper) or "l2".
        normalize: Whether rows are divided by their sum. False returns the c_ij.

    Raises:
        ValueError: `distance` is unknown.
    """

    name: ClassVar[str] = "alti"
    description: ClassVar[str] = (
        "how much closer each token brings the sum of contributions to the output of attention"
    )
    place_in_list: ClassVar[int] = 5
    residual: ClassVar[float] = 0.0
    includes_residual: ClassVar[bool] = True
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    citation: ClassVar[str] = "ferrando-etal-2022-measuring"

    distance: Distance = "l1"
    normalize: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("distance", self.distance, ("l1", "l2"))

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        heads = head_vectors(block)
        # `attention_vectors` would set a budget for the vectors alone, without the distances.
        heads.budget = attention_budget(block, heads, distance_bytes(block, heads), what="ALTI")
        vectors = attention_vectors(block, heads)
        order = 1 if self.distance == "l1" else 2
        mid = vectors.states.mid
        size = lengths(mid, order)[..., None]
        nearer = (size - distances(vectors.normed, mid, order)).clamp_min(0)
        return normalize_rows(nearer) if self.normalize else nearer


def alti(
    vectors: Float[Tensor, "batch query key d_model"],
    state: Float[Tensor, "batch query d_model"],
    order: int = 1,
) -> Float[Tensor, "batch query key"]:
    """Return c_ij = max(0, ‖y_i‖ - ‖y_i - T_ij‖), as the paper defines it.

    Args:
        vectors: T, from `residual_vectors`, after the norm if the block has one.
        state: y, the sum that the vectors are terms of.
        order: The order of the vector norm, 1 or 2.
    """
    apart: Tensor = torch.linalg.vector_norm(state[:, :, None] - vectors, ord=order, dim=-1)
    length: Tensor = torch.linalg.vector_norm(state, ord=order, dim=-1)
    return (length[..., None] - apart).clamp_min(0)


def normalize_rows(scores: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch key"]:
    """Return the rows divided by their sums. A row of zeros stays zero."""
    total = scores.sum(-1, keepdim=True)
    return torch.where(total > 0, scores / total, torch.zeros_like(scores))
