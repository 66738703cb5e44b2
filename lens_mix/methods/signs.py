"""A matrix times signs: it tells an edit of the matrix, and checks its products without making them.

Y = X W is checked by Y s = X (W s) for signs s that know nothing of either, which costs one reading of W
(Freivalds 1977, "Probabilistic machines can use less running time"). An error of a row comes out about as
large as it is.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@functools.lru_cache(maxsize=64)
def signs(length: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " length"]:
    """1 and -1 in an order that is the same each time."""
    generator = torch.Generator().manual_seed(length)
    # What was made in inference mode could not be used where gradients are noted.
    with torch.inference_mode(False):
        return (torch.randint(2, (length,), generator=generator) * 2 - 1).to(device, dtype)


def along_signs(x: Float[Tensor, "*row column"]) -> Float[Tensor, "*row"]:
    """Each row's sum, every number with its sign."""
    return x @ signs(x.shape[-1], x.dtype, x.device)


def error_along_signs(
    got: Float[Tensor, " row"],
    expected: Float[Tensor, "row column"],
    keep: Bool[Tensor, " row"] | None = None,
) -> float:
    """Largest error of a row along the signs, relative to the row's size.

    Args:
        got: along the signs.
        expected: whole.
        keep: which rows count; all by default.
    """
    error = (got - along_signs(expected)).abs()
    ratio = torch.where(error == 0, 0.0, error / torch.linalg.vector_norm(expected, dim=-1))
    if keep is not None:
        ratio = ratio[keep]
    return float(ratio.max()) if ratio.numel() else 0.0
