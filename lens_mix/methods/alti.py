"""ALTI: how much nearer a key's vector brings the query's representation to what it is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.budget import attention_budget, distance_bytes
from lens_mix.algebra.distances import distances, lengths
from lens_mix.algebra.vectors import attention_vectors, head_vectors
from lens_mix.arguments import one_of
from lens_mix.method import Method
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

Distance = Literal["l1", "l2"]


@dataclasses.dataclass(frozen=True)
class Alti(VectorMethod):
    """ALTI's contributions (Ferrando et al., EMNLP 2022, eq. 9-11).

    score[l, i, j] = c_ij / Σ_k c_ik with c_ij = max(0, ‖y_i‖ - ‖y_i - T_ij‖), y_i the true representation
    after the attention branch, biases included, and T_ij what of it came from key j. Shape [layer, query,
    key], in 0..1, rows sum to 1; a row in which no key brings y_i nearer stays zero.

    Post-norm blocks: after the norm, T_ij as in `attn_res_ln`. Pre-norm blocks, with the norm inside the
    vectors, are the decoder form of ALTI-Logit (Ferrando et al., ACL 2023, eq. 7-8): T_ij as in
    `attn_res`. The maps hold the residual stream, so roll-outs add no identity.

    Args:
        distance: "l1", the paper's, or "l2".
        normalize: divide rows by their sum; False keeps the c_ij.
    """

    name: ClassVar[str] = "alti"
    residual: ClassVar[float] = 0.0
    holds_residual: ClassVar[bool] = True
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    citation: ClassVar[str] = "ferrando-etal-2022-measuring"

    distance: Distance = "l1"
    normalize: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("distance", self.distance, ("l1", "l2"))

    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        heads = head_vectors(block)
        heads.budget = attention_budget(block, heads, distance_bytes(block, heads), what="ALTI")
        vectors = attention_vectors(block, heads)
        order = 1 if self.distance == "l1" else 2
        size = lengths(vectors.mid, order)[..., None]
        nearer = (size - distances(vectors.normed, vectors.mid, order)).clamp_min(0)
        return shares(nearer) if self.normalize else nearer


def alti(
    vectors: Float[Tensor, "batch query key d_model"],
    state: Float[Tensor, "batch query d_model"],
    order: int = 1,
) -> Float[Tensor, "batch query key"]:
    """The definition: c_ij = max(0, ‖y_i‖ - ‖y_i - T_ij‖).

    Args:
        vectors: T, from `residual_vectors`, after the norm where the block has one.
        state: y, what the vectors are shares of.
        order: of the norm, 1 or 2.
    """
    apart = torch.linalg.vector_norm(state[:, :, None] - vectors, ord=order, dim=-1)
    return (torch.linalg.vector_norm(state, ord=order, dim=-1)[..., None] - apart).clamp_min(0)


def shares(scores: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch key"]:
    """Rows divided by their sum; all-zero rows stay."""
    total = scores.sum(-1, keepdim=True)
    return torch.where(total > 0, scores / total, torch.zeros_like(scores))
