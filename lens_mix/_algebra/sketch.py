"""Sketches: products with a few random vectors, which detect a changed matrix.

The random vectors are independent of the matrix. So two matrices with equal sketches are equal, except with a
probability that is negligible.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
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
