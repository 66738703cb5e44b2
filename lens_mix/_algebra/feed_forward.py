"""A block's vectors after its feed-forward, by integrated gradients in closed form.

For each query i, integrated gradients make the feed-forward one linear map of its input,

    share(v) = ((n(v) W_in) ⊙ m_i) W_out                                plain
    share(v) = ((n(v) W_gate) ⊙ m_gate_i + (n(v) W_in) ⊙ m_up_i) W_out   gated

where n is the linear part of the norm before it. `FeedForwardShares.share` is this definition. For many
queries, W_in is applied once per key and head (`_ByHead`), while W_out has to be applied once per pair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._algebra.activations import path_multipliers
from lens_mix._algebra.budget import (
    NEURONS,
    attention_budget,
    chunk_size,
    chunks,
    feed_forward_bytes,
    hidden_bytes,
)
from lens_mix._algebra.folded_weights import folded, pays
from lens_mix._algebra.pair_norms import by_key
from lens_mix._algebra.vectors import AttentionVectors, Vectors, attention_vectors, head_vectors
from lens_mix._blocks.states import BlockStates, shared, value_path
from lens_mix._model.anatomy import BlockAnatomy, FeedForward, LinearNorm, Norm

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block

Variant = Literal["on_path", "fixed"]

_PAIRS = 1400  # One chunk has so many pairs; the product of fewer rows would be slower.


# ------------------------------------------------------------------ the feed-forward as a linear map


@dataclasses.dataclass(frozen=True)
class FeedForwardShares:
    """One block's feed-forward as one linear map per query.

    Attributes:
        states: The block's states, at which its norms are linearised.
        feed_forward: The feed-forward's matrices.
        multipliers: (W_in, m) for a plain feed-forward; (W_gate, m_gate) and (W_in, m_up) for a gated one.
        W_out: The output matrix in the dtype of the states.
    """

    states: BlockStates
    feed_forward: FeedForward
    multipliers: tuple[tuple[Float[Tensor, "d_model d_mlp"], Float[Tensor, "batch query d_mlp"]], ...]
    W_out: Float[Tensor, "d_mlp d_model"]

    def share(
        self, vectors: Float[Tensor, "batch query *key d_model"]
    ) -> Float[Tensor, "batch query *key d_model"]:
        """Return shares of the feed-forward's output from shares of its input (before its norm)."""
        read = self.states.feed_forward_input(vectors)
        (W, m), *others = self.multipliers
        hidden = (read @ W).mul_(_beside(m, vectors))
        for W, m in others:
            hidden.addcmul_(read @ W, _beside(m, vectors))
        return hidden @ self.W_out

    def joined(
        self, shares: Float[Tensor, "batch row *key d_model"], rows: slice = slice(None)
    ) -> Float[Tensor, "batch row *key d_model"]:
        """Return the vectors that shares of some rows' feed-forward output add to the residual stream."""
        shares = self.states.feed_forward_branch(shares, rows)
        multiplier = self.states.anatomy.residual_multiplier
        return shares if multiplier == 1 else shares * multiplier

    def after(self, vectors: Float[Tensor, "batch query d_model"]) -> Float[Tensor, "batch query d_model"]:
        """Return shares of the block's output from shares before its feed-forward, one per query."""
        parallel = self.states.anatomy.parallel
        out = vectors if parallel else vectors + self.joined(self.share(vectors))
        return self.states.feed_forward_residual(out)


def _beside(of_query: Float[Tensor, "batch query width"], vectors: Tensor) -> Tensor:
    """Return a vector per query with an axis for keys if `vectors` has one."""
    return of_query if vectors.ndim == 3 else of_query[:, :, None]


