"""A matrix times a few random vectors: that tells an edit, and checks products without making them.

Y = X W is checked by Y S = X (W S) for vectors S that know nothing of either, which costs one reading of W
(Freivalds 1977, "Probabilistic machines can use less running time"). An error of a row comes out about as
large as it is; with n vectors, the chance that it comes out r times smaller falls as 1 / rⁿ.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_VECTORS = 8


@functools.lru_cache(maxsize=64)
def random_vectors(length: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "vector length"]:
    """Numbers of mean square 1, none near 0, no two alike; the same each time.

    With signs alone, errors of one size in two places would cancel for half of all places.
    """
    generator = torch.Generator("cpu").manual_seed(length)
    # What was made in inference mode could not be used where gradients are noted.
    with torch.inference_mode(False):
        sizes, signs = torch.rand(2, _VECTORS, length, generator=generator, device="cpu", dtype=torch.float64)
        sizes, signs = sizes + 0.5, signs - 0.5
        numbers: Tensor = sizes.copysign(signs) / (13 / 12) ** 0.5
        return numbers.to(device, dtype)


def sketch(x: Float[Tensor, "*row column"]) -> Float[Tensor, "*row vector"]:
    """Scalar products with the random vectors, of a vector or of each row of a matrix."""
    vectors = random_vectors(x.shape[-1], x.dtype, x.device)
    # The other way round, with so few columns on the right, MKL is much slower.
    return vectors @ x if x.ndim == 1 else (vectors @ x.T).T


def sketched_error(
    got: Float[Tensor, "row vector"],
    expected: Float[Tensor, "row column"],
    keep: Bool[Tensor, " row"] | None = None,
) -> float:
    """Largest error of a row, as its sketch shows it, relative to the row's size.

    Args:
        got: sketched.
        expected: whole.
        keep: which rows count; all by default.
    """
    error = torch.linalg.vector_norm(got - sketch(expected), dim=-1) / _VECTORS**0.5
    ratio = torch.where(error == 0, 0.0, error / torch.linalg.vector_norm(expected, dim=-1))
    if keep is not None:
        ratio = ratio[keep]
    return float(ratio.max()) if ratio.numel() else 0.0
