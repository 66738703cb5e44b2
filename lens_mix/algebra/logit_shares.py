"""What a block's attention adds to logits by way of each key, without d_model numbers per pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.vectors import attention_vectors
from lens_mix.lens.head import Head

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


def through_head(
    head: Head, resid: Float[Tensor, "batch query d_model"], columns: Float[Tensor, "batch query d_model"]
) -> Float[Tensor, "batch query d_model"]:
    """Directions in the residual stream whose products are logits, the final norm held at its true scale.

    Args:
        head: the model's head.
        resid: the last residual stream.
        columns: the unembedding's column per position.
    """
    dtype = torch.promote_types(resid.dtype, torch.float32)
    columns, resid = columns.to(dtype), resid.to(dtype)
    if head.norm is None:
        return columns
    if head.norm.weight is not None:
        columns = columns * head.norm.weight.to(dtype)
    if head.norm.kind == "layer":
        columns = columns - columns.mean(-1, keepdim=True)
    return columns / head.norm.scale(resid)


def logit_shares(
    block: Block, directions: Float[Tensor, "batch query d_model"], asked: Block | None = None
) -> Float[Tensor, "batch query key"]:
    """What the block's attention adds to each query's logit by way of each key.

    Args:
        block: the block.
        directions: per query, from `through_head`.
        asked: the block whose rows the directions belong to; None: `block`.
    """
    vectors = attention_vectors(block).residual
    pattern, scale, heads = vectors.pairs.pattern, vectors.scale, vectors.pairs.heads
    if asked is not None and asked is not block:
        pattern, scale = asked.rows_of(pattern, axis=2), asked.rows_of(scale)
    shares = directions.new_zeros((*directions.shape[:2], pattern.shape[-1]))
    group = heads.heads // heads.value.shape[2]
    for head, matrix in enumerate(heads.after(vectors.pairs.chain)):
        # From the left: d_head numbers per query and key, not d_model.
        value = heads.value[:, :, head // group]
        shares += pattern[:, head] * (directions @ matrix.T @ value.mT)
    return shares * scale
