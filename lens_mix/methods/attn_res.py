"""Compute attention with the residual connection by vector norms, before and after the norm of the block."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.definitions import norms, residual_vectors, through_norm
from lens_mix._algebra.vectors import AttentionVectors, Vectors, attention_vectors
from lens_mix._model.anatomy import LinearNorm, Norm
from lens_mix.method import Method
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block
    from lens_mix._model.anatomy import BlockAnatomy


@dataclasses.dataclass(frozen=True)
class AttnRes(VectorMethod):
    """Compute attention with the residual stream, AttnRes-N (Kobayashi et al., EMNLP 2021, eq. 8).

        score[l, i, j] = ‖F_ij‖
        F_ij = Σ_h a_ijh u_jh + δ_ij x_i

    F_ij is what query i receives from key j: the vectors u_jh = v_jh W_O^h of `value_norm`, weighted by the
    pattern a. The diagonal includes x_i, the query's own residual stream (δ_ij is 1 there and 0 elsewhere).

    Shape [layer, query, key], at least 0.

    A norm on the attention branch (sandwich and branch-norm blocks) is applied as a linear map, at the scale
    of the clean pass. A residual multiplier is applied too. The sum of F_ij over keys is the residual stream
    after attention, without b_O and without the β of the branch norm.

        >>> lm.run(model, "The Eiffel Tower is in the city of", lm.methods.AttnRes()).top(3)
    """

    name: ClassVar[str] = "attn_res"
    description: ClassVar[str] = "the size of what attention and residual stream bring from each token"
    place_in_list: ClassVar[int] = 3
    residual: ClassVar[float] = 0.0
    includes_residual: ClassVar[bool] = True
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    citation: ClassVar[str] = "kobayashi-etal-2021-incorporating"

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return attention_vectors(block).residual.norms()


@dataclasses.dataclass(frozen=True)
class AttnResLn(AttnRes):
    """Compute attention, residual stream and norm, AttnResLn-N (Kobayashi et al., EMNLP 2021, eq. 11).

        score[l, i, j] = ‖γ ⊙ (F_ij - mean F_ij) / s_i‖

    F_ij is as in `attn_res`. s_i is the standard deviation of the true sum. RMSNorm has no mean, and its s_i
    is the root mean square. β is in no vector.

    Shape [layer, query, key], at least 0.

    Only post-norm blocks have this norm. In all other blocks the map equals `attn_res`, unless `next_norm`
    is set.

        >>> lm.run(model, "The Eiffel Tower is in the city of", lm.methods.AttnResLn(next_norm=True)).top(3)

    Args:
        next_norm: Whether blocks without such a norm use the one that reads the sum next, before the
            feed-forward. There is none if the feed-forward reads the block's input (parallel blocks) or the
            sum without a norm.

    Raises:
        UnsupportedModelError: `next_norm` is set, and the feed-forward has no formula (a mixture of experts),
            so that nothing shows which norm it reads.
    """

    name: ClassVar[str] = "attn_res_ln"
    description: ClassVar[str] = (
        "the size of what attention and residual stream bring from each token, after the norm"
    )
    place_in_list: ClassVar[int] = 2

    next_norm: bool = False

    @override
    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        if not self._reads_next(anatomy) or anatomy.is_written_down:
            return None
        return (
            f"the norm before its {anatomy.feed_forward_kind} feed-forward is not verified, because the "
            "feed-forward has no formula; use next_norm=False"
        )

    @override
    def needs_for(self, anatomy: BlockAnatomy) -> frozenset[str]:
        # A norm before a feed-forward is verified together with the feed-forward that reads it.
        return self.needs | {"feed_forward"} if self._reads_next(anatomy) else self.needs

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        return self.vectors(block, attention_vectors(block)).norms()

    def _reads_next(self, anatomy: BlockAnatomy) -> bool:
        return self.next_norm and anatomy.attention_residual is None and not anatomy.parallel

    def vectors(self, block: Block, attention: AttentionVectors) -> Vectors:
        """Return the vectors whose norms are the map.

        Args:
            block: The block.
            attention: Its vectors up to the residual stream after attention.
        """
        anatomy = block.anatomy
        if not self._reads_next(anatomy):
            return attention.normed
        # In a decoder's block, cross-attention reads the sum before the feed-forward does.
        norm = anatomy.cross_input if anatomy.cross else anatomy.feed_forward_input
        return attention.normed.through(LinearNorm(norm, attention.states.mid))


def attn_res(
    pattern: Float[Tensor, "batch head query key"],
    value: Float[Tensor, "batch key value_head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    resid_pre: Float[Tensor, "batch query d_model"],
) -> Float[Tensor, "batch query key"]:
    """Return ‖Σ_h a_ijh v_jh W_O^h + δ_ij x_i‖, as the paper defines it.

    Args:
        pattern: The attention weights a.
        value: The values v, with their bias.
        W_O: The output weights of the heads.
        resid_pre: x, the residual stream that enters the block.
    """
    return norms(residual_vectors(pattern, value, W_O, resid_pre))


def attn_res_ln(
    vectors: Float[Tensor, "batch query key d_model"],
    norm: Norm | None,
    state: Float[Tensor, "batch query d_model"],
) -> Float[Tensor, "batch query key"]:
    """Return ‖γ ⊙ (F_ij - mean F_ij) / s_i‖, as the paper defines it.

    Args:
        vectors: F, from `residual_vectors`.
        norm: The norm that is applied. None: no norm.
        state: The true sum, of which s is computed.
    """
    return norms(through_norm(norm, vectors, state))
