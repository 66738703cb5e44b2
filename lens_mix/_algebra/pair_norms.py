"""The norms ‖Σ_h a_ijh w_jh‖ of all pairs, by one small factor per key.

The factor of a key's head vectors gives the norm of any sum of them, without computing the sum: ‖R a‖ with R
from a QR decomposition, or sqrt(aᵀ G a) with the Gram matrix G. R is used for float64 vectors, and G,
accumulated in float64, for all others. With G in float32, norms would have errors of a half if heads cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._algebra.budget import PRODUCT_BYTES, chunk_size, chunks, factor_bytes
from lens_mix._algebra.head_vectors import HeadVectors
from lens_mix._model.anatomy import Chain


class PairNorms(NamedTuple):
    """The norms ‖Σ_h a_ijh w_jh‖ and ‖w_jh‖, and the vectors Σ_h a_jjh w_jh if requested."""

    pairs: Float[Tensor, "batch query key"]
    heads: Float[Tensor, "batch key head"]
    diagonal: Float[Tensor, "batch key d_model"] | None


def by_key(
    pattern: Float[Tensor, "batch head query key"], out: Float[Tensor, "batch key head query"]
) -> Float[Tensor, "batch key head query"]:
    """Write the pattern into `out` with the key axis first; head by head is faster than all at once."""
    for head in range(pattern.shape[1]):
        out[:, :, head] = pattern[:, head].mT
    return out


def _qr_factor(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch rank head"]:
    """Return R with ‖R a‖ = ‖Σ_h a_h vector_h‖ for any a, in float64: 2e-13 even if heads cancel."""
    factor: Tensor = torch.linalg.qr(vectors.double().mT, mode="r").R
    return factor


def _gram(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch head head_"]:
    """Return all scalar products of the vectors, accumulated in float64 (6e-8 for float32 vectors)."""
    wide = vectors.double()
    return wide @ wide.mT


def _factor_norms(
    factors: Float[Tensor, "row rank head"],
    weights: Float[Tensor, "row head query"],
    exact: bool,
    out: Float[Tensor, "row rank query"] | None = None,
) -> Float[Tensor, "row query"]:
    """Return ‖Σ_h weights_h vector_h‖ in float64, from `_qr_factor` (`exact`) or `_gram`."""
    product = torch.bmm(factors, weights, out=out)
    if exact:
        lengths: Tensor = torch.linalg.vector_norm(product, dim=-2)
        return lengths
    # Rounding may make a square negative.
    return product.mul_(weights).sum(-2).clamp_min_(0).sqrt_()


def norms_by_factors(
    pattern: Float[Tensor, "batch head query key"],
    heads: HeadVectors,
    chain: Chain,
    own_weights: Float[Tensor, "batch key head"] | None,
) -> PairNorms:
    """Compute the norms of all pairs, those of the heads' vectors, and the vectors of the diagonal.

    Args:
        pattern: The pattern a.
        heads: The heads' vectors.
        chain: The norms to apply to these.
        own_weights: a_jjh in the vectors' dtype; None if the diagonal is not requested.
    """
    value, (batch, count, queries, keys) = heads.value, pattern.shape
    matrices, exact = heads.after(chain), heads.dtype == torch.float64
    norms, head_norms = value.new_empty((batch, keys, queries)), value.new_empty((batch, keys, count))
    diagonal = None if own_weights is None else value.new_empty((batch, keys, heads.d_model))

    size = chunk_size(batch * factor_bytes(heads, queries), value.device, heads.budget, PRODUCT_BYTES)
    for chunk in chunks(0, keys, size):
        rows, vectors = chunk.stop - chunk.start, heads.times(matrices, chunk)
        if diagonal is not None and own_weights is not None:
            diagonal[:, chunk] = (own_weights[:, chunk, None] @ vectors)[:, :, 0]
        weights = by_key(
            pattern[..., chunk], value.new_empty((batch, rows, count, queries), dtype=torch.float64)
        )
        wide = vectors.to(torch.float64, copy=True)
        factors = _qr_factor(wide) if exact else _gram(wide)
        squares = factors.square().sum(-2) if exact else factors.diagonal(dim1=-2, dim2=-1)
        head_norms[:, chunk] = squares.sqrt()
        products = value.new_empty((batch * rows, factors.shape[2], queries), dtype=torch.float64)
        sizes = _factor_norms(factors.flatten(0, 1), weights.flatten(0, 1), exact, products)
        norms[:, chunk] = sizes.unflatten(0, (batch, rows))
    return PairNorms(norms.transpose(1, 2), head_norms, diagonal)
