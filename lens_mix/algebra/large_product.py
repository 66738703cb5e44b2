"""A large matrix product on a CPU, by the faster of the two libraries that PyTorch carries.

MKL, which PyTorch uses, leaves half of the vector unit of some processors unused; oneDNN does not.
"""

from __future__ import annotations

import functools
import timeit

import torch
from jaxtyping import Float
from torch import Tensor

_LEAST = 2**24  # multiplications below which a call's own cost decides
_COPY_EARNED_BY = 512  # rows from which on oneDNN saves more time than a copy of the matrix costs
_GAIN = 1.25  # oneDNN must be so many times as fast: near a tie last digits would vary by process


def add_product(
    into: Float[Tensor, "row column"],
    x: Float[Tensor, "row inner"],
    matrix: Float[Tensor, "inner column"],
    factor: float = 1.0,
) -> None:
    """Add factor · x @ matrix, without gradients; oneDNN is very slow on a matrix with gaps."""
    if x.shape[0] * matrix.numel() >= _LEAST and matrix.is_contiguous() and by_onednn(x):
        into.add_(product_by_onednn(x, matrix), alpha=factor)
    else:
        into.addmm_(x, matrix, alpha=factor)


def as_right_factor(matrix: Float[Tensor, "inner column"], rows: int) -> Float[Tensor, "inner column"]:
    """A matrix for products of so many rows in all: a copy, where that lets oneDNN make them."""
    return matrix.contiguous() if rows >= _COPY_EARNED_BY and by_onednn(matrix) else matrix


def by_onednn(x: Tensor) -> bool:
    """Whether oneDNN makes the large products of such tensors."""
    usable = x.dtype == torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.enabled
    return bool(usable) and _onednn_is_faster(torch.get_num_threads())


def product_by_onednn(x: Float[Tensor, "row inner"], matrix: Float[Tensor, "inner column"]) -> Tensor:
    """Return x @ matrix, without gradients, by the operation of compiled models."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix.T, None, "none", [], "")
    return product


@functools.lru_cache
def _onednn_is_faster(threads: int) -> bool:
    """Whether it is, by a margin, and gives the same numbers; measured once per number of threads."""
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        x = torch.linspace(0, 1, 384**2, device="cpu", dtype=torch.float32).view(384, 384)
        try:
            same = torch.allclose(product_by_onednn(x, x), x @ x, rtol=1e-4)
        except (RuntimeError, AttributeError, TypeError):  # another release of PyTorch
            return False
        ways = (lambda: x @ x, lambda: product_by_onednn(x, x))
        usual, other = (min(timeit.repeat(way, number=1, repeat=4)) for way in ways)
    return same and usual > _GAIN * other