def feed_forward_shares(
    block: Block, biases: Variant = "on_path", vectors: AttentionVectors | None = None
) -> FeedForwardShares:
    """Return a block's plain or gated feed-forward as one linear map per query, at its states.

        >>> class FeedForwardNorm(lm.Method):
        ...     name, residual, engines = "feed_forward_norm", 0.5, ("algebra",)
        ...     records = frozenset({"pattern", "value"})
        ...     needs = frozenset({"projection", "residual", "feed_forward"})
        ...
        ...     def __call__(self, block):
        ...         keys = lm.models.block_parts(block).keys
        ...         return lm.models.feed_forward_shares(block).share(keys).norm(dim=-1)
        >>> lm.run(model, "The Eiffel Tower is in the city of", FeedForwardNorm()).top(3)

    Args:
        block: A block whose clean pass recorded "pattern" and "value", and whose attention is verified.
        biases: "on_path" or "fixed", see `AtbFf`.
        vectors: The vectors of the block; None to compute them.

    Raises:
        ValueError: The block has another kind of feed-forward.
    """
    vectors = attention_vectors(block) if vectors is None else vectors
    states, feed_forward, without_biases = vectors.states, _feed_forward(block), None
    if biases == "fixed":
        shares = states.resid_pre if block.anatomy.parallel else vectors.normed.total
        without_biases = states.feed_forward_input(shares)
    multipliers = _multipliers(feed_forward, states, without_biases)
    return FeedForwardShares(states, feed_forward, multipliers, feed_forward.W_out.to(states.read.dtype))


def unsupported_feed_forward(anatomy: BlockAnatomy) -> str | None:
    """Return why vectors can't be propagated through the feed-forward; None if they can."""
    if anatomy.cross:
        return (
            "expected a block without cross-attention, got cross-attention between self-attention and "
            "feed-forward, which reads the other part too"
        )
    if anatomy.feed_forward is None:
        kind = anatomy.feed_forward_kind
        return f"expected a plain or gated feed-forward, found {kind!r}; attn_res stops before it"
    return None


def _feed_forward(block: Block) -> FeedForward:
    if block.anatomy.feed_forward is None:
        kind = block.anatomy.feed_forward_kind
        raise ValueError(f"block {block.layer}: expected a plain or gated feed-forward, got {kind!r}")
    return block.anatomy.feed_forward


