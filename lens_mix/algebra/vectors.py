"""The vectors that a block sends from key to query, kept as factors: no query × key × d_model tensor.

Before the feed-forward, the vector that query i got from key j is, at every stage of every block,

    F_ij = scale_i Σ_h a_ijh w_jh + δ_ij own_i

where a is the pattern, w one vector per key and head, and scale one number per query. It starts with
w_jh = u_jh = v_jh W_O^h (b_V in, b_O never; Kobayashi et al., EMNLP 2020, eq. 3), scale 1 and own 0. Adding
the residual stream changes own; a norm's linear part γ ⊙ (v - mean v) / s_i, s_i taken from the true state,
changes w, own and scale. So ‖F_ij‖ needs an H × H factor per key (`lens_mix.algebra.head_vectors`), the norm
of Σ_j F_ij no pair at all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lens_mix.algebra.budget import attention_room
from lens_mix.algebra.head_vectors import (
    SLAB_BYTES,
    Chain,
    HeadVectors,
    by_key,
    chunk_bytes,
    linear_part,
    through,
)
from lens_mix.algebra.pair_norms import PairNorms, workspace
from lens_mix.algebra.workspace import even
from lens_mix.lens.anatomy import Norm, ValuePath

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

# Bytes of one block's norms that are kept while the clean pass lives, so that the methods of one run share
# them. What is larger, and every state and vector, is kept for the block that was read last: fresh memory for
# each block would cost more time than the states do.
SHARED_BYTES = 1 << 23

_shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_last: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Pairs:
    """Σ_h a_ijh w_jh for all pairs, as factors.

    Args:
        pattern: a.
        heads: u, one vector per key and head.
        chain: norms that made w of u.
        before: the same without the last of these norms.
        together: norms of these pairs that another run of the same block made.
    """

    def __init__(
        self,
        pattern: Float[Tensor, "batch head query key"],
        heads: HeadVectors,
        chain: Chain = (),
        before: Pairs | None = None,
        together: PairNorms | None = None,
    ) -> None:
        self.pattern, self.heads, self.chain = pattern, heads, chain
        self._before = before
        self.together = PairNorms(pattern, heads) if together is None else together
        self.together.expect(chain)
        self._vectors: Tensor | None = None
        self._ranges: list[tuple[int, int]] | None = None

    def weights_of(self, keys: slice) -> Float[Tensor, "batch key query head"]:
        """a for some keys, the key first and the heads last, made anew: what products with w need."""
        pattern = self.pattern[..., keys]
        batch, heads, queries, count = pattern.shape
        out = pattern.new_empty((batch, count, heads, queries), dtype=self.heads.dtype)
        return by_key(pattern, out).transpose(2, 3)

    @property
    def vectors(self) -> Float[Tensor, "batch key head d_model"]:
        """All w, one vector per key and head; made when first asked for (see also `vectors_of`)."""
        if self._vectors is None:
            self._vectors = self.vectors_of(slice(None))
        return self._vectors

    def vectors_of(self, keys: slice) -> Float[Tensor, "batch key head d_model"]:
        """w of some keys, made anew."""
        return self.heads.of(self.chain, keys)

    def through(self, norm: Norm | None) -> Pairs:
        """The same after a norm's linear part."""
        return (
            self
            if norm is None
            else Pairs(self.pattern, self.heads, (*self.chain, norm), self, self.together)
        )

    def norms(self) -> Float[Tensor, "batch query key"]:
        """Euclidean norms of all pairs; computed once, for all stages of the block together."""
        return self.together.norms(self.chain)

    def own(self) -> Float[Tensor, "batch query d_model"]:
        """The pairs of each position with itself, as vectors."""
        return through(self.chain, self.together.own())

    def head_norms(self) -> Float[Tensor, "batch key head"]:
        """Euclidean norms of the vectors w."""
        return self.together.head_norms(self.chain)

    def ranges(self) -> list[tuple[int, int]]:
        """Per key the first query that gives it any weight, and the one after the last; (0, 0) for none."""
        if self._before is not None:
            return self._before.ranges()
        if self._ranges is None:
            # As numbers: the position of every query that gives weight, 0 where none does.
            seen = (self.pattern != 0).flatten(0, 1).any(0)
            queries = torch.arange(1, len(seen) + 1, device=seen.device)[:, None]
            last = (seen * queries).amax(0)
            first = len(seen) - (seen * queries.flip(0)).amax(0)
            first = torch.where(last > 0, first, torch.zeros_like(first))
            self._ranges = list(zip(first.tolist(), last.tolist(), strict=True))
        return self._ranges

    def chunks(self, width: int, room: int, keys: slice) -> Iterator[tuple[slice, slice]]:
        """Chunks of some keys, each with the range of queries that give them any weight.

        Args:
            width: bytes that one pair needs.
            room: bytes for the temporaries of one chunk.
            keys: which keys.
        """
        ranges, (batch, _, queries, _) = self.ranges(), self.pattern.shape
        for chunk in even(keys.start, keys.stop, max(1, room // max(1, batch * queries * width))):
            seen = [(first, stop) for first, stop in ranges[chunk] if stop]
            if seen:
                yield chunk, slice(min(first for first, _ in seen), max(stop for _, stop in seen))


@dataclasses.dataclass(frozen=True)
class Vectors:
    """F_ij = scale_i Σ_h a_ijh w_jh + δ_ij own_i for all pairs of a block.

    Attributes:
        pairs: Σ_h a_ijh w_jh.
        scale: one number per query.
        total: Σ_j F_ij.
        diagonal: F_ii; computed once, when first called.
    """

    pairs: Pairs
    scale: Float[Tensor, "batch query 1"]
    total: Float[Tensor, "batch query d_model"]
    diagonal: Callable[[], Float[Tensor, "batch query d_model"]]

    def times(self, factor: float) -> Vectors:
        """All vectors times a positive number."""
        if factor == 1:
            return self
        diagonal = functools.cache(lambda: self.diagonal() * factor)
        return Vectors(self.pairs, self.scale * factor, self.total * factor, diagonal)

    def plus_own(self, vectors: Float[Tensor, "batch query d_model"]) -> Vectors:
        """With what each position adds to itself, e.g. the residual stream."""
        diagonal = functools.cache(lambda: self.diagonal() + vectors)
        return Vectors(self.pairs, self.scale, self.total + vectors, diagonal)

    def through(
        self,
        norm: Norm | None,
        state: Float[Tensor, "batch query d_model"],
    ) -> Vectors:
        """After a norm, held linear at the true state: γ ⊙ (F_ij - mean F_ij) / s_i; β is in no vector.

        Args:
            norm: None for none.
            state: what the norm really reads, biases included.
        """
        if norm is None:
            return self
        divisor = norm.scale(state)
        return Vectors(
            self.pairs.through(norm),
            self.scale / divisor,
            _over(norm, self.total, divisor),
            functools.cache(lambda: _over(norm, self.diagonal(), divisor)),
        )

    def norms(self) -> Float[Tensor, "batch query key"]:
        """‖F_ij‖."""
        norms = self.pairs.norms() * self.scale
        norms.diagonal(dim1=1, dim2=2).copy_(torch.linalg.vector_norm(self.diagonal(), dim=-1))
        return norms

    def mixing_ratio(self) -> Float[Tensor, "batch query"]:
        """‖Σ_{j≠i} F_ij‖ / (‖Σ_{j≠i} F_ij‖ + ‖F_ii‖) in 0..1 (Kobayashi et al., EMNLP 2021, eq. 13)."""
        kept = self.diagonal()
        mixed = torch.linalg.vector_norm(self.total - kept, dim=-1)
        return mixed / (mixed + torch.linalg.vector_norm(kept, dim=-1))

    def distances(
        self, state: Float[Tensor, "batch query d_model"], order: int
    ) -> Float[Tensor, "batch query key"]:
        """‖state_i - F_ij‖ for all pairs, in the L1 or L2 norm (`order` 1 or 2).

        A key that got no weight has the distance ‖state_i‖. L1 has no factors: the pairs are made one key
        at a time, with Σ|p - r| = 2 Σ max(p, r) - Σ p - Σ r, as the last two need no pair.
        """
        pairs, heads = self.pairs, self.pairs.heads
        batch, _, queries, keys = pairs.pattern.shape
        reduced, scale = state / self.scale, self.scale[..., 0].abs()
        out = torch.empty(batch, keys, queries, dtype=reduced.dtype, device=state.device)
        room = chunk_bytes(state.device, heads.room, SLAB_BYTES)
        step = max(1, room // (batch * heads.row_bytes(queries)))
        memory = workspace(heads)
        matrices = heads.matrices_after(pairs.chain, memory)
        row_sums, state_sums = matrices.sum(-1, keepdim=True), reduced.sum(-1)[:, None]
        # One key at a time into one piece of memory that stays in the processor's caches.
        apart = memory.like("apart", reduced, reduced.shape, reduced.dtype)
        for start in range(0, keys, step):
            chunk = slice(start, start + step)
            vectors = heads.lying_in(memory, "vectors", matrices, chunk)
            pattern = pairs.pattern[..., chunk]
            shape = (batch, pattern.shape[-1], heads.heads, queries)
            weights = by_key(pattern, memory.like("key weights", pattern, shape, heads.dtype))
            pieces = zip(
                pairs.ranges()[chunk],
                weights.transpose(2, 3).unbind(1),
                vectors.unbind(1),
                out[:, chunk].unbind(1),
                strict=True,
            )
            # Many small steps, of which autograd need not note anything.
            with torch.inference_mode():
                for (first, stop), some, one, found in pieces:
                    part, own = apart, reduced
                    if (first, stop) != (0, queries):
                        seen = slice(first, stop)
                        part, own, some, found = part[:, seen], own[:, seen], some[:, seen], found[:, seen]
                    # Not baddbmm: it copies the state first, which costs more than the difference.
                    torch.bmm(some, one, out=part)
                    if order == 1:
                        torch.sum(torch.maximum(part, own, out=part), -1, out=found)
                    else:
                        torch.linalg.vector_norm(part.sub_(own), dim=-1, out=found)
                if order == 1:
                    sums = heads.lying_in(memory, "sums", row_sums, chunk)
                    out[:, chunk].mul_(2).sub_((sums.transpose(2, 3) @ weights)[:, :, 0]).sub_(state_sums)
        out.mul_(scale[:, None])
        far = lengths(state, order)
        for key, (first, stop) in enumerate(pairs.ranges()):
            if (first, stop) != (0, queries):
                out[:, key, :first] = far[:, :first]
                out[:, key, stop:] = far[:, stop:]
        out = out.transpose(1, 2)
        out.diagonal(dim1=1, dim2=2).copy_(lengths(state - self.diagonal(), order))
        return out

    def dense(self) -> Float[Tensor, "batch query key d_model"]:
        """All vectors, written out: query × key × d_model numbers."""
        pattern = self.pairs.pattern.to(self.pairs.heads.dtype)
        out = torch.einsum("bhqk,bkhd->bqkd", pattern, self.pairs.vectors) * self.scale[..., None]
        index = torch.arange(out.shape[1], device=out.device)
        out[:, index, index] = self.diagonal()
        return out


@dataclasses.dataclass(frozen=True)
class AttentionVectors:
    """One block's vectors up to the feed-forward, with the true states they are part of.

    Attributes:
        attention: Σ_h a_ijh u_jh, shares of the attention's output (AttnN).
        residual: what the attention branch adds, and the residual stream on the diagonal (AttnRes).
        normed: after the norm on the residual stream, where the block has one (AttnResLn; post-norm).
        resid_pre: the residual stream entering the block.
        summed: the true sum that `residual` are shares of.
        b_O: the bias of the attention's output, in the states' dtype.
        residual_norm: the norm on the residual stream, where the block has one.
    """

    attention: Vectors
    residual: Vectors
    normed: Vectors
    resid_pre: Float[Tensor, "batch pos d_model"]
    summed: Float[Tensor, "batch pos d_model"]
    b_O: Float[Tensor, " d_model"] | None
    residual_norm: Norm | None

    # Not all maps need these, and fresh memory for them would cost more than to compute them.
    @functools.cached_property
    def attention_out(self) -> Float[Tensor, "batch pos d_model"]:
        """The attention's output, with b_O."""
        return self.attention.total if self.b_O is None else self.attention.total + self.b_O

    @functools.cached_property
    def mid(self) -> Float[Tensor, "batch pos d_model"]:
        """The true state that `normed` are shares of."""
        return _after_norm(self.residual_norm, self.summed)


def _forget_others(key: Tensor) -> None:
    """Before a block's vectors are kept."""
    _last.clear()
    for other, kept in list(_shared.items()):
        if other is not key and kept.nbytes > SHARED_BYTES:
            del _shared[other]


def head_vectors(block: Block) -> HeadVectors:
    """u of a block; needs "value", and the attention's parts proven."""
    dtype = torch.promote_types(block.resid_pre.dtype, torch.float32)
    # Detached, for what is shared must not keep alive the tensor that it is kept for.
    return HeadVectors(value_path(block), block.recorded("value").detach().to(dtype))


def attention_vectors(block: Block, heads: HeadVectors | None = None) -> AttentionVectors:
    """The block's vectors; needs "pattern", "value" and "z", and the attention's parts proven.

    The methods of one run share their norms, except under a memory bound.

    Args:
        block: the block.
        heads: `head_vectors` of the block, with the room that the map's other temporaries leave; None:
            there are no others.

    Raises:
        ValueError: the smallest pieces don't fit into the block's `max_memory`.
    """
    key = block.recorded("pattern")
    if block.max_memory is not None:
        if heads is None:
            heads = head_vectors(block)
            heads.room = attention_room(block, heads)
        return _attention_vectors(Pairs(key.detach(), heads), block)
    kept: AttentionVectors | None = _last.get(key)
    if kept is None:
        _forget_others(key)
        pairs = Pairs(key.detach(), heads or head_vectors(block), together=_shared.get(key))
        kept = _attention_vectors(pairs, block)
        _last[key], _shared[key] = kept, pairs.together
    return kept


def _attention_vectors(pairs: Pairs, block: Block) -> AttentionVectors:
    anatomy = block.anatomy
    dtype = pairs.heads.dtype
    b_O = value_path(block).b_O
    b_O = None if b_O is None else b_O.detach().to(dtype)
    x = block.resid_pre.detach().to(dtype)
    total = block.recorded("z").detach().to(dtype).flatten(2) @ pairs.heads.matrices.flatten(0, 1)
    attention = Vectors(pairs, torch.ones_like(x[..., :1]), total, functools.cache(pairs.own))
    multiplier, branch_norm = anatomy.residual_multiplier, anatomy.attention_branch
    if branch_norm is None:
        residual = attention.times(multiplier).plus_own(x)
        summed = residual.total if b_O is None else residual.total + b_O * multiplier
    else:
        attention_out = total if b_O is None else total + b_O
        residual = attention.through(branch_norm, attention_out).times(multiplier).plus_own(x)
        summed = torch.add(x, _after_norm(branch_norm, attention_out), alpha=multiplier)
    normed = residual.through(anatomy.attention_residual, summed)
    return AttentionVectors(attention, residual, normed, x, summed, b_O, anatomy.attention_residual)


def lengths(vectors: Float[Tensor, "*batch d_model"], order: int) -> Float[Tensor, "*batch"]:
    """L1 or L2 norms (`order` 1 or 2); torch's own L1 adds up one by one, a digit less in float32."""
    return vectors.abs().sum(-1) if order == 1 else torch.linalg.vector_norm(vectors, dim=-1)


def _over(norm: Norm, vectors: Tensor, divisor: Tensor) -> Tensor:
    """A norm's linear part over its size, in no more new memory than it takes."""
    out = linear_part(norm, vectors)
    return out / divisor if out is vectors else out.div_(divisor)


def _after_norm(norm: Norm | None, state: Tensor) -> Tensor:
    """What a norm makes of a state."""
    if norm is None or norm.kind != "layer":
        return state if norm is None else norm(state)
    weight, bias = (
        None if part is None else part.detach().to(state.dtype) for part in (norm.weight, norm.bias)
    )
    return torch.nn.functional.layer_norm(state, state.shape[-1:], weight, bias, norm.eps)


def value_path(block: Block) -> ValuePath:
    """The block's value path.

    Raises:
        ValueError: it was not found (the algebra engine is never chosen on such a block).
    """
    if block.anatomy.value_path is None:
        raise ValueError(f"block {block.layer}: expected value and output matrices, found none")
    return block.anatomy.value_path
