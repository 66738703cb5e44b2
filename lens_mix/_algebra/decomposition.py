"""Shares of all input tokens, propagated through a block in chunks of queries (DecompX).

The share X_is of input token s in the residual stream at position i has d_model numbers for every pair. To
save memory, only two tensors are whole: the shares, which each block overwrites, and their values, because
every query reads those of many keys. All others are computed for a chunk of queries, and only for the input
tokens with a share in one of them. In a causal model, these are half of the pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix._algebra.bias_split import Split, through_linear_norm
from lens_mix._algebra.budget import budget_beside
from lens_mix._algebra.definitions import head_vectors
from lens_mix._algebra.linear_block import LinearBlock, Slope
from lens_mix._blocks.states import value_path

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block

# The hidden layer of one chunk has so many numbers; matrix products of fewer rows would be slower.
HIDDEN_ELEMENTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Shares:
    """Every input token's share of the residual stream at all positions.

    Attributes:
        vectors: The shares.
        stops: Per position, one more than the last input token with a share in it, in any prompt.
    """

    vectors: Float[Tensor, "batch pos input d_model"]
    stops: Int[Tensor, " pos"]


class Decomposition:
    """The decomposition of one block's output into shares, in chunks of queries.

    Args:
        block: The block.
        entering: The shares of the block's input; None if every position's vector is its own share.
        biases: The rule for biases (`split_bias`).
        slope: The linearisation of the activation, as in `DecompX`.
        keeps: Whether the shares themselves are stored, besides their lengths.

    Raises:
        ValueError: The smallest chunk does not fit into the block's `max_memory`.
    """

    def __init__(
        self, block: Block, entering: Shares | None, biases: Split, slope: Slope, keeps: bool = True
    ) -> None:
        self._block, self._entering, self._rule = block, entering, biases
        self._pairs = _chunk_pairs(block, keeps)
        self._linear = LinearBlock(block, slope, alone=entering is None)
        attended = (block.attended & block.real_queries[:, :, None]).any(0)
        ends = torch.arange(1, attended.shape[1] + 1, device=attended.device)
        stops = ends if entering is None else entering.stops
        # An input token reaches a row by the keys that the row attends to, or by the row's own residual
        # stream.
        self._stops = torch.maximum((attended * stops).amax(1), stops[block.queries].amax(0))
        self._values = self._key_vectors() if entering is None else self._read_values(entering)

    def carry(self) -> tuple[Float[Tensor, "batch query input"], Shares]:
        """Return the lengths of the output's shares, and the shares, which may overwrite `entering`."""
        block, entering = self._block, self._entering
        if entering is not None and block.every_query:
            vectors = entering.vectors
        else:
            vectors = block.zeros(*block.queries.shape, block.real.shape[1], block.resid_pre.shape[-1])
        lengths = self.lengths(vectors)
        return lengths, Shares(vectors, self._stops)

    def lengths(
        self, into: Float[Tensor, "batch query input d_model"] | None = None
    ) -> Float[Tensor, "batch query input"]:
        """Return ‖X_is‖ at the block's output, and write the shares into a given tensor."""
        block = self._block
        out, padding = block.zeros(*block.queries.shape, block.real.shape[1]), ~block.real_queries
        # A chunk reads the entering shares of its own rows only, so its result may overwrite them.
        for rows, stop in _chunks(self._stops, self._pairs):
            attention = self._attention(rows, stop)
            shares = self._linear.shares(self._residual(rows, stop), attention, self._rule, rows).output
            shares.masked_fill_(padding[:, rows, None, None], 0)
            out[:, rows, :stop] = torch.linalg.vector_norm(shares, dim=-1)
            if into is not None:
                into[:, rows, :stop] = shares
        return out

    def _key_vectors(self) -> Float[Tensor, "batch key head d_model"]:
        """Return the vector that each key sends through each head, with b_V, before the pattern."""
        states = self._linear.states
        value = states.value.to(states.resid_pre.dtype)
        return head_vectors(value, value_path(self._block).W_O.to(value.dtype))

    def _read_values(self, entering: Shares) -> Float[Tensor, "batch value_head key input d_head"]:
        """Return the values of the entering shares, without b_V."""
        vectors, W_V = entering.vectors, value_path(self._block).W_V
        of_heads = rearrange(W_V.to(vectors.dtype), "head d_model d_head -> d_model (head d_head)")
        out = vectors.new_zeros(len(vectors), len(W_V), *vectors.shape[1:3], W_V.shape[2])
        norm = self._linear.states.attention_input
        axes = "batch key input (head d_head) -> batch head key input d_head"
        for keys, stop in _chunks(entering.stops, self._pairs):
            read = through_linear_norm(norm, vectors[:, keys, :stop], self._rule, keys)
            out[:, :, keys, :stop] = rearrange(read @ of_heads, axes, head=len(W_V))
        return out

    def _residual(self, rows: slice, stop: int) -> Float[Tensor, "batch query input d_model"]:
        """Return the shares of these rows of the block's input."""
        queries = self._block.queries[:, rows]
        batch = torch.arange(len(queries), device=queries.device)[:, None]
        if self._entering is not None:
            vectors = self._entering.vectors[:, :, :stop]
            return vectors[:, rows] if self._block.every_query else vectors[batch, queries]
        x = self._linear.states.resid_pre[:, rows]
        out = x.new_zeros(*queries.shape, stop, x.shape[-1])
        out[batch, torch.arange(queries.shape[1], device=queries.device), queries] = x
        return out

    def _attention(self, rows: slice, stop: int) -> Float[Tensor, "batch query input d_model"]:
        """Return the shares of the attention's output: for each row and input token, the sum over keys."""
        pattern = self._linear.states.pattern[:, :, rows, :stop].to(self._values.dtype)
        if self._entering is None:
            axes = "batch head query key, batch key head d_model -> batch query key d_model"
            return einsum(pattern, self._values[:, :stop], axes).contiguous()
        values = self._values[:, :, :stop, :stop]
        # Heads that share their values are computed in one product.
        axes = "batch (head group) query key -> batch head (group query) key"
        mixed = rearrange(pattern, axes, head=values.shape[1]) @ values.flatten(3)
        axes = "batch head (group query) (input d_head) -> batch query input (head group d_head)"
        mixed = rearrange(mixed, axes, query=pattern.shape[2], input=stop)
        return mixed @ value_path(self._block).W_O.to(mixed.dtype).flatten(0, 1)


