"""‖Σ_h a_ijh w_jh‖ for all pairs: written out, and by one small factor per key.

The factor of the vectors that a key's heads send gives the norm of any mixture of them without the mixture:
‖R a‖ with R from a QR decomposition, or sqrt(aᵀ G a) with G the Gram matrix. It is R for float64 vectors and
G, accumulated in float64, for all others. A Gram matrix in float32 is off by half where heads cancel.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.budget import PRODUCT_BYTES, chunk_size, chunks, vector_bytes, weight_bytes
from lens_mix.algebra.head_vectors import Chain, HeadVectors


def by_key(
    pattern: Float[Tensor, "batch head query key"], dtype: torch.dtype
) -> Float[Tensor, "batch key head query"]:
    """A copy with the key first; head by head, as matrices, three times as fast as in one step."""
    batch, heads, queries, keys = pattern.shape
    out = pattern.new_empty((batch, keys, heads, queries), dtype=dtype)
    for head in range(heads):
        out[:, :, head] = pattern[:, head].mT
    return out


def qr_factor(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch rank head"]:
    """R with ‖R a‖ = ‖Σ_h a_h vector_h‖ for any a, in float64: 2e-13 even where the heads cancel."""
    return torch.linalg.qr(vectors.double().mT, mode="r").R


def gram(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch head head_"]:
    """All scalar products of the vectors, accumulated in float64 (6e-8 for float32 vectors)."""
    wide = vectors.double()
    return wide @ wide.mT


def factor_norms(
    vectors_factor: Float[Tensor, "*batch rank head"],
    weights: Float[Tensor, "*batch head query"],
    exact: bool,
) -> Float[Tensor, "*batch query"]:
    """‖Σ_h weights_h vector_h‖ from `qr_factor` (`exact`) or `gram` of the vectors, in float64."""
    product = vectors_factor @ weights
    if exact:
        return torch.linalg.vector_norm(product, dim=-2)
    return product.mul_(weights).sum(-2).clamp_min_(0).sqrt_()


def norms_by_factors(
    pattern: Float[Tensor, "batch head query key"],
    heads: HeadVectors,
    chain: Chain,
    own_weights: Float[Tensor, "batch key head"] | None,
) -> tuple[Float[Tensor, "batch query key"], Float[Tensor, "batch key d_model"] | None]:
    """The norms; and, while the vectors are at hand, Σ_h own_weights_jh w_jh where these weights are given.

    Args:
        pattern: a.
        heads: u, one vector per key and head.
        chain: norms that make w of u.
        own_weights: a weight per key and head, in the vectors' dtype.
    """
    value, (batch, _, queries, keys) = heads.value, pattern.shape
    half = None if heads.budget is None else heads.budget // 2
    most_keys = chunk_size(batch * vector_bytes(heads), value.device, half, PRODUCT_BYTES)
    most_weights = chunk_size(batch * weight_bytes(heads, queries), value.device, half)
    matrices, exact = heads.after(chain), heads.dtype == torch.float64
    norms = value.new_empty((batch, keys, queries))
    own = None if own_weights is None else value.new_empty((batch, keys, heads.d_model))
    for chunk in chunks(0, keys, most_keys):
        vectors = heads.times(matrices, chunk)
        if own is not None and own_weights is not None:
            own[:, chunk] = (own_weights[:, chunk, None] @ vectors)[:, :, 0]
        factors = qr_factor(vectors) if exact else gram(vectors)
        for part in chunks(chunk.start, chunk.stop, most_weights):
            weights = by_key(pattern[..., part], torch.float64)
            factor = factors[:, part.start - chunk.start : part.stop - chunk.start]
            norms[:, part] = factor_norms(factor, weights, exact)
    return norms.transpose(1, 2), own
