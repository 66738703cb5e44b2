"""The vectors that a block's output is the sum of, for users' own methods."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._algebra.definitions import value_vectors
from lens_mix._blocks.states import BlockStates, cross_output, states_of, value_path
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._model.anatomy import LinearNorm

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


@dataclasses.dataclass(frozen=True)
class BlockParts:
    """The vectors that sum to a block's output, at the requested rows; float32 at least.

    Attributes:
        keys: The attention's contribution from each key.
        residual: The residual stream before the block.
        biases: The biases of the output matrix and of norms on the residual stream or a branch.
        cross: The contribution of a decoder's cross-attention; zeros in other blocks.
        feed_forward: The feed-forward's contribution.
    """

    keys: Float[Tensor, "batch query key d_model"]
    residual: Float[Tensor, "batch query d_model"]
    biases: Float[Tensor, "batch query d_model"]
    cross: Float[Tensor, "batch query d_model"]
    feed_forward: Float[Tensor, "batch query d_model"]

    def total(self) -> Float[Tensor, "batch query d_model"]:
        """Return the block's output, the sum of all vectors."""
        return self.keys.sum(2) + self.residual + self.biases + self.cross + self.feed_forward

    def _through(self, norm: LinearNorm) -> BlockParts:
        """Return the components after a norm, linearised at their sum; its bias is added to `biases`."""
        normed = {name: norm(vectors) for name, vectors in vars(self).items()}
        if norm.bias is not None:
            normed["biases"] = normed["biases"] + norm.bias.to(normed["biases"].dtype)
        return BlockParts(**normed)


def block_parts(block: Block) -> BlockParts:
    """Split a block's output: attention by key, residual stream, biases, cross-attention, feed-forward.

        >>> class NormOfParts(lm.Method):
        ...     name, residual, engines = "norm_of_parts", 0.5, ("algebra",)
        ...     records, needs = frozenset({"pattern", "value"}), frozenset({"projection", "residual"})
        ...
        ...     def __call__(self, block):
        ...         return lm.models.block_parts(block).keys.norm(dim=-1)
        >>> lm.run(model, "The Eiffel Tower is in the city of", NormOfParts()).top(3)

    It is defined for every anatomy, with norms at their scales of the clean pass. In a pre-norm block the
    components are summed as they are. After a norm (post-norm, or one on a branch), each component is the
    norm's linear part of it.

    The result has a vector per pair of query and key, whatever `max_memory`: use few queries or short
    prompts. The method that calls it has to record "pattern" and "value", and to list the components that it
    uses in `needs`. A decoder's block with cross-attention is run again for it, so the method has to declare
    `reads = "above"`.

    Raises:
        UnsupportedModelError: A norm follows a feed-forward without a formula, or the block is mapped by its
            cross-attention.
    """
    if block.stack.is_cross:
        raise UnsupportedModelError("block_parts: expected self-attention (part='decoder'), got part='cross'")
    states = states_of(block, cross_out=cross_output(block))
    path, s = value_path(block), block.anatomy.residual_multiplier
    x, wide = states.resid_pre, states.resid_pre.dtype
    pattern, value = states.pattern.to(wide), states.value.to(wide)
    keys = value_vectors(pattern, value, path.W_O.to(wide))
    zero = torch.zeros_like(x)
    b_O = zero if path.b_O is None else path.b_O.to(wide).expand_as(x)
    branch = BlockParts(keys, zero, b_O, zero, zero)._through(states.attention_branch)
    mid = BlockParts(branch.keys * s, x, branch.biases * s, zero, zero)._through(states.attention_residual)
    if states.cross_out is not None:
        mid = dataclasses.replace(mid, cross=states.cross_out)._through(states.cross_residual)
    return _with_feed_forward(block, states, mid)


def _with_feed_forward(block: Block, states: BlockStates, mid: BlockParts) -> BlockParts:
    anatomy = block.anatomy
    if anatomy.feed_forward_kind == "none":
        return mid
    if anatomy.feed_forward is None:
        if anatomy.feed_forward_residual is not None:
            raise UnsupportedModelError(
                f"block {block.layer}: expected a plain or gated feed-forward, because a norm follows it, "
                f"got {anatomy.feed_forward_kind!r}"
            )
        # A feed-forward without a formula added the rest of the block's output.
        return dataclasses.replace(mid, feed_forward=block.resid_post.to(mid.residual.dtype) - mid.total())
    summed = dataclasses.replace(mid, feed_forward=states.feed_forward_added)
    return summed._through(states.feed_forward_residual)
