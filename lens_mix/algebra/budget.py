"""What the norm-based maps cost in memory, and what a bound leaves for their pieces.

All numbers are upper bounds of the temporaries of one block's map, the map itself not counted; the tests
measure them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_mix.algebra.head_vectors import Chain, HeadVectors
from lens_mix.algebra.pair_norms import SlabCost

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

# Neurons of one product with the feed-forward's second matrix, as many as the caches like.
NEURONS = 512


def room_beside(block: Block, fixed: int, least: int, what: str) -> int | None:
    """Bytes that the block's `max_memory` leaves for pieces; None where memory is not bound.

    Args:
        block: the block.
        fixed: bytes that don't depend on the size of the pieces.
        least: bytes that the smallest pieces need.
        what: the map, for the error.

    Raises:
        ValueError: the smallest pieces don't fit.
    """
    if block.max_memory is None:
        return None
    if block.max_memory < fixed + least:
        batch, positions = block.resid_pre.shape[:2]
        raise ValueError(
            f"max_memory: expected at least {fixed + least} bytes (the smallest step of {what}, {batch} "
            f"prompt(s) of {positions} positions), got {block.max_memory}"
        )
    return block.max_memory - fixed


def state_bytes(block: Block, heads: HeadVectors) -> int:
    """Bytes of a block's states up to the feed-forward, of copies in other dtypes, and of norms of pairs."""
    batch, positions, d_model = block.resid_pre.shape
    size, pattern = heads.dtype.itemsize, block.recorded("pattern")
    vectors = 13 * d_model + 3 * heads.heads * heads.d_head
    pairs = 3 * size
    if pattern.dtype != heads.dtype:
        pairs += heads.heads * size
    return batch * positions * (vectors * size + positions * pairs) + heads.copied


def distance_bytes(block: Block, heads: HeadVectors) -> int:
    """Bytes of `Pairs.ranges`, of distances and of W_O after norms, beside the states."""
    batch, positions, d_model = block.resid_pre.shape
    size = heads.dtype.itemsize
    pairs = batch * (3 * size + heads.heads) + 26
    return positions * (positions * pairs + 4 * batch * d_model * size) + 3 * heads.matrices.nbytes


def least_attention_room(block: Block, heads: HeadVectors) -> int:
    """Bytes that the norms of one key's pairs need, after any two norms."""
    batch, queries = block.resid_pre.shape[:2]
    anatomy = block.anatomy
    norms = (anatomy.attention_branch, anatomy.attention_residual, anatomy.feed_forward_residual)
    longest: Chain = tuple(norm for norm in norms if norm is not None)
    if len(longest) < 2 and anatomy.feed_forward_input is not None:
        longest = (*longest, anatomy.feed_forward_input)
    return SlabCost(heads, queries, [longest]).least(batch)


def attention_room(block: Block, heads: HeadVectors) -> int | None:
    """Bytes for the pieces of a map of the attention's pairs.

    Raises:
        ValueError: the smallest pieces don't fit.
    """
    least = least_attention_room(block, heads)
    return room_beside(block, state_bytes(block, heads), least, "a norm-based map")


def second_norm_bytes(block: Block, heads: HeadVectors) -> int:
    """Bytes of the true state that the norm after the feed-forward reads."""
    feed_forward = block.anatomy.feed_forward
    batch, positions, d_model = block.resid_pre.shape
    width = 6 * d_model
    if feed_forward is not None and block.anatomy.feed_forward_residual is not None:
        width += 5 * feed_forward.W_in.shape[1]
    return batch * positions * width * heads.dtype.itemsize


def feed_forward_bytes(block: Block, heads: HeadVectors, folds: bool) -> int:
    """Bytes of a feed-forward's states, of copies of its weights, and of the maps behind it."""
    feed_forward = block.anatomy.feed_forward
    if feed_forward is None:
        return 0
    batch, positions, d_model = block.resid_pre.shape
    size, (_, d_mlp) = heads.dtype.itemsize, feed_forward.W_in.shape
    matrices = 1 if feed_forward.W_gate is None else 2
    states = batch * positions * (matrices * d_mlp * (6 * 8 + 3 * size) + 8 * d_model * size)
    weights = 0 if feed_forward.W_in.dtype == heads.dtype else 2 * (matrices + 1) * d_model * d_mlp * size
    if folds:
        weights += heads.heads * heads.d_head * (4 * d_model + matrices * d_mlp) * size
    return states + weights + distance_bytes(block, heads)


def hidden_width(block: Block, heads: HeadVectors) -> int:
    """Bytes that each pair of a chunk needs on its way through the feed-forward."""
    feed_forward = block.anatomy.feed_forward
    if feed_forward is None:
        return 0
    d_model, d_mlp = feed_forward.W_in.shape
    matrices = 1 if feed_forward.W_gate is None else 2
    # What oneDNN makes is added to what is there.
    per_pair = (matrices + 1) * min(d_mlp, NEURONS) + 9 * d_model + 2 * heads.heads
    # What is made once per key and head is spread over the queries.
    per_key = heads.heads * (5 * d_model + 2 * d_mlp + 2 * heads.d_head)
    return (per_pair + -(-per_key // block.resid_pre.shape[1])) * heads.dtype.itemsize
