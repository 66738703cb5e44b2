"""Distances between any two vectors, or between each query's state and each key's (or head's) vector."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._algebra.budget import chunk_size, chunks, head_proximity_bytes, vector_bytes
from lens_mix._algebra.pair_norms import by_key
from lens_mix._algebra.vectors import Vectors

# The differences of one chunk fit a CPU's caches, because they are written once and read twice.
_CHUNK_BYTES = 1 << 20
# In nearly all pairs, a head's proximity is linear in all dimensions except this fraction of them.
_SMALLEST = 16


def lengths(vectors: Float[Tensor, "*batch d_model"], order: int) -> Float[Tensor, "*batch"]:
    """Return L1 or L2 norms (`order` 1 or 2); torch's own L1 norm is one digit less accurate in float32."""
    return vectors.abs().sum(-1) if order == 1 else torch.linalg.vector_norm(vectors, dim=-1)


def distances(
    vectors: Vectors, state: Float[Tensor, "batch query d_model"], order: int
) -> Float[Tensor, "batch query key"]:
    """Return ‖state_i - F_ij‖ for all pairs, in the L1 or L2 norm (`order` 1 or 2).

    The distance of a key without weight is ‖state_i‖. The L1 norm needs the vector of each pair.
    """
    pairs = vectors.pairs
    out = state.new_empty((*state.shape[:2], pairs.pattern.shape[-1]))
    if pairs.writes_out:
        for chunk, vectors_of_chunk in pairs.written_out_chunks():
            apart = vectors_of_chunk.mul_(vectors.scale[..., None]).sub_(state[:, :, None])
            out[..., chunk] = lengths(apart, order)
    else:
        out[:] = lengths(state, order)[..., None]
        scale = vectors.scale.abs()
        # ‖state - scale w‖ = |scale| ‖state / scale - w‖, so each pair's vector need not be scaled.
        for keys, rows, apart in _apart_by_keys(vectors, state / vectors.scale):
            size = torch.linalg.vector_norm(apart, dim=-1) if order == 2 else apart.abs_().sum(-1)
            torch.mul(size.mT, scale[:, rows], out=out[:, rows, keys])
    return pairs.put_diagonal(out, lengths(state - vectors.diagonal, order))


def _apart_by_keys(
    vectors: Vectors, reduced: Float[Tensor, "batch query d_model"]
) -> Iterator[tuple[slice, slice, Float[Tensor, "batch key row d_model"]]]:
    """Yield Σ_h a_ijh w_jh - reduced_i for a few keys at a time, at the rows that may attend to them."""
    pairs, heads, (batch, _, queries, keys) = vectors.pairs, vectors.pairs.heads, vectors.pairs.pattern.shape
    row = batch * (vector_bytes(heads) + queries * heads.heads * heads.dtype.itemsize)
    # Half of the budget is for the vectors of a chunk, half for the differences.
    matrices, half = heads.after(pairs.chain), None if heads.budget is None else heads.budget // 2
    size, ranges = chunk_size(row, reduced.device, half), pairs.ranges()
    at_once = chunk_size(reduced.nbytes, reduced.device, half, _CHUNK_BYTES)
    for chunk in chunks(0, keys, size):
        head_vectors, pattern = heads.times(matrices, chunk), pairs.pattern[..., chunk]
        shape = (batch, pattern.shape[-1], heads.heads, queries)
        weights = by_key(pattern, pattern.new_empty(shape, dtype=heads.dtype)).mT
        for some in chunks(0, shape[1], at_once):
            group = slice(chunk.start + some.start, chunk.start + some.stop)
            ends = [(first, stop) for first, stop in ranges[group] if stop]
            if ends:
                rows = slice(min(first for first, _ in ends), max(stop for _, stop in ends))
                apart = weights[:, some, rows] @ head_vectors[:, some]
                yield group, rows, apart.sub_(reduced[:, None, rows])


