"""The vectors that a block sends from key to query, as factors without a query × key × d_model tensor.

Before the feed-forward, the vector from key j to query i is, at every stage of every block,

    F_ij = scale_i Σ_h a_ijh w_jh + δ_ij added_i

where a is the pattern, w has one vector per key and head, and scale is one number per query. At first,
w_jh = u_jh = v_jh W_O^h (with b_V, without b_O; Kobayashi et al., EMNLP 2020, eq. 3), scale is 1 and added is
0. Then the residual stream is added. A norm's linear part γ ⊙ (v - mean v) / s_i, with the scale s_i at the
clean state, changes w, added and scale. `lens_mix._algebra.definitions` computes F itself. Norms of F need no
pair's vector (`lens_mix._algebra.pair_norms`), and the norm of Σ_j F_ij needs no pair.

The rows are the requested queries. "The diagonal" is each query's pair with its own position. In
cross-attention, no key is the query's own position, so the added vectors are an additional key after the
source's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix._algebra.budget import attention_budget, chunk_size, chunks, written_out_bytes
from lens_mix._algebra.head_vectors import HeadVectors
from lens_mix._algebra.pair_norms import PairNorms, norms_by_factors
from lens_mix._blocks.states import shared, states_of, value_path
from lens_mix._model.anatomy import Chain, LinearNorm, Norm, through

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block

# With so few rows, a product with W_O per pair costs no more than one per key and head.
_WRITTEN_OUT_QUERIES = 2


@dataclasses.dataclass(eq=False)
class Pairs:
    """The vectors Σ_h a_ijh w_jh of all pairs, as factors.

    Attributes:
        pattern: The pattern a.
        heads: u.
        queries: The positions of the rows; None for all positions in order.
        chain: The norms whose linear parts map u to w.
        cross: Whether the keys are another sequence than the rows.
    """

    pattern: Float[Tensor, "batch head query key"]
    heads: HeadVectors
    queries: Int[Tensor, "batch query"] | None = None
    chain: Chain = ()
    cross: bool = False
    _by_factors: PairNorms | None = dataclasses.field(default=None, init=False)

    @property
    def writes_out(self) -> bool:
        """Whether there are so few rows that each pair's vector is computed."""
        return self.pattern.shape[2] <= _WRITTEN_OUT_QUERIES

    def through(self, norm: Norm) -> Pairs:
        """Return the pairs after a norm's linear part."""
        return dataclasses.replace(self, chain=(*self.chain, norm))

    def written_out(self, keys: slice = slice(None)) -> Float[Tensor, "batch query key d_model"]:
        """Return the vectors of all pairs with these keys."""
        weights = self.pattern[..., keys].permute(0, 2, 3, 1).to(self.heads.dtype)
        return through(self.chain, self.heads.weighted(weights, keys))

    def written_out_chunks(
        self, more: int = 0
    ) -> Iterator[tuple[slice, Float[Tensor, "batch query key d_model"]]]:
        """Yield the vectors of all pairs in chunks of keys; the caller needs `more` bytes per pair."""
        row = self.pattern[:, 0, :, 0].numel() * (written_out_bytes(self.heads) + more)
        size = chunk_size(row, self.pattern.device, self.heads.budget)
        for chunk in chunks(0, self.pattern.shape[-1], size):
            yield chunk, self.written_out(chunk)

    @functools.cached_property
    def norms(self) -> Float[Tensor, "batch query key"]:
        """The Euclidean norms of all pairs' vectors."""
        if not self.writes_out:
            # The loop over keys can also compute the diagonal, but only if row i is position i.
            weights = self._diagonal_weights() if self.queries is None and not self.cross else None
            self._by_factors = norms_by_factors(self.pattern, self.heads, self.chain, weights)
            return self._by_factors.pairs
        norms = self.heads.value.new_empty(self.pattern[:, 0].shape)
        for chunk, vectors in self.written_out_chunks():
            norms[..., chunk] = torch.linalg.vector_norm(vectors, dim=-1)
        return norms

    @property
    def head_norms(self) -> Float[Tensor, "batch key head"]:
        """The norms ‖u_jh‖, reused from the norms of all pairs if these are computed."""
        computed = None if self.chain else self._by_factors
        return self.heads.norms() if computed is None else computed.heads

    @functools.cached_property
    def diagonal(self) -> Float[Tensor, "batch query d_model"]:
        """The vectors of each query's pair with its own position; zeros in cross-attention."""
        if self.cross:
            batch, _, queries, _ = self.pattern.shape
            return self.heads.value.new_zeros((batch, queries, self.heads.d_model))
        # The norms of all pairs were computed first, in the same loop over keys.
        if self._by_factors is not None and self._by_factors.diagonal is not None:
            return self._by_factors.diagonal
        return through(self.chain, self.heads.mixed(self._diagonal_weights(), self.queries))

    def _diagonal_weights(self) -> Float[Tensor, "batch query head"]:
        if self.queries is None:
            weights = self.pattern.diagonal(dim1=2, dim2=3)
        else:
            index = self.queries[:, None, :, None].expand(-1, self.pattern.shape[1], -1, 1)
            weights = self.pattern.gather(3, index)[..., 0]
        return weights.mT.to(self.heads.dtype).contiguous()

    def put_diagonal(
        self, scores: Float[Tensor, "batch query key"], values: Float[Tensor, "batch query"]
    ) -> Float[Tensor, "batch query keys_and_own"]:
        """Return the map with values on its diagonal or, for cross-attention, as an additional key."""
        if self.cross:
            return torch.cat([scores, values[..., None].to(scores.dtype)], dim=-1)
        if self.queries is None:
            scores.diagonal(dim1=1, dim2=2).copy_(values)
            return scores
        return scores.scatter_(2, self.queries[..., None], values[..., None])

    def ranges(self) -> list[tuple[int, int]]:
        """Return, per key, the first row that attends to it, and one more than the last; (0, 0) for none."""
        attended = (self.pattern != 0).flatten(0, 1).any(0)
        # argmax takes no booleans.
        none, numbers = ~attended.any(0), attended.to(torch.uint8)
        first = numbers.argmax(0).masked_fill(none, 0)
        last = (len(attended) - numbers.flip(0).argmax(0)).masked_fill(none, 0)
        return list(zip(first.tolist(), last.tolist(), strict=True))