def _multipliers(
    feed_forward: FeedForward, states: BlockStates, shares: Tensor | None
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return (matrix, m) pairs; paths start without the sum of shares of the input, or at 0 for None."""
    dtype, activation = states.read.dtype, feed_forward.activation
    matrices = [matrix.to(dtype) for matrix in feed_forward.input_matrices]
    # m is a quotient of differences, which needs float64.
    ends = [x.double() for x in states.pre_activations]
    starts = None
    if shares is not None:
        starts = [end - (shares @ W).double() for W, end in zip(matrices, ends, strict=True)]
    multipliers = path_multipliers(activation, ends, starts)
    return tuple((W, m.to(dtype)) for W, m in zip(matrices, multipliers, strict=True))


# ------------------------------------------------------------------ the maps


@dataclasses.dataclass(frozen=True)
class FeedForwardMaps:
    """Norms of all pairs' vectors: in the feed-forward's output, in the block's, and after the last norm."""

    output: Float[Tensor, "batch query key"]
    residual: Float[Tensor, "batch query key"]
    normed: Float[Tensor, "batch query key"]


def feed_forward_maps(block: Block, biases: Variant, reading: Norm | None = None) -> FeedForwardMaps:
    """Return the three maps of one block, which the methods of one run share.

    Args:
        block: A block whose feed-forward is plain or gated.
        biases: "on_path" or "fixed", see `AtbFf`.
        reading: The norm that reads the block's output, applied if the block does not end in a norm.

    Raises:
        ValueError: The smallest chunks don't fit into the block's `max_memory`.
    """
    return shared(block, ("feed-forward", biases, reading is None), lambda: _maps(block, biases, reading))


def _maps(block: Block, biases: Variant, reading: Norm | None) -> FeedForwardMaps:
    heads, anatomy = head_vectors(block), block.anatomy
    feed_forward = _feed_forward(block)
    # The product is worth computing even if it is not stored.
    values = heads.value.shape[:2].numel() * heads.heads
    is_folded = pays(values, values, heads.matrices)
    beside, least = feed_forward_bytes(block, heads, feed_forward, is_folded), 0
    if not anatomy.parallel:  # In a parallel block, no pair depends on the feed-forward.
        batch, queries = block.resid_pre.shape[:2]
        least = batch * queries * hidden_bytes(heads, feed_forward, queries)
    heads.budget = attention_budget(block, heads, beside, least, "a map after the feed-forward")
    vectors = attention_vectors(block, heads)
    shares = feed_forward_shares(block, biases, vectors)
    last = shares.states.feed_forward_residual
    if reading is not None and last.norm is None:
        last = reading.linear_at(shares.states.feed_forward_sum)
    if anatomy.parallel:
        return _parallel(vectors, shares, last)
    return _sequential(block, vectors.normed, shares, last)


def _parallel(vectors: AttentionVectors, shares: FeedForwardShares, last: LinearNorm) -> FeedForwardMaps:
    """Return the maps of a parallel block: its feed-forward reads the input, so it adds to the diagonal."""
    added = shares.share(shares.states.resid_pre)
    residual = vectors.normed.plus(shares.joined(added))
    output = torch.zeros_like(residual.pairs.norms)
    residual.pairs.put_diagonal(output, torch.linalg.vector_norm(added, dim=-1))
    return FeedForwardMaps(output, residual.norms(), residual.through(last).norms())


def _sequential(
    block: Block, vectors: Vectors, shares: FeedForwardShares, last: LinearNorm
) -> FeedForwardMaps:
    norm, pairs, (batch, _, queries, keys) = last.norm, vectors.pairs, vectors.pairs.pattern.shape
    # The key axis is first, because chunks are of keys.
    maps = [vectors.scale.new_zeros((batch, keys, queries)) for _ in range(3)]
    by_head = None if pairs.writes_out else _ByHead(block, vectors, shares)
    pair_chunks = _written_out(vectors, shares) if by_head is None else by_head.chunks()
    for chunk, rows, residual, output in pair_chunks:
        maps[0][:, chunk, rows] = torch.linalg.vector_norm(output, dim=-1)
        maps[1][:, chunk, rows] = torch.linalg.vector_norm(residual, dim=-1)
        if norm is not None:
            maps[2][:, chunk, rows] = torch.linalg.vector_norm(norm.linear_part(residual), dim=-1)
    output = shares.share(vectors.diagonal)
    explicit = [output, vectors.diagonal + shares.joined(output)]
    explicit += [] if norm is None else [norm.linear_part(explicit[-1])]
    results = [scores.transpose(1, 2) for scores in maps]
    for result, diagonal in zip(results, explicit, strict=False):
        pairs.put_diagonal(result, torch.linalg.vector_norm(diagonal, dim=-1))
    # Dividing by a row's scale here is cheaper than for each of its pairs.
    normed = results[1] if norm is None else results[2] / last.scale
    return FeedForwardMaps(results[0], results[1], normed)


# The keys, the rows, the pairs' vectors in the block's output, and in the feed-forward's output.
_PairChunk = tuple[
    slice, slice, Float[Tensor, "batch key row d_model"], Float[Tensor, "batch key row d_model"]
]


def _written_out(vectors: Vectors, shares: FeedForwardShares) -> Iterator[_PairChunk]:
    """Yield chunks by the definition: every pair's vector is multiplied by W_in and W_out."""
    width = 3 * sum(m.shape[-1] for _, m in shares.multipliers)
    for chunk, pairs in vectors.pairs.written_out_chunks(more=width * vectors.scale.dtype.itemsize):
        pairs = pairs.mul_(vectors.scale[..., None])
        output = shares.share(pairs)
        residual = pairs + shares.joined(output)
        yield chunk, slice(None), residual.transpose(1, 2), output.transpose(1, 2)


class _ByHead:
    """The hidden layer with W_in applied once per key and head; each pair mixes the vectors of its heads.

    Args:
        block: The block.
        vectors: The vectors of the feed-forward's input, before its norm.
        shares: The feed-forward.
    """

    def __init__(self, block: Block, vectors: Vectors, shares: FeedForwardShares) -> None:
        self._pairs, self._scale, self._shares = vectors.pairs, vectors.scale, shares
        # A row's scale is included in its multipliers, which costs less than scaling each pair.
        norm_scale = shares.states.feed_forward_input.scale
        self._multipliers = [m * (vectors.scale / norm_scale) for _, m in shares.multipliers]
        heads = vectors.pairs.heads
        vectors_in_all, path = heads.value.shape[:2].numel() * heads.heads, value_path(block)
        matrices, keep = [W for W, _ in shares.multipliers], block.max_memory is None
        self._folded = folded(block.anatomy, path, vectors_in_all, heads.dtype, keep, matrices)
        self._W_O = heads.after(vectors.pairs.chain)
        self._W_out = shares.W_out.split(NEURONS)
        self._pair_bytes = hidden_bytes(heads, shares.feed_forward, vectors.pairs.pattern.shape[2])

    def chunks(self) -> Iterator[_PairChunk]:
        """Yield all pairs in chunks of keys, with the rows that may attend to one of these keys."""
        pairs, heads, (batch, _, queries, keys) = self._pairs, self._pairs.heads, self._pairs.pattern.shape
        ranges = pairs.ranges()
        for large_chunk, key_chunks in self._key_chunks(batch, queries, keys):
            key_vectors, hidden = heads.times(self._W_O, large_chunk), self._hidden_by_head(large_chunk)
            for chunk in key_chunks:
                attended = [ranges[key] for key in range(chunk.start, chunk.stop) if ranges[key][1]]
                if attended:
                    rows = slice(min(first for first, _ in attended), max(stop for _, stop in attended))
                    here = slice(chunk.start - large_chunk.start, chunk.stop - large_chunk.start)
                    pattern = pairs.pattern[:, :, rows, chunk]
                    shape = (batch, pattern.shape[3], heads.heads, pattern.shape[2])
                    weights = by_key(pattern, heads.value.new_empty(shape)).mT
                    output = self._output(rows, weights, [vectors[:, here] for vectors in hidden])
                    # `joined` expects the axes in the order batch, query, key.
                    joined = self._shares.joined(output.transpose(1, 2), rows).transpose(1, 2)
                    residual = (weights @ key_vectors[:, here]).mul_(self._scale[:, None, rows]).add_(joined)
                    yield chunk, rows, residual, output

    def _key_chunks(self, batch: int, queries: int, keys: int) -> Iterator[tuple[slice, Iterator[slice]]]:
        """Yield chunks of keys for W_in, each with the smaller chunks for W_out."""
        heads, row = self._pairs.heads, batch * queries * self._pair_bytes
        width = self._shares.W_out.shape[0] * len(self._multipliers)
        size = chunk_size(row, heads.value.device, heads.budget, _PAIRS * self._pair_bytes)
        at_once = size
        # Under a memory bound both have one size, because `hidden_bytes` also counts the tensors of a key.
        if heads.budget is None:
            row = batch * heads.heads * width * heads.dtype.itemsize
            at_once = chunk_size(row, heads.value.device, None)
        for chunk in chunks(0, keys, at_once):
            yield chunk, chunks(chunk.start, chunk.stop, size)

    def _hidden_by_head(self, keys: slice) -> list[Float[Tensor, "batch key head d_mlp"]]:
        """Return each input matrix applied to the vectors of these keys, once per key and head."""
        heads = self._pairs.heads
        if self._folded is not None:
            return [heads.times(matrices, keys) for matrices in self._folded]
        vectors = heads.times(heads.after(self._pairs.chain), keys)
        norm = self._shares.states.anatomy.feed_forward_input
        read = vectors if norm is None else norm.linear_part(vectors)
        return [read @ W for W, _ in self._shares.multipliers]

    def _output(
        self,
        rows: slice,
        weights: Float[Tensor, "batch key row head"],
        hidden: list[Float[Tensor, "batch key head d_mlp"]],
    ) -> Float[Tensor, "batch key row d_model"]:
        """Return (Σ_h a_ijh (w_jh W_in) ⊙ m_i) W_out, in chunks of neurons that fit a CPU's caches."""
        heads, last = weights.flatten(0, 1), 0
        output = weights.new_zeros((*weights.shape[:-1], self._shares.W_out.shape[1]))
        for W_out in self._W_out:
            neurons = slice(last, last := last + len(W_out))
            mixed: Tensor | None = None
            for vectors, m in zip(hidden, self._multipliers, strict=True):
                out = torch.bmm(heads, vectors[..., neurons].flatten(0, 1)).unflatten(0, weights.shape[:2])
                of_rows = m[:, None, rows, neurons]
                mixed = out.mul_(of_rows) if mixed is None else mixed.addcmul_(out, of_rows)
            if mixed is not None:
                output.flatten(0, 2).addmm_(mixed.flatten(0, 2), W_out)
        return output