def head_proximities(
    vectors: Vectors, state: Float[Tensor, "batch query d_model"], per_head: bool
) -> Float[Tensor, "batch *head query key"]:
    """Return max(0, ‖state_i‖₁ - ‖state_i - scale_i a_ijh w_jh‖₁) for all pairs and heads.

    Args:
        vectors: The vectors of the pairs, without those added on the diagonal; heads are not summed before
            the norm.
        state: The state that the vectors are shares of.
        per_head: Whether to return each head's result; otherwise their sum.
    """
    pairs, heads = vectors.pairs, vectors.pairs.heads
    batch, count, queries, keys = pairs.pattern.shape
    reduced, scale = state / vectors.scale, vectors.scale.abs()
    out = state.new_zeros((batch, count, queries, keys) if per_head else (batch, queries, keys))
    # Half of the budget is for the vectors of a chunk, half for the differences in `_Reduced.nearer`.
    matrices, half = heads.after(pairs.chain), None if heads.budget is None else heads.budget // 2
    size, ranges = (
        chunk_size(batch * head_proximity_bytes(heads, queries), state.device, half),
        pairs.ranges(),
    )
    for chunk in chunks(0, keys, size):
        ends = [(first, stop) for first, stop in ranges[chunk] if stop]
        if not ends:
            continue
        rows = slice(min(first for first, _ in ends), max(stop for _, stop in ends))
        weights = pairs.pattern[..., rows, chunk].permute(0, 2, 3, 1).flatten(2).to(heads.dtype)
        head_vectors = heads.times(matrices, chunk).flatten(1, 2)
        for prompt, (r, a, w) in enumerate(zip(reduced[:, rows], weights, head_vectors, strict=True)):
            near = _nearer(r, a, w, half).unflatten(1, (-1, count)).mul_(scale[prompt, rows, None])
            if per_head:
                out[prompt, :, rows, chunk] = near.permute(2, 0, 1)
            else:
                torch.sum(near, dim=2, out=out[prompt, rows, chunk])
    return out


def _nearer(
    state: Float[Tensor, "row d_model"],
    weights: Float[Tensor, "row key_head"],
    vectors: Float[Tensor, "key_head d_model"],
    budget: int | None,
) -> Float[Tensor, "row key_head"]:
    """Return max(0, ‖r_i‖₁ - ‖r_i - a_ik w_k‖₁) for each row r_i and each vector w_k.

    In a dimension m with |a w_m| <= |r_m|, the difference |r_m| - |r_m - a w_m| is sign(r_m) a w_m. A head
    usually sends much less than the state, so this is true in all dimensions except those where the state is
    smallest. One product gives the sum over the others. If it is not true in one of these, the norms of the
    whole vectors are computed.
    """
    count = max(1, state.shape[1] // _SMALLEST)
    sizes, smallest = state.abs().topk(count + 1, dim=1, largest=False)
    bound, smallest = sizes[:, -1:], smallest[:, :-1]
    by_dimension, r = vectors.T.contiguous(), state.gather(1, smallest)
    near = torch.empty_like(weights)
    size = chunk_size(count * near[0].nbytes, state.device, budget, _CHUNK_BYTES)
    for rows in chunks(0, len(state), size):
        apart = by_dimension.index_select(0, smallest[rows].flatten()).unflatten(0, (-1, count))
        torch.addcmul(r[rows, :, None], apart, weights[rows, None], value=-1, out=apart)
        torch.sub(lengths(r[rows], 1)[:, None], apart.abs_().sum(1), out=near[rows])
    near.addcmul_(state.sign().scatter_(1, smallest, 0) @ by_dimension, weights)
    largest = torch.linalg.vector_norm(vectors, ord=torch.inf, dim=1)
    row, pair = (weights.abs() * largest > bound).nonzero(as_tuple=True)
    whole, size = lengths(state, 1), chunk_size(4 * state[0].nbytes, state.device, budget, _CHUNK_BYTES)
    for chunk in chunks(0, len(row), size):
        i, k = row[chunk], pair[chunk]
        apart = torch.addcmul(state[i], weights[i, k, None], vectors[k], value=-1)
        near[i, k] = whole[i] - lengths(apart, 1)
    # The proximity of a key without weight is exactly 0, whatever the rounding.
    return near.clamp_min_(0).masked_fill_(weights == 0, 0)


def distance(
    x: Float[Tensor, "*batch d_model"], y: Float[Tensor, "*batch d_model"], metric: str
) -> Float[Tensor, "*batch"]:
    """Return the "cosine" or "euclidean" distance between vectors, in at least float32.

    The cosine distance is half the squared distance of the unit vectors. In float32 it is accurate down to
    1e-14, while 1 - cos cancels below 1e-7. The cosine of a zero vector with any other is defined as 0.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, y = x.to(wide), y.to(wide)
    if metric == "euclidean":
        length: Tensor = torch.linalg.vector_norm(x - y, dim=-1)
        return length
    size_x, size_y = torch.linalg.vector_norm(x, dim=-1), torch.linalg.vector_norm(y, dim=-1)
    tiny = torch.finfo(wide).tiny
    apart = (x / size_x.clamp_min(tiny)[..., None] - y / size_y.clamp_min(tiny)[..., None]).square().sum(
        dim=-1
    ) / 2
    return torch.where((size_x == 0) != (size_y == 0), torch.ones_like(apart), apart)
