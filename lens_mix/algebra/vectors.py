"""The vectors that a block sends from key to query, kept as factors: no query × key × d_model tensor.

Before the feed-forward, the vector that query i got from key j is, at every stage of every block,

    F_ij = scale_i Σ_h a_ijh w_jh + δ_ij own_i

where a is the pattern, w one vector per key and head, and scale one number per query. It starts with
w_jh = u_jh = v_jh W_O^h (b_V in, b_O never; Kobayashi et al., EMNLP 2020, eq. 3), scale 1 and own 0. Adding
the residual stream changes own; a norm's linear part γ ⊙ (v - mean v) / s_i, s_i taken from the true state,
changes w, own and scale. `Vectors.dense` writes all of it out; norms need no pair's vector
(`lens_mix.algebra.pair_norms`), and the norm of Σ_j F_ij no pair at all.

The rows are the queries that are asked for; a query's own key is its position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.budget import (
    PRODUCT_BYTES,
    attention_budget,
    chunk_size,
    chunks,
    written_out_bytes,
)
from lens_mix.algebra.head_vectors import Chain, HeadVectors, linear_part, through
from lens_mix.algebra.pair_norms import norms_by_factors
from lens_mix.algebra.workspace import Workspace
from lens_mix.lens.anatomy import BlockAnatomy, Norm, ValuePath

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

T = TypeVar("T")

# So few rows are written out, a product with W_O per pair, which costs no more than one per key and head.
FEW_QUERIES = 2


class Pairs:
    """Σ_h a_ijh w_jh for all pairs, as factors.

    Args:
        pattern: a.
        heads: u, one vector per key and head.
        queries: the positions of the rows; None: all positions, in order.
        chain: norms that made w of u.
    """

    def __init__(
        self,
        pattern: Float[Tensor, "batch head query key"],
        heads: HeadVectors,
        queries: Int[Tensor, "batch query"] | None = None,
        chain: Chain = (),
    ) -> None:
        self.pattern, self.heads, self.queries, self.chain = pattern, heads, queries, chain
        self._own: Tensor | None = None

    def through(self, norm: Norm | None) -> Pairs:
        """The same after a norm's linear part."""
        return self if norm is None else Pairs(self.pattern, self.heads, self.queries, (*self.chain, norm))

    @property
    def few(self) -> bool:
        """Whether the pairs are so few that they are written out."""
        return self.pattern.shape[2] <= FEW_QUERIES

    def written_out(self, keys: slice = slice(None)) -> Float[Tensor, "batch query key d_model"]:
        """Some keys' pairs as vectors: the definition."""
        weights = self.pattern[..., keys].permute(0, 2, 3, 1).to(self.heads.dtype)
        return through(self.chain, self.heads.weighted(weights, keys))

    def written_out_chunks(
        self, more: int = 0
    ) -> Iterator[tuple[slice, Float[Tensor, "batch query key d_model"]]]:
        """All pairs as vectors, some keys at a time; `more` bytes per pair are needed for what follows."""
        row = self.pattern[:, 0, :, 0].numel() * (written_out_bytes(self.heads) + more)
        size = chunk_size(row, self.pattern.device, self.heads.budget, PRODUCT_BYTES)
        for chunk in chunks(0, self.pattern.shape[-1], size):
            yield chunk, self.written_out(chunk)

    @functools.cached_property
    def norms(self) -> Float[Tensor, "batch query key"]:
        """Euclidean norms of all pairs."""
        if not self.few:
            own_weights = None if self.queries is not None else self._own_weights()
            norms, self._own = norms_by_factors(self.pattern, self.heads, self.chain, own_weights)
            return norms
        norms = self.heads.value.new_empty(self.pattern[:, 0].shape)
        for chunk, vectors in self.written_out_chunks():
            norms[..., chunk] = torch.linalg.vector_norm(vectors, dim=-1)
        return norms

    def own(self) -> Float[Tensor, "batch query d_model"]:
        """The pairs of each position with itself, as vectors; the norms of all pairs may have given them."""
        if self._own is None:
            self._own = through(self.chain, self.heads.own(self._own_weights(), self.queries))
        return self._own

    def _own_weights(self) -> Float[Tensor, "batch query head"]:
        if self.queries is None:
            weights = self.pattern.diagonal(dim1=2, dim2=3)
        else:
            index = self.queries[:, None, :, None].expand(-1, self.pattern.shape[1], -1, 1)
            weights = self.pattern.gather(3, index)[..., 0]
        return weights.mT.to(self.heads.dtype).contiguous()

    def put_own(self, into: Float[Tensor, "batch query key"], values: Float[Tensor, "batch query"]) -> Tensor:
        """A map with these values for each position's pair with itself."""
        if self.queries is None:
            into.diagonal(dim1=1, dim2=2).copy_(values)
            return into
        return into.scatter_(2, self.queries[..., None], values[..., None])

    def ranges(self) -> list[tuple[int, int]]:
        """Per key the first row that gives it any weight, and the one after the last; (0, 0) for none."""
        seen = (self.pattern != 0).flatten(0, 1).any(0)
        none, numbers = ~seen.any(0), seen.to(torch.uint8)
        first = numbers.argmax(0).masked_fill(none, 0)
        last = (len(seen) - numbers.flip(0).argmax(0)).masked_fill(none, 0)
        return list(zip(first.tolist(), last.tolist(), strict=True))


