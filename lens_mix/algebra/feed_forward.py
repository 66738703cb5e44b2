"""A block's vectors through its feed-forward, by integrated gradients in closed form.

For each query i the feed-forward, held linear along the path of the integrated gradients, is one linear map
of what it reads,

    share(v) = ((n(v) W_in) ⊙ m_i) W_out                                plain
    share(v) = ((n(v) W_gate) ⊙ m_gate_i + (n(v) W_in) ⊙ m_up_i) W_out   gated

with n the linear part of the norm before it. The first matrix is applied once per key and head, the second
once per pair: 2 · pairs · d_mlp · d_model operations are the floor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lens_mix.algebra.activations import gated_multipliers, plain_multiplier
from lens_mix.algebra.budget import (
    NEURONS,
    feed_forward_bytes,
    hidden_width,
    least_attention_room,
    room_beside,
    state_bytes,
)
from lens_mix.algebra.folded_weights import folded, pays
from lens_mix.algebra.head_vectors import HeadVectors
from lens_mix.algebra.large_product import add_product, as_right_factor, copy_bytes
from lens_mix.algebra.pair_norms import workspace
from lens_mix.algebra.vectors import (
    AttentionVectors,
    Vectors,
    attention_vectors,
    head_vectors,
    linear_part,
    value_path,
)
from lens_mix.algebra.workspace import Workspace, even
from lens_mix.lens.anatomy import BlockAnatomy, FeedForward, Norm

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

Variant = Literal["on_path", "fixed"]

# Pairs of one step times neurons: enough rows for a matrix product at full speed.
HIDDEN_ELEMENTS = 4 << 20
# What the first matrix makes of one slab of keys, per head: numbers.
SLAB_ELEMENTS = 4 << 20

_shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclasses.dataclass(frozen=True)
class FeedForwardShares:
    """One block's feed-forward as one linear map per query.

    Attributes:
        anatomy: the block's.
        input_scale: what the norm before the feed-forward divides by, 1 without one.
        multipliers: (first matrix, m) once for a plain feed-forward, twice for a gated one.
        W_out: the second matrix.
        read: what the feed-forward truly reads.
        mid: the true middle of the block.
    """

    anatomy: BlockAnatomy
    input_scale: Float[Tensor, "batch pos 1"]
    multipliers: tuple[tuple[Float[Tensor, "d_model d_mlp"], Float[Tensor, "batch pos d_mlp"]], ...]
    W_out: Float[Tensor, "d_mlp d_model"]
    read: Float[Tensor, "batch pos d_model"]
    mid: Float[Tensor, "batch pos d_model"]

    @functools.cached_property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """The true output of the feed-forward, biases included; only a norm behind it asks for it."""
        if self.anatomy.feed_forward is None:
            raise RuntimeError("the output of a feed-forward was asked of a block that has none")
        return self.anatomy.feed_forward(self.read)

    @functools.cached_property
    def summed(self) -> Float[Tensor, "batch pos d_model"]:
        """The true sum of residual stream and branch."""
        norm = self.anatomy.feed_forward_branch
        branch = self.output if norm is None else norm(self.output)
        return self.mid + branch * self.anatomy.residual_multiplier

    def share(self, vectors: Float[Tensor, "*batch pos d_model"]) -> Float[Tensor, "*batch pos d_model"]:
        """What the feed-forward makes of shares of what it reads (before its norm)."""
        read = linear_part(self.anatomy.feed_forward_input, vectors) / self.input_scale
        (W, m), *others = self.multipliers
        hidden = (read @ W).mul_(m)
        for W, m in others:
            hidden.addcmul_(read @ W, m)
        return hidden @ self.W_out

    def joined(self, shares: Float[Tensor, "*batch pos d_model"]) -> Float[Tensor, "*batch pos d_model"]:
        """What shares of the feed-forward's output add to the residual stream."""
        norm = self.anatomy.feed_forward_branch
        if norm is not None:
            shares = linear_part(norm, shares) / norm.scale(self.output)
        return shares * self.anatomy.residual_multiplier

    def after(self, vectors: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Shares of the middle of the block -> shares of its output, one vector per query."""
        out = vectors if self.anatomy.parallel else vectors + self.joined(self.share(vectors))
        norm = self.anatomy.feed_forward_residual
        return out if norm is None else linear_part(norm, out) / norm.scale(self.summed)


def feed_forward_shares(block: Block, vectors: AttentionVectors, biases: Variant) -> FeedForwardShares:
    """The block's feed-forward at its true states.

    Args:
        block: a block whose feed-forward is plain or gated.
        vectors: its vectors up to the feed-forward.
        biases: "on_path" or "fixed", see `AtbFf`.
    """
    anatomy = block.anatomy
    feed_forward = anatomy.feed_forward
    if feed_forward is None:
        raise ValueError(
            f"block {block.layer}: expected a plain or gated feed-forward, got {anatomy.feed_forward_kind!r}"
        )
    state = vectors.resid_pre if anatomy.parallel else vectors.mid
    shares = vectors.resid_pre if anatomy.parallel else vectors.normed.total
    norm = anatomy.feed_forward_input
    scale = torch.ones_like(state[..., :1]) if norm is None else norm.scale(state)
    read = state if norm is None else norm(state)
    multipliers = _multipliers(feed_forward, read, linear_part(norm, shares) / scale, biases)
    W_out = feed_forward.W_out.to(state.dtype)
    return FeedForwardShares(anatomy, scale, multipliers, W_out, read, vectors.mid)


def _multipliers(
    feed_forward: FeedForward, read: Tensor, shares: Tensor, biases: Variant
) -> tuple[tuple[Tensor, Tensor], ...]:
    """(first matrix, m) pairs; `shares` is the sum of all vectors' shares of `read`."""
    dtype = read.dtype

    def ends(W: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        end = (read @ W).double()
        if bias is not None:
            end = end + bias.double()
        return end, None if biases == "on_path" else end - (shares @ W).double()

    W_in = feed_forward.W_in.to(dtype)
    if feed_forward.W_gate is None:
        m = plain_multiplier(feed_forward.activation, *ends(W_in, feed_forward.b_in))
        return ((W_in, m.to(dtype)),)
    W_gate = feed_forward.W_gate.to(dtype)
    gate, up = gated_multipliers(
        feed_forward.activation, *ends(W_gate, feed_forward.b_gate), *ends(W_in, feed_forward.b_in)
    )
    return ((W_gate, gate.to(dtype)), (W_in, up.to(dtype)))


@dataclasses.dataclass(frozen=True)
class FeedForwardMaps:
    """Norms of all pairs: the feed-forward's output, with the residual stream, after the last norm."""

    output: Float[Tensor, "batch query key"]
    residual: Float[Tensor, "batch query key"]
    normed: Float[Tensor, "batch query key"]


def feed_forward_maps(block: Block, biases: Variant, reading: Norm | None = None) -> FeedForwardMaps:
    """The three maps of one block; the methods of one run share them.

    Args:
        block: a block whose feed-forward is plain or gated.
        biases: "on_path" or "fixed", see `AtbFf`.
        reading: a norm to apply last where the block has none there (it reads the block's output).

    Raises:
        ValueError: the smallest pieces don't fit into the block's `max_memory`.
    """
    if block.max_memory is not None:
        return _maps(block, biases, reading)
    kept = _shared.setdefault(block.recorded("pattern"), {})
    key = (biases, reading is None)
    if key not in kept:
        kept[key] = _maps(block, biases, reading)
    return kept[key]


def _maps(block: Block, biases: Variant, reading: Norm | None) -> FeedForwardMaps:
    heads = head_vectors(block)
    fixed = state_bytes(block, heads) + feed_forward_bytes(block, heads, folds(heads))
    if block.anatomy.feed_forward is not None:
        fixed += copy_bytes(block.anatomy.feed_forward.W_out, heads.dtype.itemsize)
    least = least_attention_room(block, heads)
    if block.anatomy.parallel:
        heads.room = room_beside(block, fixed, least, "a map behind the feed-forward")
        vectors = attention_vectors(block, heads)
        return _parallel(vectors, feed_forward_shares(block, vectors, biases), reading)
    batch, queries = block.resid_pre.shape[:2]
    width = hidden_width(block, heads)
    heads.room = room_beside(block, fixed, batch * queries * width, "a map behind the feed-forward")
    vectors = attention_vectors(block, heads)
    return _sequential(block, vectors.normed, feed_forward_shares(block, vectors, biases), reading)


def _last_norm(shares: FeedForwardShares, reading: Norm | None) -> Norm | None:
    own = shares.anatomy.feed_forward_residual
    return reading if own is None else own


def _parallel(vectors: AttentionVectors, shares: FeedForwardShares, reading: Norm | None) -> FeedForwardMaps:
    """The feed-forward reads the block's input: all it adds belongs to the diagonal."""
    own = shares.share(vectors.resid_pre)
    residual = vectors.normed.plus_own(shares.joined(own))
    output = torch.diag_embed(torch.linalg.vector_norm(own, dim=-1))
    normed = residual.through(_last_norm(shares, reading), shares.summed)
    return FeedForwardMaps(output, residual.norms(), normed.norms())


def _sequential(
    block: Block, vectors: Vectors, shares: FeedForwardShares, reading: Norm | None
) -> FeedForwardMaps:
    norm = _last_norm(shares, reading)
    batch, _, queries, keys = vectors.pairs.pattern.shape
    maps = [vectors.total.new_zeros((batch, keys, queries)) for _ in range(3)]
    heads = vectors.pairs.heads
    memory, room = workspace(heads), heads.room
    first = FirstLayer(block, vectors, shares, memory)
    if room is None:
        room, width = HIDDEN_ELEMENTS, shares.W_out.shape[0] * len(shares.multipliers)
        slab = max(1, SLAB_ELEMENTS // (batch * heads.heads * width))
    else:
        width = hidden_width(block, heads)
        slab = max(1, room // (batch * queries * width))
    matrices = heads.matrices_after(vectors.pairs.chain, memory)
    W_out = as_right_factor(shares.W_out, batch * queries * keys)
    for some in even(0, keys, slab):
        # Once per key and head, for as many keys as suits a product.
        slab_vectors, slab_hidden = heads.lying_in(memory, "vectors", matrices, some), first.by_head(some)
        for chunk, seen in vectors.pairs.chunks(width, room, some):
            here = slice(chunk.start - some.start, chunk.stop - some.start)
            weights = vectors.pairs.weights_of(chunk)[:, :, seen]
            output = first.through(W_out, [part[:, here] for part in slab_hidden], seen, weights)
            maps[0][:, chunk, seen] = torch.linalg.vector_norm(output, dim=-1)
            part = memory.like("pairs", output, output.shape, output.dtype)
            torch.bmm(weights.flatten(0, 1), slab_vectors[:, here].flatten(0, 1), out=part.flatten(0, 1))
            torch.addcmul(_joined(shares, output, seen), part, vectors.scale[:, None, seen], out=part)
            maps[1][:, chunk, seen] = torch.linalg.vector_norm(part, dim=-1)
            if norm is not None:
                maps[2][:, chunk, seen] = torch.linalg.vector_norm(linear_part(norm, part), dim=-1)
    own = vectors.diagonal()
    output = shares.share(own)
    residual = own + shares.joined(output)
    results = [found.transpose(1, 2) for found in maps]
    for found, explicit in zip(results, (output, residual, linear_part(norm, residual)), strict=True):
        found.diagonal(dim1=1, dim2=2).copy_(torch.linalg.vector_norm(explicit, dim=-1))
    normed = results[1] if norm is None else results[2] / norm.scale(shares.summed)
    return FeedForwardMaps(results[0], results[1], normed)


def _joined(shares: FeedForwardShares, output: Tensor, seen: slice) -> Tensor:
    norm = shares.anatomy.feed_forward_branch
    if norm is not None:
        output = linear_part(norm, output) / norm.scale(shares.output)[:, None, seen]
    multiplier = shares.anatomy.residual_multiplier
    return output if multiplier == 1 else output * multiplier


def folds(heads: HeadVectors) -> bool:
    """Whether W_O and the first matrix are folded even where they can't be kept."""
    return pays(heads.value.shape[0] * heads.value.shape[1], heads.heads, heads.d_head)


class FirstLayer:
    """The hidden layer's shares of all pairs, from the first matrix applied once per key and head.

    Args:
        block: the block.
        vectors: what the feed-forward reads, before its norm.
        shares: the feed-forward.
        memory: what a chunk's pairs lie in.
    """

    def __init__(self, block: Block, vectors: Vectors, shares: FeedForwardShares, memory: Workspace) -> None:
        self._vectors, self._shares, self._memory = vectors, shares, memory
        self._norm = shares.anatomy.feed_forward_input
        scale = vectors.scale / shares.input_scale
        self._multipliers = [m * scale for _, m in shares.multipliers]
        heads = vectors.pairs.heads
        self._folded = folded(
            block.anatomy,
            value_path(block),
            list(range(heads.heads)),
            heads.value.shape[0] * heads.value.shape[1],
            vectors.total.dtype,
            keep=block.max_memory is None,
            matrices=[matrix for matrix, _ in shares.multipliers],
        )

    def by_head(self, keys: slice) -> list[Float[Tensor, "batch key head d_mlp"]]:
        """The first matrix, or both, applied once per key and head."""
        return [self._by_head(index, keys) for index in range(len(self._multipliers))]

    def through(
        self,
        W_out: Float[Tensor, "d_mlp d_model"],
        by_head: Sequence[Float[Tensor, "batch key head d_mlp"]],
        seen: slice,
        weights: Float[Tensor, "batch key query head"],
    ) -> Float[Tensor, "batch key query d_model"]:
        """What the second matrix makes of a chunk's pairs, some neurons at a time, as the caches like."""
        shape = (*weights.shape[:-1], W_out.shape[1])
        output = self._memory.like("feed-forward output", weights, shape, weights.dtype).zero_()
        for columns in even(0, len(W_out), NEURONS):
            hidden = self._hidden(columns, seen, weights, by_head)
            add_product(output.flatten(0, 2), hidden.flatten(0, 2), W_out[columns])
        return output

    def _by_head(self, index: int, keys: slice) -> Float[Tensor, "batch key head d_mlp"]:
        """One first matrix, applied once per key and head."""
        pairs = self._vectors.pairs
        if self._folded is None:
            W, _ = self._shares.multipliers[index]
            return linear_part(self._norm, pairs.vectors_of(keys)) @ W
        return pairs.heads.lying_in(self._memory, f"first matrix {index}", self._folded[index], keys)

    def _hidden(
        self,
        columns: slice,
        seen: slice,
        weights: Float[Tensor, "batch key query head"],
        by_head: Sequence[Float[Tensor, "batch key head d_mlp"]],
    ) -> Float[Tensor, "batch key query column"]:
        """Σ_h a_ijh (w_jh W) ⊙ m_i of some neurons, both matrices of a gated feed-forward added."""
        shape = (*weights.shape[:-1], columns.stop - columns.start)
        total: Tensor | None = None
        for index, (vectors, m) in enumerate(zip(by_head, self._multipliers, strict=True)):
            out = self._memory.like(f"hidden {index}", weights, shape, weights.dtype)
            torch.bmm(weights.flatten(0, 1), vectors[..., columns].flatten(0, 1), out=out.flatten(0, 1))
            of_queries = m[:, None, seen, columns]
            total = out.mul_(of_queries) if total is None else total.addcmul_(out, of_queries)
        if total is None:
            raise RuntimeError("multipliers: expected at least one first matrix, got none")
        return total


def next_norm(blocks: Sequence[Block], layer: int) -> Norm | None:
    """The norm that reads a block's output: the next block's first one, after the last the final one."""
    if layer + 1 < len(blocks):
        return blocks[layer + 1].anatomy.attention_input
    return blocks[layer].final_norm()
