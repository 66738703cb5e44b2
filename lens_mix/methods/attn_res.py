"""Attention with the residual connection, by vector norms, before and after the norm layer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.definitions import norms, residual_vectors, through_norm
from lens_mix.algebra.vectors import AttentionVectors, Vectors, attention_vectors
from lens_mix.lens.anatomy import Norm
from lens_mix.method import Method
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class AttnRes(VectorMethod):
    """Attention and residual stream, AttnRes-N (Kobayashi et al., EMNLP 2021, eq. 8).

    score[l, i, j] = ‖F_ij‖ with F_ij = Σ_h a_ijh u_jh + δ_ij x_i: what query i got from key j, its own
    residual stream on the diagonal. Shape [layer, query, key], from 0 up. A norm on the attention branch
    (sandwich and branch-norm blocks) is held linear at its true scale, and a residual multiplier counts.
    The sum of F_ij over keys is the residual stream after attention, less b_O and less the branch norm's β.
    """

    name: ClassVar[str] = "attn_res"
    residual: ClassVar[float] = 0.0
    holds_residual: ClassVar[bool] = True
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    citation: ClassVar[str] = "kobayashi-etal-2021-incorporating"

    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return attention_vectors(block).residual.norms()


@dataclasses.dataclass(frozen=True)
class AttnResLn(AttnRes):
    """Attention, residual stream and layer norm, AttnResLn-N (Kobayashi et al., EMNLP 2021, eq. 11).

    score[l, i, j] = ‖γ ⊙ (F_ij - mean F_ij) / s_i‖ with the F_ij of `attn_res` and s_i the standard
    deviation of the true sum (for RMSNorm: no centring, the root mean square); β is in no vector. Shape
    [layer, query, key], from 0 up.

    Only post-norm blocks have a norm there. On all others the map equals `attn_res`, unless `next_norm`.

    Args:
        next_norm: where the block has no such norm, apply the one that reads the sum next, before the
            feed-forward; there is none where that reads the block's input (parallel), or the sum as it is.
    """

    name: ClassVar[str] = "attn_res_ln"

    next_norm: bool = False

    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return self.vectors(block, attention_vectors(block)).norms()

    def vectors(self, block: Block, attention: AttentionVectors) -> Vectors:
        """The vectors whose norms the map holds."""
        anatomy = block.anatomy
        if not self.next_norm or anatomy.attention_residual is not None or anatomy.parallel:
            return attention.normed
        norm = anatomy.cross_input if anatomy.cross else anatomy.feed_forward_input
        return attention.normed.through(norm, attention.mid)


def attn_res(
    pattern: Float[Tensor, "batch head query key"],
    value: Float[Tensor, "batch key value_head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    resid_pre: Float[Tensor, "batch query d_model"],
) -> Float[Tensor, "batch query key"]:
    """The definition: ‖Σ_h a_ijh v_jh W_O^h + δ_ij x_i‖."""
    return norms(residual_vectors(pattern, value, W_O, resid_pre))


def attn_res_ln(
    vectors: Float[Tensor, "batch query key d_model"],
    norm: Norm | None,
    state: Float[Tensor, "batch query d_model"],
) -> Float[Tensor, "batch query key"]:
    """The definition: ‖γ ⊙ (F_ij - mean F_ij) / s_i‖ with F from `residual_vectors` and s of the true sum."""
    return norms(through_norm(norm, vectors, state))
