"""The memory of the norm-based maps, and the chunks that fit into a budget of bytes.

All functions of memory return upper bounds, in bytes, of the temporaries of one block's map without the map
itself. Tests measure them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lens_mix._algebra.head_vectors import HeadVectors
    from lens_mix._blocks.block import Block
    from lens_mix._model.anatomy import FeedForward

# The bytes of one chunk's temporary tensors; products of smaller chunks would be slower.
PRODUCT_BYTES = 1 << 24
_GPU_BYTES = 1 << 28
NEURONS = 512  # The number of neurons in one product with W_out.


# ------------------------------------------------------------------ chunks


def chunks(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield slices of about equal length that cover start..stop, none longer than `size`."""
    if start >= stop:
        return
    width = -(-(stop - start) // -(-(stop - start) // size))
    for begin in range(start, stop, width):
        yield slice(begin, min(begin + width, stop))


def chunk_size(row: int, device: torch.device, budget: int | None, suitable: int = PRODUCT_BYTES) -> int:
    """Return the number of rows of a chunk, at least one.

    Args:
        row: The bytes of each row's temporaries.
        device: The device of the computation.
        budget: The bytes for all temporaries; None if memory is not bound.
        suitable: The bytes of the chunk that is fastest on a CPU.
    """
    size = suitable if device.type == "cpu" else _GPU_BYTES
    return max(1, (size if budget is None else min(size, budget)) // max(1, row))


def budget_beside(block: Block, fixed: int, least: int, what: str) -> int | None:
    """Return the bytes that the block's `max_memory` leaves for chunks; None if memory is not bound.

    Args:
        block: The block.
        fixed: The bytes that do not depend on the size of the chunks.
        least: The bytes of the smallest chunk.
        what: The name of the map, for the error.

    Raises:
        ValueError: `max_memory` is too small for the smallest chunk.
    """
    if block.max_memory is None:
        return None
    if block.max_memory < fixed + least:
        batch, queries = block.resid_pre.shape[:2]
        raise ValueError(
            f"max_memory: expected at least {fixed + least} bytes (the smallest chunk of {what}, {batch} "
            f"prompt(s), {queries} of {block.real.shape[1]} positions), got {block.max_memory}"
        )
    return block.max_memory - fixed


# ------------------------------------------------------------------ costs


def attention_budget(
    block: Block, heads: HeadVectors, beside: int = 0, least: int = 0, what: str = "a norm-based map"
) -> int | None:
    """Return the bytes left for chunks of a map of pairs (`budget_beside`).

    `beside` and `least` are the bytes of the steps after the attention.
    """
    batch, queries, d_model = block.resid_pre.shape
    keys, size, pattern = heads.value.shape[1], heads.dtype.itemsize, block.recorded("pattern")
    # These are states up to the feed-forward, copies in other dtypes, and norms of pairs.
    states = 13 * d_model * queries + 3 * heads.heads * heads.d_head * max(queries, keys)
    pairs = 3 * queries * keys * size
    if pattern.dtype != heads.dtype or not block.every_query:
        pairs += heads.heads * queries * keys * size  # This is a copy of the pattern.
    # W_O after norms is a copy, and computing it needs a second one.
    fixed = batch * (states * size + pairs) + heads.copied + 2 * heads.matrices.nbytes
    one_key = max(factor_bytes(heads, queries), 2 * queries * written_out_bytes(heads))
    return budget_beside(block, fixed + beside, max(batch * one_key, least), what)


def vector_bytes(heads: HeadVectors) -> int:
    """Return the bytes of a key's vectors from all heads, its values, and the diagonal's vector."""
    return (heads.heads * (heads.d_model + 3 * heads.d_head) + 3 * heads.d_model) * heads.dtype.itemsize


def factor_bytes(heads: HeadVectors, queries: int) -> int:
    """Return the bytes of a key's vectors (also in float64), their factor, and all its products and norms."""
    # A decomposition copies its input.
    copies = 4 if heads.dtype == torch.float64 else 1
    wide = heads.heads * (copies * heads.d_model + 4 * heads.heads + 2 * queries) + 3 * queries
    return vector_bytes(heads) + 8 * wide


def written_out_bytes(heads: HeadVectors) -> int:
    """Return the bytes of one pair's vector, the weighted values in it, and copies for norms."""
    return (2 * heads.heads * heads.d_head + 6 * heads.d_model) * heads.dtype.itemsize


def distance_bytes(block: Block, heads: HeadVectors) -> int:
    """Return the bytes of the distances of all pairs, the mask of attended keys, and copies of states."""
    batch, queries, d_model = block.resid_pre.shape
    pairs = batch * (3 * heads.dtype.itemsize + heads.heads) + 26
    return queries * (heads.value.shape[1] * pairs + 4 * batch * d_model * heads.dtype.itemsize)


def head_proximity_bytes(heads: HeadVectors, queries: int) -> int:
    """Return the bytes of a key's vectors from all heads, twice, their weights and their proximities."""
    copies = heads.heads * heads.d_model * heads.dtype.itemsize
    return vector_bytes(heads) + copies + 7 * heads.heads * queries * heads.dtype.itemsize


def route_bytes(block: Block, heads: HeadVectors) -> int:
    """Return the bytes of the shares of a block's components, up to its output."""
    return 2 * distance_bytes(block, heads) + second_norm_bytes(block, heads)


def second_norm_bytes(block: Block, heads: HeadVectors) -> int:
    """Return the bytes of the state that the norm after the feed-forward reads."""
    feed_forward = block.anatomy.feed_forward
    batch, queries, d_model = block.resid_pre.shape
    hidden = 0 if feed_forward is None else 5 * feed_forward.W_in.shape[1]
    return batch * queries * (6 * d_model + hidden) * heads.dtype.itemsize


def feed_forward_bytes(block: Block, heads: HeadVectors, feed_forward: FeedForward, is_folded: bool) -> int:
    """Return the bytes of a feed-forward's states, copies of its weights, and the maps after it."""
    batch, queries, d_model = block.resid_pre.shape
    size, d_mlp = heads.dtype.itemsize, feed_forward.W_in.shape[1]
    matrices = 1 if feed_forward.W_gate is None else 2
    states = batch * queries * (matrices * d_mlp * (6 * 8 + 3 * size) + 8 * d_model * size)
    weights = 0
    if feed_forward.W_in.dtype != heads.dtype:
        weights = 2 * (matrices + 1) * d_model * d_mlp * size
    if is_folded:
        weights += heads.heads * heads.d_head * (4 * d_model + matrices * d_mlp) * size
    return states + weights + distance_bytes(block, heads)


def hidden_bytes(heads: HeadVectors, feed_forward: FeedForward, queries: int) -> int:
    """Return the bytes of one pair in the feed-forward, with its share of the tensors of a key."""
    d_model, d_mlp = feed_forward.W_in.shape
    matrices = 1 if feed_forward.W_gate is None else 2
    per_pair = (matrices + 1) * min(d_mlp, NEURONS) + 9 * d_model + 2 * heads.heads
    per_key = heads.heads * (5 * d_model + 2 * d_mlp + 2 * heads.d_head)
    return (per_pair + -(-per_key // queries)) * heads.dtype.itemsize