class Vectors:
    """F_ij = scale_i Σ_h a_ijh w_jh + δ_ij own_i for all pairs of a block.

    Args:
        pairs: Σ_h a_ijh w_jh.
        scale: one number per query.
        total: gives Σ_j F_ij, once it is asked for.
        own: what each position adds to itself; None for nothing.
    """

    def __init__(
        self,
        pairs: Pairs,
        scale: Float[Tensor, "batch query 1"],
        total: Callable[[], Float[Tensor, "batch query d_model"]],
        own: Float[Tensor, "batch query d_model"] | None = None,
    ) -> None:
        self.pairs, self.scale, self._total, self.own = pairs, scale, total, own

    @functools.cached_property
    def total(self) -> Float[Tensor, "batch query d_model"]:
        """Σ_j F_ij."""
        return self._total()

    @functools.cached_property
    def diagonal(self) -> Float[Tensor, "batch query d_model"]:
        """F_ii."""
        pairs = self.pairs.own() * self.scale
        return pairs if self.own is None else pairs + self.own

    def times(self, factor: float) -> Vectors:
        """All vectors times a positive number."""
        if factor == 1:
            return self
        own = None if self.own is None else self.own * factor
        return Vectors(self.pairs, self.scale * factor, lambda: self.total * factor, own)

    def plus_own(self, vectors: Float[Tensor, "batch query d_model"]) -> Vectors:
        """With what each position adds to itself, e.g. the residual stream."""
        own = vectors if self.own is None else self.own + vectors
        return Vectors(self.pairs, self.scale, lambda: self.total + vectors, own)

    def through(self, norm: Norm | None, state: Float[Tensor, "batch query d_model"]) -> Vectors:
        """After a norm, held linear at the true state: γ ⊙ (F_ij - mean F_ij) / s_i; β is in no vector.

        Args:
            norm: None for none.
            state: what the norm really reads, biases included.
        """
        if norm is None:
            return self
        divisor = norm.scale(state)
        own = None if self.own is None else linear_part(norm, self.own) / divisor
        return Vectors(
            self.pairs.through(norm),
            self.scale / divisor,
            lambda: linear_part(norm, self.total) / divisor,
            own,
        )

    def norms(self) -> Float[Tensor, "batch query key"]:
        """‖F_ij‖."""
        norms = self.pairs.norms * self.scale
        return self.pairs.put_own(norms, torch.linalg.vector_norm(self.diagonal, dim=-1))

    def mixing_ratio(self) -> Float[Tensor, "batch query"]:
        """‖Σ_{j≠i} F_ij‖ / (‖Σ_{j≠i} F_ij‖ + ‖F_ii‖) in 0..1 (Kobayashi et al., EMNLP 2021, eq. 13)."""
        mixed = torch.linalg.vector_norm(self.total - self.diagonal, dim=-1)
        return mixed / (mixed + torch.linalg.vector_norm(self.diagonal, dim=-1))

    def dense(self) -> Float[Tensor, "batch query key d_model"]:
        """All vectors, written out: query × key × d_model numbers."""
        out = self.pairs.written_out() * self.scale[..., None]
        batch, queries = out.shape[:2]
        keys = torch.arange(queries, device=out.device) if self.pairs.queries is None else self.pairs.queries
        rows = torch.arange(batch, device=out.device)[:, None], torch.arange(queries, device=out.device)
        out[(*rows, keys)] = self.diagonal
        return out


