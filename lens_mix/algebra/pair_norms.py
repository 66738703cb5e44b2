"""‖Σ_h a_ijh w_jh‖ for all pairs, by one small factor per key.

The factor of the vectors that a key's heads send gives the norm of any mixture of them without the mixture:
‖R a‖ with R from a QR decomposition, or sqrt(aᵀ G a) with G the Gram matrix. It is R for float64 vectors and
G, accumulated in float64, for all others. A Gram matrix in float32 is off by half where heads cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.budget import PRODUCT_BYTES, chunk_size, chunks, factor_bytes
from lens_mix.algebra.head_vectors import Chain, HeadVectors


class PairNorms(NamedTuple):
    """‖Σ_h a_ijh w_jh‖, ‖w_jh‖, and Σ_h a_jjh w_jh where it was asked for."""

    pairs: Float[Tensor, "batch query key"]
    heads: Float[Tensor, "batch key head"]
    diagonal: Float[Tensor, "batch key d_model"] | None


def by_key(
    pattern: Float[Tensor, "batch head query key"], out: Float[Tensor, "batch key head query"]
) -> Float[Tensor, "batch key head query"]:
    """Write the pattern into `out` with the key first; head by head is faster than in one step."""
    for head in range(pattern.shape[1]):
        out[:, :, head] = pattern[:, head].mT
    return out


def _qr_factor(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch rank head"]:
    """R with ‖R a‖ = ‖Σ_h a_h vector_h‖ for any a, in float64: 2e-13 even where the heads cancel."""
    factor: Tensor = torch.linalg.qr(vectors.double().mT, mode="r").R
    return factor


def _gram(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch head head_"]:
    """All scalar products of the vectors, accumulated in float64 (6e-8 for float32 vectors)."""
    wide = vectors.double()
    return wide @ wide.mT


def _factor_norms(
    factors: Float[Tensor, "row rank head"],
    weights: Float[Tensor, "row head query"],
    exact: bool,
    out: Float[Tensor, "row rank query"] | None = None,
) -> Float[Tensor, "row query"]:
    """‖Σ_h weights_h vector_h‖ in float64 from `_qr_factor` (`exact`) or `_gram`; `out` for the products."""
    product = torch.bmm(factors, weights, out=out)
    if exact:
        lengths: Tensor = torch.linalg.vector_norm(product, dim=-2)
        return lengths
    return product.mul_(weights).sum(-2).clamp_min_(0).sqrt_()  # rounding may fall below 0


def norms_by_factors(
    pattern: Float[Tensor, "batch head query key"],
    heads: HeadVectors,
    chain: Chain,
    own_weights: Float[Tensor, "batch key head"] | None,
) -> PairNorms:
    """The norms, and what else is cheap while the vectors are at hand.

    `own_weights`: a_jjh in the vectors' dtype; None where the diagonal is not asked for.
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