class Vectors:
    """The vectors F_ij = scale_i Σ_h a_ijh w_jh + δ_ij added_i of a block; `total()` computes Σ_j F_ij."""

    def __init__(
        self,
        pairs: Pairs,
        scale: Float[Tensor, "batch query 1"],
        total: Callable[[], Float[Tensor, "batch query d_model"]],
        added: Float[Tensor, "batch query d_model"] | None = None,
    ) -> None:
        self.pairs, self.scale, self._total, self._added = pairs, scale, total, added

    @functools.cached_property
    def total(self) -> Float[Tensor, "batch query d_model"]:
        """The sums Σ_j F_ij."""
        return self._total()

    @functools.cached_property
    def diagonal(self) -> Float[Tensor, "batch query d_model"]:
        """The vectors F_ii."""
        pairs = self.pairs.diagonal * self.scale
        return pairs if self._added is None else pairs + self._added

    def times(self, factor: float) -> Vectors:
        """Return all vectors times a positive number."""
        if factor == 1:
            return self
        added = None if self._added is None else self._added * factor
        return Vectors(self.pairs, self.scale * factor, lambda: self.total * factor, added)

    def plus(self, vectors: Float[Tensor, "batch query d_model"]) -> Vectors:
        """Return the vectors with others added on the diagonal, such as the residual stream."""
        added = vectors if self._added is None else self._added + vectors
        return Vectors(self.pairs, self.scale, lambda: self.total + vectors, added)

    def through(self, norm: LinearNorm) -> Vectors:
        """Return the vectors after a linearised norm: γ ⊙ (F_ij - mean F_ij) / s_i."""
        if norm.norm is None:
            return self
        added = None if self._added is None else norm(self._added)
        return Vectors(
            self.pairs.through(norm.norm), self.scale / norm.scale, lambda: norm(self.total), added
        )

    def norms(self) -> Float[Tensor, "batch query key"]:
        """Return ‖F_ij‖."""
        norms = self.pairs.norms * self.scale
        return self.pairs.put_diagonal(norms, torch.linalg.vector_norm(self.diagonal, dim=-1))


class AttentionVectors:
    """One block's vectors up to the feed-forward, with the states that they sum to.

    Each tensor is computed when it is first read, at the requested rows.
    """

    def __init__(self, block: Block, heads: HeadVectors) -> None:
        self.states = states_of(block)
        # If row i is position i, the diagonal is a view, and is computed together with the norms of all
        # pairs.
        queries = None if block.every_query else block.queries
        self.pairs = Pairs(self.states.pattern, heads, queries, cross=block.stack.is_cross)

    @functools.cached_property
    def attention(self) -> Vectors:
        """The vectors Σ_h a_ijh u_jh, which sum to the attention's output without b_O (AttnN)."""
        states = self.states
        one = torch.ones_like(states.resid_pre[..., :1])
        return Vectors(self.pairs, one, lambda: states.attention_total)

    @functools.cached_property
    def residual(self) -> Vectors:
        """The vectors that the attention branch adds, and the residual stream on the diagonal (AttnRes)."""
        branch = self.attention.through(self.states.attention_branch)
        return branch.times(self.states.anatomy.residual_multiplier).plus(self.states.resid_pre)

    @functools.cached_property
    def normed(self) -> Vectors:
        """The vectors after the norm on the residual stream, if the block has one (AttnResLn; post-norm)."""
        return self.residual.through(self.states.attention_residual)


def head_vectors(block: Block) -> HeadVectors:
    """Return u of a block that has "value" recorded and its attention verified."""
    dtype = torch.promote_types(block.resid_pre.dtype, torch.float32)
    value = block.recorded("value").detach().to(dtype)
    return HeadVectors(value_path(block), value)


def attention_vectors(block: Block, heads: HeadVectors | None = None) -> AttentionVectors:
    """Return the vectors of a block that has "pattern" and "value" recorded and its attention verified.

    The methods of one run share them, except under a memory bound.

    Args:
        block: The block.
        heads: `head_vectors` of the block, with the budget that the map's other temporaries leave; None if
            there are none.

    Raises:
        ValueError: The smallest chunks do not fit into the block's `max_memory`.
    """

    def make() -> AttentionVectors:
        vectors = head_vectors(block) if heads is None else heads
        if heads is None:
            vectors.budget = attention_budget(block, vectors)
        return AttentionVectors(block, vectors)

    return shared(block, "attention vectors", make)
