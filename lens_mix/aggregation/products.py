"""Cumulative products of stacks of maps, in numbers and in logarithms of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# exp(-650) is far above the smallest normal float64 (exp(-708)), so a sum that reaches it cannot
# have lost a term worth more than exp(-58) of itself.
_LOG_SAFE = -650.0
_ROWS = 256  # of a causal product at once

Product = Callable[[Tensor, Tensor], Tensor]
Residual = float | Float[Tensor, "layer query"]  # one weight for all layers and rows, or one for each


def add_residual(
    maps: Float[Tensor, "*axes query key"], weight: float | Float[Tensor, "*rows query"]
) -> Float[Tensor, "*axes query key"]:
    """(1 − weight) · maps + weight · identity, written over maps whose rows sum to 1 or are all zero.

    An all-zero row becomes the identity's row where the weight is above 0 (nothing but the residual came in,
    as in (A + I) / rowsum) and stays zero where it is 0. A tensor holds one per row (heads may share them).
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
    """J_0 = maps_0, J_l = maps_l J_{l−1} (Abnar & Zuidema, ACL 2020, section 3.1).

    With `heads`, layer l of the result is heads_l J_{l−1}: what one head of the layer adds on top of
    everything below it (the paper's appendix).
    """
    result = torch.empty_like(maps if heads is None else heads)
    below: Tensor | None = None
    for place, matrix in enumerate(maps):
        merged = matrix if below is None else product(matrix, below)
        if heads is None:
            result[place] = merged
        else:
            for head, single in enumerate(heads[place]):
                result[place, head] = single if below is None else product(single, below)
        below = merged
    return result


def lower_product(
    left: Float[Tensor, "query middle"], right: Float[Tensor, "middle key"]
) -> Float[Tensor, "query key"]:
    """Return left @ right for causal maps, whose entries above the diagonal are zero.

    Some rows are multiplied at a time, without the zeros to their right.
    """
    result = torch.zeros_like(left)
    for start in range(0, len(left), _ROWS):
        end = min(start + _ROWS, len(left))
        result[start:end, :end] = left[start:end, :end] @ right[:end, :end]
    return result


def log_matmul(
    left: Float[Tensor, "query middle"], right: Float[Tensor, "middle key"]
) -> Float[Tensor, "query key"]:
    """log(exp(left) @ exp(right)) with no underflow; −inf stands for an exact zero.

    One matrix product of rows and columns scaled to a maximum of 1 serves all entries that stay far
    from underflow; the rows with any other entry are done again by logsumexp.
    """
    # The largest of a row or column of zeros is −inf, which would make NaN of their difference.
    row_scale = left.amax(1, keepdim=True).nan_to_num(neginf=0.0)
    column_scale = right.amax(0, keepdim=True).nan_to_num(neginf=0.0)
    scaled = ((left - row_scale).exp() @ (right - column_scale).exp()).log()
    result = scaled + row_scale + column_scale
    possible = compose(left > -math.inf, right > -math.inf)
    again = (possible & (scaled < _LOG_SAFE)).any(1).nonzero().flatten()
    block = max(1, 2**22 // right.numel())  # rows whose sums hold so many numbers at once
    for rows in again.split(block):
        result[rows] = torch.logsumexp(left[rows][:, :, None] + right, dim=1)
    return result


def compose(
    left: Bool[Tensor, "query middle"], right: Bool[Tensor, "middle key"]
) -> Bool[Tensor, "query key"]:
    """Which keys a query reaches through any position in the middle."""
    return (left.to(torch.float32) @ right.to(torch.float32)) > 0  # torch has no product of booleans
