"""Large matrix products on a CPU, by the faster of PyTorch's two libraries.

PyTorch uses MKL, which leaves half of the vector unit of some CPUs unused. oneDNN does not.
"""

from __future__ import annotations

import functools
import timeit
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

_LEAST = 2**24  # With fewer multiplications, the overhead of a call matters more.
_COPY_EARNED_BY = 512  # With so many rows, oneDNN saves more time than a copy of the matrix costs.
# oneDNN has to be faster by this factor: near a tie, the choice and the last digits would vary by process.
_GAIN = 1.1


def multiply(x: Float[Tensor, "*axes inner"], matrix: Float[Tensor, "inner column"]) -> Tensor:
    """Return x @ matrix, without gradients with respect to the matrix.

    oneDNN is used for matrices only that are contiguous, or whose transposes are.
    """
    is_dense = matrix.is_contiguous() or matrix.T.is_contiguous()
    # In a backward pass, gradients are off, and the flags of the weights may be those of the user again.
    has_gradient = matrix.requires_grad and torch.is_grad_enabled()
    is_usable = is_dense and x.dtype == matrix.dtype and not has_gradient
    if is_usable and is_large(x.shape[:-1].numel(), matrix) and by_onednn(x):
        return _Product.apply(x, matrix)  # type: ignore[no-any-return,no-untyped-call]
    return x @ matrix


def is_large(rows: int, matrix: Tensor) -> bool:
    """Return whether the product of so many rows and a matrix is large enough for oneDNN."""
    return rows * matrix.numel() >= _LEAST


class _Product(torch.autograd.Function):
    """The product x @ matrix by oneDNN, which has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.matrix = matrix
        return product_by_onednn(x, matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return multiply(gradient.contiguous(), ctx.matrix.T), None


def add_product(
    into: Float[Tensor, "row column"],
    x: Float[Tensor, "row inner"],
    matrix: Float[Tensor, "inner column"],
    factor: float = 1.0,
) -> None:
    """Add factor · x @ matrix to a tensor, without gradients.

    oneDNN is used for contiguous matrices only, because it is very slow on others.
    """
    if is_large(x.shape[0], matrix) and matrix.is_contiguous() and by_onednn(x):
        into.add_(product_by_onednn(x, matrix), alpha=factor)
    else:
        into.addmm_(x, matrix, alpha=factor)


def as_right_factor(matrix: Float[Tensor, "inner column"], rows: int) -> Float[Tensor, "inner column"]:
    """Return a matrix for products of so many rows in all, copied if oneDNN then saves more time."""
    return matrix.contiguous() if rows >= _COPY_EARNED_BY and by_onednn(matrix) else matrix


def by_onednn(x: Tensor) -> bool:
    """Return whether oneDNN computes the large products of such tensors."""
    usable = x.dtype == torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.enabled
    return bool(usable) and _onednn_is_faster(torch.get_num_threads())


def product_by_onednn(x: Float[Tensor, "*axes inner"], matrix: Float[Tensor, "inner column"]) -> Tensor:
    """Return x @ matrix, without gradients, by an operation that compiled models use."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix.T, None, "none", [], "")
    return product


@functools.lru_cache
def _onednn_is_faster(threads: int) -> bool:
    """Return whether oneDNN is faster by `_GAIN` and correct; measured once per number of threads."""
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        x = torch.linspace(0, 1, 384**2, device="cpu", dtype=torch.float32).view(384, 384)
        try:
            is_same = torch.allclose(product_by_onednn(x, x), x @ x, rtol=1e-4)
        except (RuntimeError, AttributeError, TypeError):  # Another release of PyTorch lacks the operation.
            return False
        ways = (lambda: x @ x, lambda: product_by_onednn(x, x))
        usual, other = (min(timeit.repeat(way, number=1, repeat=4)) for way in ways)
    return is_same and usual > _GAIN * other
