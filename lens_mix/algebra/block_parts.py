"""What a block's output is the sum of, as vectors: for methods of one's own, and to read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.definitions import value_vectors
from lens_mix.algebra.head_vectors import linear_part
from lens_mix.algebra.vectors import value_path
from lens_mix.lens.anatomy import Norm
from lens_mix.lens.model_classes import UnsupportedModelError

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

    def _through(self, norm: Norm | None) -> BlockParts:
        """The parts of a norm's output: its linear part, with the scale of their sum; its bias is a bias."""
        if norm is None:
            return self
        scale = norm.scale(self.total())
        made = {
            name: linear_part(norm, part) / (scale[:, :, None] if name == "keys" else scale)
            for name, part in vars(self).items()
        }
        if norm.bias is not None:
            made["biases"] = made["biases"] + norm.bias.to(scale.dtype)
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
    if block.is_cross:
        raise UnsupportedModelError("block_parts: expected self-attention (part='decoder'), got part='cross'")
    anatomy, wide = block.anatomy, torch.promote_types(block.resid_post.dtype, torch.float32)
    path, s = value_path(block), anatomy.residual_multiplier
    pattern, value = block.recorded("pattern").to(wide), block.recorded("value").to(wide)
    x = block.resid_pre.to(wide)
    keys = value_vectors(pattern, value, path.W_O.to(wide))
    zero = torch.zeros_like(x)
    b_O = zero if path.b_O is None else path.b_O.to(wide).expand_as(x)
    branch = BlockParts(keys, zero, b_O, zero, zero)._through(anatomy.attention_branch)
    mid = BlockParts(branch.keys * s, x, branch.biases * s, zero, zero)._through(anatomy.attention_residual)
    cross = block.cross_output()
    if cross is not None:
        mid = dataclasses.replace(mid, cross=cross.to(wide))._through(anatomy.cross_residual)
    return _with_feed_forward(block, mid, x)


def _with_feed_forward(block: Block, mid: BlockParts, x: Float[Tensor, "batch query d_model"]) -> BlockParts:
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
        return dataclasses.replace(mid, feed_forward=block.resid_post.to(x.dtype) - mid.total())
    out = anatomy.feed_forward(anatomy.feed_forward_in(x, mid.total()))
    added = out if anatomy.feed_forward_branch is None else anatomy.feed_forward_branch(out)
    summed = dataclasses.replace(mid, feed_forward=added * anatomy.residual_multiplier)
    return summed._through(anatomy.feed_forward_residual)