def carried(
    blocks: Sequence[Block], biases: Split, slope: Slope
) -> Iterator[tuple[Float[Tensor, "batch query input"], Float[Tensor, "batch query input d_model"]]]:
    """Yield the lengths of all shares, and the shares, after each block; the next block overwrites them.

    Args:
        blocks: The blocks from the first one up; all but the last have all rows.
        biases: As in `Decomposition`.
        slope: As in `Decomposition`.

    Raises:
        ValueError: As `Decomposition`.
    """
    entering: Shares | None = None
    for block in blocks:
        lengths, entering = Decomposition(block, entering, biases, slope).carry()
        yield lengths, entering.vectors


def hidden_width(block: Block) -> int:
    """Return the width of the widest vector: d_mlp, or d_model without a feed-forward."""
    feed_forward = block.anatomy.feed_forward
    return block.resid_pre.shape[-1] if feed_forward is None else len(feed_forward.W_out)


def _chunks(stops: Int[Tensor, " row"], pairs: int) -> Iterator[tuple[slice, int]]:
    """Yield chunks of at most `pairs` pairs of row and input token (or one row), with the largest stop."""
    start, stop = 0, 0
    for row, reached in enumerate(stops.tolist()):
        if row > start and max(stop, reached) * (row + 1 - start) > pairs:
            yield slice(start, row), stop
            start, stop = row, 0
        stop = max(stop, reached)
    yield slice(start, len(stops)), stop


def _chunk_pairs(block: Block, keeps: bool) -> int:
    """Return how many pairs of query and input token a chunk may have.

    Args:
        block: The block.
        keeps: Whether there are tensors of all shares and of their values.

    Raises:
        ValueError: The pairs of a single query do not fit into the block's `max_memory`.
    """
    (batch, queries, d_model), positions = block.resid_pre.shape, block.real.shape[1]
    path, feed_forward, d_mlp = value_path(block), block.anatomy.feed_forward, hidden_width(block)
    # Shares have float32 at least (`states_of`).
    size = max(4, block.resid_pre.dtype.itemsize)
    (value_heads, _, d_head), heads = path.W_V.shape, len(path.W_O)
    values = max(keeps * positions * value_heads * d_head, heads * (d_model + 2 * d_head))
    shares = batch * positions * (keeps * positions * d_model + values) * size
    states = batch * queries * (12 * d_model + 3 * heads * d_head + 3 * positions) * size
    weights, pair = 2 * heads * d_head * d_model, 9 * d_model + 2 * heads * d_head
    if feed_forward is not None:
        matrices = 1 if feed_forward.W_gate is None else 2
        # The slopes of activations are computed in float64, which has eight bytes.
        states += batch * queries * matrices * d_mlp * (6 * 8 + 3 * size)
        weights += (feed_forward.W_in.dtype.itemsize != size) * (matrices + 1) * d_model * d_mlp
        pair += (matrices + 1) * d_mlp
    fixed, pair = shares + states + weights * size, pair * size
    budget = budget_beside(block, fixed, block.real.numel() * pair, "DecompX")
    pairs = HIDDEN_ELEMENTS // d_mlp
    return (pairs if budget is None else min(pairs, budget // pair)) // batch
