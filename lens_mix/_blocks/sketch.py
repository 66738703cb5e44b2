"""Sketches: products with a few random vectors, which detect a changed matrix and check a matrix product.

Y = X W is checked by Y S = X (W S), with random vectors S that are independent of X and W. This reads W once
and does not compute X W (Freivalds 1977, "Probabilistic machines can use less running time"). The estimated
error of a row is about as large as its true error. With n vectors, the probability of an estimate that is r
times too small decreases as 1 / rⁿ.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_VECTORS = 8


@functools.lru_cache(maxsize=64)
def random_vectors(length: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "vector length"]:
    """Return random vectors with mean square 1 and no entry near 0; they are the same in each call.

    Signs alone would not do: two errors of one size would cancel for half of all pairs of entries.
    """
    generator = torch.Generator("cpu").manual_seed(length)
    # Autograd can't use tensors that were created in inference mode.
    with torch.inference_mode(False):
        sizes, signs = torch.rand(2, _VECTORS, length, generator=generator, device="cpu", dtype=torch.float64)
        sizes, signs = sizes + 0.5, signs - 0.5
        numbers: Tensor = sizes.copysign(signs) / (13 / 12) ** 0.5
        return numbers.to(device, dtype)


def sketch(x: Float[Tensor, "*row column"]) -> Float[Tensor, "*row vector"]:
    """Return the scalar products of a vector, or of each row of a matrix, with the random vectors."""
    vectors = random_vectors(x.shape[-1], x.dtype, x.device)
    # MKL is much slower for x @ vectors.T, because that has so few columns on the right.
    return vectors @ x if x.ndim == 1 else (vectors @ x.T).T


def sketched_error(
    got: Float[Tensor, "row vector"],
    expected: Float[Tensor, "row column"],
    counted: Bool[Tensor, " row"] | None = None,
) -> float:
    """Return the largest error of a row, estimated from its sketch and relative to the row's norm.

    Args:
        got: The sketch of the rebuilt matrix.
        expected: The whole matrix to compare it with.
        counted: The rows to compare; None for all.
    """
    error = torch.linalg.vector_norm(got - sketch(expected), dim=-1) / _VECTORS**0.5
    ratio = torch.where(error == 0, 0.0, error / torch.linalg.vector_norm(expected, dim=-1))
    if counted is not None:
        ratio = ratio[counted]
    return float(ratio.max()) if ratio.numel() else 0.0