class AttentionVectors:
    """One block's vectors up to the feed-forward, with the true states they are part of.

    All is made when first asked for, at the asked rows.

    Args:
        anatomy: the block's.
        pairs: Σ_h a_ijh u_jh.
        resid_pre: the residual stream entering the block.
        z: the values mixed by the pattern.
    """

    def __init__(
        self,
        anatomy: BlockAnatomy,
        pairs: Pairs,
        resid_pre: Float[Tensor, "batch query d_model"],
        z: Float[Tensor, "batch query head d_head"],
    ) -> None:
        self.anatomy, self.pairs = anatomy, pairs
        self.resid_pre = resid_pre.detach().to(pairs.heads.dtype)
        self._z = z.detach()

    @functools.cached_property
    def attention(self) -> Vectors:
        """Σ_h a_ijh u_jh, shares of the attention's output (AttnN)."""
        z, W_O = self._z, self.pairs.heads.matrices.flatten(0, 1)
        one = torch.ones_like(self.resid_pre[..., :1])
        return Vectors(self.pairs, one, lambda: z.to(W_O.dtype).flatten(2) @ W_O)

    @functools.cached_property
    def residual(self) -> Vectors:
        """What the attention branch adds, and the residual stream on the diagonal (AttnRes)."""
        branch, norm = self.attention, self.anatomy.attention_branch
        if norm is not None:
            branch = branch.through(norm, self.attention_out)
        return branch.times(self.anatomy.residual_multiplier).plus_own(self.resid_pre)

    @functools.cached_property
    def normed(self) -> Vectors:
        """After the norm on the residual stream, where the block has one (AttnResLn; post-norm)."""
        norm = self.anatomy.attention_residual
        return self.residual if norm is None else self.residual.through(norm, self.summed)

    @functools.cached_property
    def attention_out(self) -> Float[Tensor, "batch query d_model"]:
        """The attention's output, with b_O."""
        path, total = self.anatomy.value_path, self.attention.total
        return total if path is None or path.b_O is None else total + path.b_O.detach().to(total.dtype)

    @functools.cached_property
    def summed(self) -> Float[Tensor, "batch query d_model"]:
        """The true sum that `residual` are shares of."""
        branch = _after_norm(self.anatomy.attention_branch, self.attention_out)
        return torch.add(self.resid_pre, branch, alpha=self.anatomy.residual_multiplier)

    @functools.cached_property
    def mid(self) -> Float[Tensor, "batch query d_model"]:
        """The true state that `normed` are shares of."""
        return _after_norm(self.anatomy.attention_residual, self.summed)


def _after_norm(norm: Norm | None, state: Tensor) -> Tensor:
    return state if norm is None else norm(state)


def value_path(block: Block) -> ValuePath:
    """The block's value path.

    Raises:
        ValueError: it was not found (the algebra engine is never chosen on such a block).
    """
    if block.anatomy.value_path is None:
        raise ValueError(f"block {block.layer}: expected value and output matrices, found none")
    return block.anatomy.value_path


def head_vectors(block: Block) -> HeadVectors:
    """u of a block; needs "value", and the attention's parts proven."""
    dtype = torch.promote_types(block.resid_pre.dtype, torch.float32)
    value = block.recorded("value").detach().to(dtype)
    free = block.max_memory is None
    workspace = block.kept_of_run.setdefault("workspace", Workspace()) if free else None
    return HeadVectors(value_path(block), value, workspace=workspace)


def attention_vectors(block: Block, heads: HeadVectors | None = None) -> AttentionVectors:
    """The block's vectors; needs "pattern", "value" and "z", and the attention's parts proven.

    The methods of one run share them, except under a memory bound.

    Args:
        block: the block.
        heads: `head_vectors` of the block, with the budget that the map's other temporaries leave; None:
            there are no others.

    Raises:
        ValueError: the smallest chunks don't fit into the block's `max_memory`.
    """

    def make() -> AttentionVectors:
        sent = head_vectors(block) if heads is None else heads
        if heads is None:
            sent.budget = attention_budget(block, sent)
        queries = None if block.every_query else block.queries
        pairs = Pairs(block.recorded("pattern").detach(), sent, queries)
        return AttentionVectors(block.anatomy, pairs, block.resid_pre, block.recorded("z"))

    return shared(block, "attention vectors", make)


def shared(block: Block, name: object, make: Callable[[], T]) -> T:
    """What `make` gives, once for all methods that map these rows of the block; not under a memory bound."""
    if block.max_memory is not None:
        return make()
    known = block.kept.get((name, block.every_query))
    if known is None or not (block.every_query or torch.equal(known[0], block.queries)):
        known = block.kept[name, block.every_query] = (block.queries, make())
    return known[1]
