"""The positions that a hook is asked for, and the mask they are in one batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.hooks._arguments import as_index

Position = int | slice | Int[Tensor, "batch"] | Bool[Tensor, "batch key"] | Bool[Tensor, "key"]
# A tuple stands for `positions`, an int for `position`: errors name the argument that was given.
CheckedPosition = int | slice | Tensor | tuple[int, ...]


def as_position(position: Position | None, positions: Sequence[int] | None) -> CheckedPosition:
    """Exactly one of the two arguments, checked as far as that is possible without the batch."""
    if (position is None) == (positions is None):
        given = "both" if position is not None else "neither"
        raise TypeError(f"position, positions: expected exactly one of them; got {given}")
    if positions is not None:
        return _as_positions(positions)
    if isinstance(position, slice):
        return position
    if isinstance(position, Tensor) and position.ndim > 0:
        return _as_tensor(position)
    if isinstance(position, list | tuple | range | set):
        raise TypeError(
            f"position: expected an int, a slice or a tensor; got a {type(position).__name__}. For several "
            "positions in every row use positions=[...] or a slice, for another position in each batch row a "
            "1-D integer tensor"
        )
    return as_index("position", position)


def _as_positions(positions: Sequence[int]) -> tuple[int, ...]:
    if isinstance(positions, str | slice) or not isinstance(positions, Iterable):
        raise TypeError(f"positions: expected a sequence of integers; got {positions!r}")
    listed = positions.tolist() if isinstance(positions, Tensor) else positions
    chosen = tuple(as_index("positions", one) for one in listed)
    if not chosen:
        raise ValueError("positions: expected at least one position; got none")
    return chosen


def _as_tensor(position: Tensor) -> Tensor:
    is_mask = position.dtype == torch.bool
    if position.is_floating_point() or position.is_complex() or position.ndim > (2 if is_mask else 1):
        raise TypeError(
            "position: expected an integer tensor [batch], or a bool tensor [batch key] or [key]; "
            f"got {position.dtype} of shape {tuple(position.shape)}"
        )
    return position.detach().cpu()


def position_mask(
    chosen: CheckedPosition, values: Float[Tensor, "batch key value_head d_head"]
) -> Bool[Tensor, "#batch key"]:
    """True at the chosen positions; one row if all rows agree."""
    batch, length = values.shape[:2]
    if isinstance(chosen, Tensor) and chosen.dtype == torch.bool:
        if tuple(chosen.shape) not in ((length,), (batch, length)):
            raise ValueError(
                f"position: expected a bool tensor [{batch}, {length}] or [{length}]; got shape "
                f"{tuple(chosen.shape)}"
            )
        return chosen.reshape(-1, length).to(values.device)
    in_each_row = isinstance(chosen, Tensor)
    mask = torch.zeros(batch if in_each_row else 1, length, dtype=torch.bool, device=values.device)
    if isinstance(chosen, slice):
        if not range(length)[chosen]:
            raise ValueError(
                f"position: expected a slice of {length} positions; got {chosen}, which is empty"
            )
        mask[:, chosen] = True
        return mask
    if isinstance(chosen, Tensor) and len(chosen) != batch:
        raise ValueError(
            f"position: expected one position for each of {batch} batch rows; got {len(chosen)} "
            "(for several positions in every row use positions=)"
        )
    argument = "positions" if isinstance(chosen, tuple) else "position"
    columns = torch.as_tensor(chosen).reshape(-1).long()
    for position in (int(columns.min()), int(columns.max())):
        if not -length <= position < length:
            raise ValueError(
                f"{argument}: expected a position from {-length} to {length - 1}, as there are {length}; "
                f"got {position}"
            )
    mask[torch.arange(batch) if in_each_row else 0, columns] = True
    return mask
