"""What a block's output is the sum of, as vectors: for methods of one's own, and to read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.definitions import value_vectors
from lens_mix.algebra.vectors import value_path
from lens_mix.lens.anatomy import LinearNorm
from lens_mix.lens.cross import cross_output
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.states import BlockStates, states_of

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class BlockParts:
    """Vectors that sum to a block's output, at the asked rows; float32 at least.

    Attributes:
        keys: what the attention brought from each key.
        residual: what was there before.
        biases: of the output matrix and of norms on the residual stream or a branch.
        cross: what a decoder's cross-attention brought; zeros elsewhere.
        feed_forward: what the feed-forward added.
    """

    keys: Float[Tensor, "batch query key d_model"]
    residual: Float[Tensor, "batch query d_model"]
    biases: Float[Tensor, "batch query d_model"]
    cross: Float[Tensor, "batch query d_model"]
    feed_forward: Float[Tensor, "batch query d_model"]

    def total(self) -> Float[Tensor, "batch query d_model"]:
        """The block's output."""
        return self.keys.sum(2) + self.residual + self.biases + self.cross + self.feed_forward

    def _through(self, norm: LinearNorm) -> BlockParts:
        """The parts of the output of a norm, held at their sum; its bias is a bias."""
        made = {name: norm(part) for name, part in vars(self).items()}
        if norm.bias is not None:
            made["biases"] = made["biases"] + norm.bias.to(made["biases"].dtype)
        return BlockParts(**made)


def block_parts(block: Block) -> BlockParts:
    """Take a block's output apart: attention by key, residual stream, biases, cross-attention, feed-forward.

    On every anatomy, norms held at their scales of the clean pass. In a pre-norm block these are plain sums;
    after a norm (post-norm, or one on a branch) each part is what the norm's linear part makes of it.

    It makes a vector per pair of query and key, whatever `max_memory`: ask for few queries, or short prompts.
    The method that calls it records "pattern" and "value", and names in `parts` what it relies on.

    Raises:
        UnsupportedModelError: a norm behind a feed-forward that can't be written down; cross-attention.
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
                f"block {block.layer}: expected a feed-forward that is written down, as a norm stands behind "
                f"it, got {anatomy.feed_forward_kind!r}"
            )
        # Whatever it is, it added what is left.
        return dataclasses.replace(mid, feed_forward=block.resid_post.to(mid.residual.dtype) - mid.total())
    summed = dataclasses.replace(mid, feed_forward=states.feed_forward_added)
    return summed._through(states.feed_forward_residual)
