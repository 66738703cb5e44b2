"""‖y_i - F_ij‖ for all pairs: how far the representation is from each key's vector."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.budget import chunk_size, chunks, vector_bytes
from lens_mix.algebra.pair_norms import by_key
from lens_mix.algebra.vectors import Vectors


def lengths(vectors: Float[Tensor, "*batch d_model"], order: int) -> Float[Tensor, "*batch"]:
    """L1 or L2 norms (`order` 1 or 2); torch's own L1 adds up one by one, a digit less in float32."""
    return vectors.abs().sum(-1) if order == 1 else torch.linalg.vector_norm(vectors, dim=-1)


def distances(
    vectors: Vectors, state: Float[Tensor, "batch query d_model"], order: int
) -> Float[Tensor, "batch query key"]:
    """‖state_i - F_ij‖ for all pairs, in the L1 or L2 norm (`order` 1 or 2).

    A key that got no weight has the distance ‖state_i‖. L1 has no factors: the pairs are written out.
    """
    pairs = vectors.pairs
    out = state.new_empty((*state.shape[:2], pairs.pattern.shape[-1]))
    if pairs.writes_out:
        for chunk, part in pairs.written_out_chunks():
            apart = part.mul_(vectors.scale[..., None]).sub_(state[:, :, None])
            out[..., chunk] = lengths(apart, order)
    else:
        out[:] = lengths(state, order)[..., None]
        scale = vectors.scale.abs()[..., 0]
        for key, rows, apart in _apart_by_key(vectors, state / vectors.scale):
            size = torch.linalg.vector_norm(apart, dim=-1) if order == 2 else apart.abs_().sum(-1)
            torch.mul(size, scale[:, rows], out=out[:, rows, key])
    return pairs.put_diagonal(out, lengths(state - vectors.diagonal, order))


def _apart_by_key(
    vectors: Vectors, reduced: Float[Tensor, "batch query d_model"]
) -> Iterator[tuple[int, slice, Float[Tensor, "batch row d_model"]]]:
    """Σ_h a_ijh w_jh - reduced_i one key at a time, for the rows from the first to the last that see it.

    All in one place of memory, which stays in a processor's caches.
    """
    pairs, heads, (batch, _, queries, keys) = vectors.pairs, vectors.pairs.heads, vectors.pairs.pattern.shape
    row = batch * (vector_bytes(heads) + queries * heads.heads * heads.dtype.itemsize)
    size = chunk_size(row, reduced.device, heads.budget)
    matrices, memory, ranges = heads.after(pairs.chain), torch.empty_like(reduced), pairs.ranges()
    for chunk in chunks(0, keys, size):
        sent, pattern = heads.times(matrices, chunk).unbind(1), pairs.pattern[..., chunk]
        shape = (batch, pattern.shape[-1], heads.heads, queries)
        turned = by_key(pattern, heads.workspace.like("key weights", pattern, shape, heads.dtype))
        weights = turned.mT.unbind(1)
        for key, w, a in zip(range(chunk.start, chunk.stop), sent, weights, strict=True):
            first, stop = ranges[key]
            if stop:
                rows = slice(first, stop)
                apart = torch.bmm(a[:, rows], w, out=memory[:, rows])
                yield key, rows, apart.sub_(reduced[:, rows])
