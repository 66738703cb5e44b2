"""Memory that is used again, and work cut into pieces that fit it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of rows, all alike.

    Attributes:
        first: the first one.
        count: how many.
        step: from the start of one to the start of the next.
    """

    first: slice
    count: int
    step: int


# Rows of a clean tensor (positions of all prompts in one line): a window, some (for as many tiles, whose keys
# share them), or one row per pair.
Rows = slice | Windows | Tensor


def of_rows(x: Float[Tensor, "row ..."], rows: Rows) -> Float[Tensor, "*row ..."]:
    """Some rows; a view where they are windows."""
    if isinstance(rows, slice):
        return x[rows]
    if isinstance(rows, Windows):
        row, *rest = x.stride()
        own = x[rows.first]
        shape = (rows.count, 1, *own.shape)
        return own.as_strided(shape, (rows.step * row, 0, row, *rest), own.storage_offset())
    return x.index_select(0, rows)


# Shapes of one buffer that are remembered.
_MOST_VIEWS = 256


class Workspace:
    """Buffers by name, taken once and used again: new memory can cost more than what is computed in it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        # Views that were handed out, by name and shape: making one takes as long as a small product.
        self._views: dict[str, dict[tuple[int, ...], Tensor]] = {}

    def like(self, name: str, model: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised room of a shape, on the model tensor's device; what it held before is gone."""
        shape = tuple(shape)
        views = self._views.get(name, {})
        view = views.get(shape)
        if view is not None and view.dtype == dtype and view.device == model.device:
            return view
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        # What was made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            if (
                buffer is None
                or buffer.numel() < size
                or (buffer.dtype, buffer.device) != (dtype, model.device)
            ):
                buffer = self._buffers[name] = torch.empty(size, dtype=dtype, device=model.device)
                views = self._views[name] = {}
            if len(views) == _MOST_VIEWS:
                views.clear()
            view = views[shape] = buffer[:size].view(shape)
        return view

    def rows(self, name: str, x: Float[Tensor, "row width"], rows: Rows) -> Float[Tensor, "*row width"]:
        """`of_rows`, a copy made in a buffer."""
        if not isinstance(rows, Tensor):
            return of_rows(x, rows)
        out = self.like(f"rows {name}", x, (len(rows), x.shape[-1]), x.dtype)
        return torch.index_select(x, 0, rows, out=out)


def even(start: int, stop: int, most: int) -> Iterator[slice]:
    """Even pieces, none longer than `most`."""
    if start >= stop:
        return
    width = -(-(stop - start) // -(-(stop - start) // most))
    for begin in range(start, stop, width):
        yield slice(begin, min(begin + width, stop))
