"""Compute cumulative products of maps, in float64 or with logarithms."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# The smallest normal float64 is exp(-708), so underflow changes a sum above exp(-650) by less than exp(-58).
_SAFE_LOG = -650.0
# A causal product is computed in chunks of so many rows.
_CHUNK_ROWS = 256

Product = Callable[[Tensor, Tensor], Tensor]
# One residual weight for all layers and rows, or one weight for each.
Residual = float | Float[Tensor, "layer query"]


def add_residual(
    maps: Float[Tensor, "*axes query key"], weight: float | Float[Tensor, "*rows query"]
) -> Float[Tensor, "*axes query key"]:
    """Return (1 − weight) · maps + weight · identity, computed in place.

    An all-zero row becomes the row of the identity if the weight is above 0, as in (A + I) / rowsum, because
    only the residual is left. It stays zero if the weight is 0.

    Args:
        maps: Maps whose rows sum to 1 or are all zero; they are overwritten.
        weight: One weight, or one per row, which heads may share.
    """
    if isinstance(weight, Tensor):
        empty = ~maps.any(-1) & (weight > 0)
        diagonal = maps.mul_((1 - weight)[..., None]).diagonal(dim1=-2, dim2=-1)
        diagonal.add_(weight).masked_fill_(empty, 1.0)
    elif weight > 0:
        empty = ~maps.any(-1)
        diagonal = maps.mul_(1 - weight).diagonal(dim1=-2, dim2=-1)
        diagonal.add_(weight).masked_fill_(empty, 1.0)
    return maps


def cumulative(
    maps: Float[Tensor, "layer query key"],
    heads: Float[Tensor, "layer head query key"] | None = None,
    product: Product = torch.matmul,
) -> Float[Tensor, "layer *head query key"]:
    """Return the products J_0 = maps_0, J_l = maps_l J_{l−1} (Abnar & Zuidema, ACL 2020, section 3.1).

    Args:
        maps: The maps of the layers.
        heads: The maps of each head. If given, layer l of the result is heads_l J_{l−1}, the contribution of
            each head on top of all layers below (the paper's appendix).
        product: The product of two maps.
    """
    result = torch.empty_like(maps if heads is None else heads)
    below: Tensor | None = None
    for layer, matrix in enumerate(maps):
        merged = matrix if below is None else product(matrix, below)
        if heads is None:
            result[layer] = merged
        else:
            for head, single in enumerate(heads[layer]):
                result[layer, head] = single if below is None else product(single, below)
        below = merged
    return result


def lower_product(
    left: Float[Tensor, "query middle"], right: Float[Tensor, "middle key"]
) -> Float[Tensor, "query key"]:
    """Return left @ right for causal maps, whose entries above the diagonal are zero.

    Each chunk of rows is multiplied without the zeros to its right.
    """
    result = torch.zeros_like(left)
    for start in range(0, len(left), _CHUNK_ROWS):
        end = min(start + _CHUNK_ROWS, len(left))
        result[start:end, :end] = left[start:end, :end] @ right[:end, :end]
    return result


def log_matmul(
    left: Float[Tensor, "query middle"], right: Float[Tensor, "middle key"]
) -> Float[Tensor, "query key"]:
    """Return log(exp(left) @ exp(right)) without underflow; −inf is the logarithm of an exact zero.

    One matrix product, of rows and columns scaled to a maximum of 1, gives all entries that are far from
    underflow. Rows with any other entry are computed again by logsumexp.
    """
    # The maximum of a row or column of zeros is −inf, and −inf − (−inf) would be NaN.
    row_scale = left.amax(1, keepdim=True).nan_to_num(neginf=0.0)
    column_scale = right.amax(0, keepdim=True).nan_to_num(neginf=0.0)
    scaled = ((left - row_scale).exp() @ (right - column_scale).exp()).log()
    result = scaled + row_scale + column_scale
    is_nonzero = compose(left > -math.inf, right > -math.inf)
    inexact_rows = (is_nonzero & (scaled < _SAFE_LOG)).any(1).nonzero().flatten()
    # logsumexp makes a tensor [row, middle, key], so each chunk of rows is bounded to about 2^22 numbers.
    chunk_rows = max(1, 2**22 // right.numel())
    for rows in inexact_rows.split(chunk_rows):
        result[rows] = torch.logsumexp(left[rows][:, :, None] + right, dim=1)
    return result


def compose(
    left: Bool[Tensor, "query middle"], right: Bool[Tensor, "middle key"]
) -> Bool[Tensor, "query key"]:
    """Return which keys a query reaches through any position in the middle."""
    # torch has no matrix product of booleans.
    return (left.to(torch.float32) @ right.to(torch.float32)) > 0
