"""Compute GlobEnc: vector norms of the whole block, with the scale of the norm after the feed-forward."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.budget import attention_budget, second_norm_bytes
from lens_mix._algebra.definitions import norms, through_norm
from lens_mix._algebra.vectors import AttentionVectors, Vectors, attention_vectors, head_vectors
from lens_mix._model.anatomy import BlockAnatomy, LinearNorm, Norm
from lens_mix.methods.value_norms import VectorMethod

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


@dataclasses.dataclass(frozen=True)
class GlobEnc(VectorMethod):
    """Compute N_Enc of GlobEnc (Modarressi et al., NAACL 2022, eq. 9-12).

        score[l, i, j] = ‖γ₂ ⊙ (F_ij - mean F_ij) / s₂_i‖

    F_ij are the vectors of `attn_res_ln`. The second norm of the block is applied to them as a linear map, at
    the scale s₂_i of the true state, which includes the output of the feed-forward. The feed-forward itself
    is left out.

    Shape [layer, query, key], at least 0.

    Only post-norm blocks have a norm on the residual stream. For all other blocks, the second norm is the one
    that reads the block's output: the first norm of the next block, and for the last block the final norm.

    GlobEnc's own rollout is a product of these maps, without identity and without dividing rows:
    `lens_mix.methods.globenc.rollout`.

        >>> lm.run(model, "The Eiffel Tower is in the city of", lm.methods.GlobEnc()).top(3)
    """

    name: ClassVar[str] = "globenc"
    description: ClassVar[str] = (
        "the size of each token's contribution to the block's output, without the feed-forward"
    )
    place_in_list: ClassVar[int] = 7
    residual: ClassVar[float] = 0.0
    includes_residual: ClassVar[bool] = True
    citation: ClassVar[str] = "modarressi-etal-2022-globenc"

    @override
    def unsupported_block(self, anatomy: BlockAnatomy) -> str | None:
        if anatomy.cross:
            return (
                "cross-attention lies between the two norms, so the vectors of this part are not all that "
                "the second norm reads; expected a block without cross-attention"
            )
        if anatomy.feed_forward_residual is not None and anatomy.feed_forward is None:
            return (
                "the second norm reads the feed-forward's output, which cannot be rebuilt; expected a plain "
                f"or gated feed-forward, got {anatomy.feed_forward_kind!r}"
            )
        return None

    @override
    def needs_for(self, anatomy: BlockAnatomy) -> frozenset[str]:
        return self.needs | {"next_norm" if anatomy.feed_forward_residual is None else "feed_forward"}

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        heads = head_vectors(block)
        # `attention_vectors` would set a budget for the vectors alone, without what the second norm reads.
        heads.budget = attention_budget(block, heads, second_norm_bytes(block, heads), what="globenc")
        return self.vectors(block, attention_vectors(block, heads)).norms()

    def vectors(self, block: Block, attention: AttentionVectors) -> Vectors:
        """Return the vectors whose norms are the map.

        Args:
            block: The block.
            attention: Its vectors up to the residual stream after attention.
        """
        states = attention.states
        second = states.feed_forward_residual
        # A pre-norm block does not end in a norm. The norm that reads its output is in the next block.
        if block.anatomy.feed_forward_residual is None:
            second = LinearNorm(block.next_norm(), block.resid_post.to(states.resid_pre.dtype))
        return attention.normed.through(second)


def globenc(
    vectors: Float[Tensor, "batch query key d_model"],
    first: Norm | None,
    mid: Float[Tensor, "batch query d_model"],
    second: Norm | None,
    output: Float[Tensor, "batch query d_model"],
) -> Float[Tensor, "batch query key"]:
    """Return the norms of F after two norms, each applied as a linear map.

    Args:
        vectors: F, from `residual_vectors`.
        first: The norm after attention. None: no norm.
        mid: The true sum that `first` reads.
        second: The second norm of the block. None: no norm.
        output: The true sum that `second` reads, which includes the feed-forward.
    """
    return norms(through_norm(second, through_norm(first, vectors, mid), output))


def rollout(scores: Float[Tensor, "layer query key"]) -> Float[Tensor, "layer query key"]:
    """Return the products of the maps up to each layer, without dividing rows (eq. 13).

    Args:
        scores: The scores of one map.

    Raises:
        ValueError: The scores have another shape.
    """
    if scores.ndim != 3 or scores.shape[1] != scores.shape[2]:
        raise ValueError(f"scores: expected [layer, query, key], got shape {list(scores.shape)}")
    maps = [scores[0]]
    for layer in scores[1:]:
        maps.append(layer @ maps[-1])
    return torch.stack(maps)
