"""The vectors that a block sends from key to query, kept as factors: no query × key × d_model tensor.

Before the feed-forward, the vector that query i got from key j is, at every stage of every block,

    F_ij = scale_i Σ_h a_ijh w_jh + δ_ij own_i

where a is the pattern, w one vector per key and head, and scale one number per query. It starts with
w_jh = u_jh = v_jh W_O^h (b_V in, b_O never; Kobayashi et al., EMNLP 2020, eq. 3), scale 1 and own 0. Adding
the residual stream changes own; a norm's linear part γ ⊙ (v - mean v) / s_i, s_i taken from the true state,
changes w, own and scale. So ‖F_ij‖ needs an H × H factor per key, the norm of Σ_j F_ij no pair at all.

The factor is the R of a QR decomposition in float64 models and a Gram matrix accumulated in float64 in all
others. A Gram matrix in float32 is off by half where heads cancel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lens_mix.lens.anatomy import Norm, ValuePath

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

# Numbers in the temporaries of one step: they stay in a processor's caches.
STEP_ELEMENTS = 1 << 20
# The same for the float64 copies that factors are made of.
FACTOR_ELEMENTS = 1 << 17
# Factors of one block that are kept while the clean pass lives, so that the maps of one run share them.
SHARED_BYTES = 16 << 20

_shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def value_outputs(
    path: ValuePath, value: Float[Tensor, "batch key value_head d_head"]
) -> Float[Tensor, "batch key head d_model"]:
    """u_jh = v_jh W_O^h: what each head makes of each key's value vector (b_V in, b_O never).

    Args:
        path: the block's value path; W_O has one matrix per query head.
        value: value vectors, with as many heads as the value hook has (fewer when grouped).
    """
    heads = path.W_O.shape[0]
    value = value.repeat_interleave(heads // value.shape[2], dim=2)
    # One matrix product per head; einsum would make it one product per head and key.
    by_head = value.movedim(2, 0).flatten(1, 2)
    out = torch.bmm(by_head, path.W_O.to(value.dtype))
    return out.unflatten(1, (value.shape[0], value.shape[1])).movedim(0, 2)


def pattern_by_key(
    pattern: Float[Tensor, "batch head query key"],
) -> Float[Tensor, "batch key query head"]:
    """The pattern with the key first and the heads last, in one piece: what products with factors need."""
    return pattern.permute(0, 3, 2, 1).contiguous()


def qr_factor(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch rank head"]:
    """R with ‖R a‖ = ‖Σ_h a_h vector_h‖ for any a, in float64: 2e-13 even where the heads cancel."""
    return torch.linalg.qr(vectors.double().transpose(-1, -2), mode="r").R


def gram(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch head head_"]:
    """All scalar products of the vectors, accumulated in float64 (6e-8 for float32 vectors)."""
    wide = vectors.double()
    return wide @ wide.transpose(-1, -2)


def gram_after(
    norm: Norm, vectors: Float[Tensor, "batch key head d_model"]
) -> Float[Tensor, "batch key head head_"]:
    """`gram` of `linear_part(norm, vectors)`, for float64 vectors: no centred copy is made.

    With P the scalar products under the metric γ², m the means and p_h = Σ_d γ_d² w_hd the products are
    P_hg - m_h p_g - p_h m_g + m_h m_g Σ_d γ_d².
    """
    heads, d_model = vectors.shape[-2:]
    metric = vectors.new_ones(d_model) if norm.weight is None else norm.weight.double().square()
    if norm.kind == "rms":
        return vectors @ (vectors * metric).transpose(-1, -2)
    other = vectors.new_empty((*vectors.shape[:-2], heads + 2, d_model))
    torch.mul(vectors, metric, out=other[..., :heads, :])
    other[..., heads, :] = metric
    other[..., heads + 1, :] = 1 / d_model
    found = vectors @ other.transpose(-1, -2)
    products, p, m = found[..., :heads], found[..., heads], found[..., heads + 1]
    shift = m[..., :, None] * (p - m * (metric.sum() / 2))[..., None, :]
    return products - shift - shift.transpose(-1, -2)


def sum_norms(
    weights: Float[Tensor, "*batch query head"], vectors: Float[Tensor, "*batch head d_model"]
) -> Float[Tensor, "*batch query"]:
    """‖Σ_h weights_h vectors_h‖ without the sums, in float64."""
    wide = weights.double()
    if vectors.dtype == torch.float64:
        return torch.linalg.vector_norm(wide @ qr_factor(vectors).transpose(-1, -2), dim=-1)
    return _quadratic_norms(wide, gram(vectors))


def _quadratic_norms(weights: Tensor, products: Tensor) -> Tensor:
    return (weights @ products).mul_(weights).sum(-1).clamp_min_(0).sqrt_()


def linear_part(
    norm: Norm | None, vectors: Float[Tensor, "*batch d_model"]
) -> Float[Tensor, "*batch d_model"]:
    """What a norm does to a share of its input, before the division: centring (LayerNorm) and γ, no β."""
    if norm is None:
        return vectors
    if norm.kind == "layer":
        vectors = vectors - vectors.mean(-1, keepdim=True)
    return vectors if norm.weight is None else vectors * norm.weight.to(vectors.dtype)


class Pairs:
    """Σ_h a_ijh w_jh for all pairs, as factors.

    Args:
        weights: the pattern, `pattern_by_key`.
        vectors: w, one vector per key and head.
    """

    def __init__(
        self,
        weights: Float[Tensor, "batch key query head"],
        vectors: Float[Tensor, "batch key head d_model"],
    ) -> None:
        self.weights, self._vectors = weights, vectors
        # The linear parts of norms that the vectors have still to go through.
        self._through: tuple[Norm, ...] = ()
        self._norms: Tensor | None = None
        self._own: Tensor | None = None

    @property
    def vectors(self) -> Float[Tensor, "batch key head d_model"]:
        """w, one vector per key and head; after norms, made when first asked for."""
        for norm in self._through:
            self._vectors = linear_part(norm, self._vectors)
        self._through = ()
        return self._vectors

    def through(self, norm: Norm | None) -> Pairs:
        """The same after a norm's linear part."""
        if norm is None:
            return self
        out = Pairs(self.weights, self._vectors)
        out._through = (*self._through, norm)
        out._own = linear_part(norm, self.own())
        return out

    def norms(self) -> Float[Tensor, "batch query key"]:
        """Euclidean norms of all pairs; computed once."""
        if self._norms is None:
            batch, keys, queries, heads = self.weights.shape
            norms = self.weights.new_empty((batch, keys, queries))
            step = max(1, FACTOR_ELEMENTS // (batch * heads * max(self._vectors.shape[-1], queries)))
            for start in range(0, keys, step):
                chunk = slice(start, start + step)
                norms[:, chunk] = self._norms_of(chunk)
            self._norms = norms.transpose(1, 2)
        return self._norms

    def _norms_of(self, chunk: slice) -> Tensor:
        weights, vectors = self.weights[:, chunk], self._vectors[:, chunk]
        if self._vectors.dtype == torch.float64:
            for norm in self._through:
                vectors = linear_part(norm, vectors)
            return sum_norms(weights, vectors)
        wide = vectors.double()
        for norm in self._through[:-1]:
            wide = linear_part(norm, wide)
        products = gram(wide) if not self._through else gram_after(self._through[-1], wide)
        return _quadratic_norms(weights.double(), products)

    def own(self) -> Float[Tensor, "batch query d_model"]:
        """The pairs of each position with itself, as vectors; computed once."""
        if self._own is None:
            diagonal = self.weights.diagonal(dim1=1, dim2=2)
            self._own = torch.einsum("bhq,bqhd->bqd", diagonal, self.vectors)
        return self._own

    def head_norms(self) -> Float[Tensor, "batch key head"]:
        """Euclidean norms of the vectors w."""
        return torch.linalg.vector_norm(self.vectors, dim=-1)

    def chunks(self, width: int, elements: int = STEP_ELEMENTS) -> Iterator[tuple[slice, slice]]:
        """Chunks of keys, each with the range of queries that give them any weight.

        Args:
            width: numbers that one pair needs.
            elements: numbers in the temporaries of one chunk.
        """
        keys, queries = self.weights.shape[1:3]
        step = max(1, elements // max(1, self.weights.shape[0] * queries * width))
        for start in range(0, keys, step):
            chunk = slice(start, min(start + step, keys))
            seen = (self.weights[:, chunk] != 0).flatten(3).any(-1).flatten(0, 1).any(0).nonzero()
            if len(seen):
                yield chunk, slice(int(seen[0]), int(seen[-1]) + 1)


@dataclasses.dataclass(frozen=True)
class Vectors:
    """F_ij = scale_i Σ_h a_ijh w_jh + δ_ij own_i for all pairs of a block.

    Attributes:
        pairs: Σ_h a_ijh w_jh.
        scale: one number per query.
        own: what each position adds to itself; None for nothing.
        total: Σ_j F_ij.
    """

    pairs: Pairs
    scale: Float[Tensor, "batch query 1"]
    own: Float[Tensor, "batch query d_model"] | None
    total: Float[Tensor, "batch query d_model"]

    def times(self, factor: float) -> Vectors:
        """All vectors times a positive number."""
        own = None if self.own is None else self.own * factor
        return Vectors(self.pairs, self.scale * factor, own, self.total * factor)

    def plus_own(self, vectors: Float[Tensor, "batch query d_model"]) -> Vectors:
        """With what each position adds to itself, e.g. the residual stream."""
        own = vectors if self.own is None else self.own + vectors
        return Vectors(self.pairs, self.scale, own, self.total + vectors)

    def through(self, norm: Norm | None, state: Float[Tensor, "batch query d_model"]) -> Vectors:
        """After a norm, held linear at the true state: γ ⊙ (F_ij - mean F_ij) / s_i; β is in no vector.

        Args:
            norm: None for none.
            state: what the norm really reads, biases included.
        """
        if norm is None:
            return self
        size = norm.scale(state)
        return Vectors(
            self.pairs.through(norm),
            self.scale / size,
            None if self.own is None else linear_part(norm, self.own) / size,
            linear_part(norm, self.total) / size,
        )

    def diagonal(self) -> Float[Tensor, "batch query d_model"]:
        """F_ii."""
        pairs = self.pairs.own() * self.scale
        return pairs if self.own is None else pairs + self.own

    def norms(self) -> Float[Tensor, "batch query key"]:
        """‖F_ij‖."""
        norms = self.pairs.norms() * self.scale
        if self.own is not None:
            own = torch.linalg.vector_norm(self.diagonal(), dim=-1)
            norms.diagonal(dim1=1, dim2=2).copy_(own)
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
        at a time.
        """
        batch, keys, queries, _ = self.pairs.weights.shape
        reduced = state / self.scale
        far = torch.linalg.vector_norm(state, ord=order, dim=-1)
        out = far[:, None].expand(batch, keys, queries).clone()
        # One key at a time into one piece of memory that stays in the processor's caches.
        apart = torch.empty_like(reduced)
        for chunk, seen in self.pairs.chunks(state.shape[-1], elements=1):
            key, part = chunk.start, apart[:, seen]
            weights, vectors = self.pairs.weights[:, key, seen], self.pairs.vectors[:, key]
            torch.baddbmm(reduced[:, seen], weights, vectors, alpha=-1, out=part)
            size = part.abs_().sum(-1) if order == 1 else torch.linalg.vector_norm(part, dim=-1)
            out[:, key, seen] = size * self.scale[:, seen, 0].abs()
        out = out.transpose(1, 2)
        if self.own is not None:
            own = torch.linalg.vector_norm(state - self.diagonal(), ord=order, dim=-1)
            out.diagonal(dim1=1, dim2=2).copy_(own)
        return out

    def dense(self) -> Float[Tensor, "batch query key d_model"]:
        """All vectors, written out: query × key × d_model numbers."""
        out = torch.einsum("bkqh,bkhd->bqkd", self.pairs.weights, self.pairs.vectors) * self.scale[..., None]
        if self.own is not None:
            index = torch.arange(out.shape[1], device=out.device)
            out[:, index, index] += self.own
        return out


@dataclasses.dataclass(frozen=True)
class AttentionVectors:
    """One block's vectors up to the feed-forward, with the true states they are part of.

    Attributes:
        attention: Σ_h a_ijh u_jh, shares of the attention's output (AttnN).
        residual: what the attention branch adds, and the residual stream on the diagonal (AttnRes).
        normed: after the norm on the residual stream, where the block has one (AttnResLn; post-norm).
        resid_pre: the residual stream entering the block.
        attention_out: the attention's output, with b_O.
        summed: the true sum that `residual` are shares of.
        mid: the true state that `normed` are shares of.
    """

    attention: Vectors
    residual: Vectors
    normed: Vectors
    resid_pre: Float[Tensor, "batch pos d_model"]
    attention_out: Float[Tensor, "batch pos d_model"]
    summed: Float[Tensor, "batch pos d_model"]
    mid: Float[Tensor, "batch pos d_model"]


def attention_vectors(block: Block) -> AttentionVectors:
    """The block's vectors; needs "pattern", "value" and "z", and the attention's parts proven.

    The methods of one run share them where they are small.
    """
    key = block.recorded("pattern")
    kept: AttentionVectors | None = _shared.get(key)
    if kept is None:
        kept = _attention_vectors(block)
        if kept.attention.pairs.weights.nbytes + kept.attention.pairs.vectors.nbytes <= SHARED_BYTES:
            _shared[key] = kept
    return kept


def _attention_vectors(block: Block) -> AttentionVectors:
    anatomy = block.anatomy
    path = value_path(block)
    dtype = torch.promote_types(block.resid_pre.dtype, torch.float32)
    x = block.resid_pre.to(dtype)
    z = block.recorded("z").to(dtype)
    total = z.flatten(2) @ path.W_O.to(dtype).flatten(0, 1)
    attention_out = total if path.b_O is None else total + path.b_O.to(dtype)
    pairs = Pairs(
        pattern_by_key(block.recorded("pattern").to(dtype)),
        value_outputs(path, block.recorded("value").to(dtype)),
    )
    attention = Vectors(pairs, torch.ones_like(x[..., :1]), None, total)
    branch = attention.through(anatomy.attention_branch, attention_out).times(anatomy.residual_multiplier)
    residual = branch.plus_own(x)
    joined = attention_out if anatomy.attention_branch is None else anatomy.attention_branch(attention_out)
    summed = x + joined * anatomy.residual_multiplier
    mid = summed if anatomy.attention_residual is None else anatomy.attention_residual(summed)
    normed = residual.through(anatomy.attention_residual, summed)
    return AttentionVectors(attention, residual, normed, x, attention_out, summed, mid)


def value_path(block: Block) -> ValuePath:
    """The block's value path.

    Raises:
        ValueError: it was not found (the algebra engine is never chosen on such a block).
    """
    if block.anatomy.value_path is None:
        raise ValueError(f"block {block.layer}: expected value and output matrices, found none")
    return block.anatomy.value_path
