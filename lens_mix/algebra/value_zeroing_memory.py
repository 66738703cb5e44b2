"""What Value Zeroing by algebra costs in memory, and sizes that fit a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lens_mix.algebra.large_product import copy_bytes
from lens_mix.algebra.value_zeroing_pairs import Sizes

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


def fitting(
    sizes: Sizes, block: Block, span: int, groups: int, narrow: torch.dtype, wide: torch.dtype
) -> Sizes:
    """The sizes, made smaller where the block's `max_memory` asks for it.

    Args:
        sizes: what suits the device.
        block: the block.
        span: positions that are zeroed as one, at most.
        groups: how many groups of heads are zeroed.
        narrow, wide: dtypes of the computation, and up to the activation.

    Raises:
        ValueError: the smallest sizes don't fit.
    """
    if block.max_memory is None:
        return sizes
    length = block.seen.shape[2]
    smallest = Sizes(8, together=1, chunk=8, columns=64, keys=1, positions=length, spare=sizes.spare)
    while (needed := _bytes(sizes, block, span, groups, narrow.itemsize, wide.itemsize)) > block.max_memory:
        if sizes == smallest:
            raise ValueError(
                f"max_memory: expected at least {needed} bytes (the smallest step of value zeroing "
                f"by algebra at {length} positions), got {block.max_memory}; engine='hooks' may need less"
            )
        names = ("rectangle", "together", "chunk", "columns", "keys", "positions")
        halves = {name: max(getattr(smallest, name), getattr(sizes, name) // 2) for name in names}
        sizes = sizes._replace(**halves)
    return sizes


def _bytes(sizes: Sizes, block: Block, span: int, groups: int, narrow: int, wide: int) -> int:
    """An upper bound of the temporaries of one block's map, the map itself not counted."""
    anatomy, (batch, queries, length) = block.anatomy, block.seen.shape
    if anatomy.value_path is None:
        raise ValueError("block: expected one whose value path is known")
    (heads, d_head, d_model), stored = anatomy.value_path.W_O.shape, block.resid_pre.dtype.itemsize
    matrices, d_mlp, W_out_copy = 0, 0, 0
    if anatomy.feed_forward is not None:
        d_mlp = anatomy.feed_forward.W_in.shape[1]
        matrices = 0 if anatomy.parallel else 1 if anatomy.feed_forward.W_gate is None else 2
        W_out_copy = copy_bytes(anatomy.feed_forward.W_out, narrow)
    norms = (anatomy.attention_branch, anatomy.attention_residual, anatomy.feed_forward_input)
    bases = sum(norm is not None for norm in norms)
    prompts = min(batch, max(1, sizes.positions // length))
    rows, inner, first, rank = prompts * queries, heads * d_head, matrices * d_mlp, span * heads

    vectors = rows * d_model * (12 * narrow + 4 * wide) + prompts * (length + queries) * inner * 4 * wide
    hidden = rows * d_mlp * (matrices * (bases + 2) * wide + (2 * matrices + 3) * narrow)
    patterns = prompts * queries * length * (heads * (wide + 1) + 8)
    weights = 2 * inner * d_model * wide + W_out_copy
    if groups * rows * length > inner:
        # Fewer pairs are not worth folding.
        weights += inner * first * wide * (2 if matrices == 2 else 1)
    if stored != wide:
        weights += (2 * inner * d_model + d_model * first) * wide
    weights += d_model * d_mlp * narrow if stored != narrow else 0
    # Spans are gathered once more.
    values = sizes.keys * rank * (1 if span == 1 else 2) * (d_model + first + 3 * d_head) * wide
    plain = sizes.chunk * rank * d_head * wide
    chunk = max(sizes.chunk, sizes.rectangle) * (
        (3 * d_model + min(sizes.columns, d_mlp)) * narrow + (rank + d_model + bases + 2) * wide
    )
    rectangle = sizes.rectangle * ((d_model * 4 + rank * 4) * wide + min(sizes.columns, d_mlp) * 4 * wide)
    return vectors + hidden + patterns + weights + values + plain + chunk + rectangle
