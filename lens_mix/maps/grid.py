"""The places of a map's positions in a picture or in sound: a grid of patches, or frames in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_items, check_number, check_whole_number


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which positions are the patches of a picture, or the frames of sound, and where these are.

    A cell is one patch or frame. Cells are numbered row by row. Positions without a cell, such as [CLS], are
    outside of the grid.

    Attributes:
        rows: The number of rows. For a waveform it is 1, and for a spectrogram it is the number of bands, the
            lowest frequency first.
        columns: The number of columns. For sound, they follow each other in time.
        positions: The position of each cell.
        size: The height and width of what the cells cover: pixels of a picture, (1, samples) of a waveform,
            or (bands, frames) of a spectrogram.
        patch: The height and width of a cell, in the unit of `size`.
        step: The distance of neighboring cells, down and to the right. It is smaller than `patch` if cells
            overlap.
        seconds: The time of one unit of the width. None: it is a picture.
        picture_size: The height and width of the picture that was given, before the model's processor resized
            and cropped it. None: not known.
        window: What the cells cover of that picture: the top, left, bottom and right of `size`, in pixels of
            the picture. Padding moves an edge outside of the picture. None: not known.

    Raises:
        TypeError: If a number has a wrong type.
        ValueError: If a number is out of range, or there is not one position per cell.
    """

    rows: int
    columns: int
    positions: tuple[int, ...]
    size: tuple[int, int]
    patch: tuple[int, int]
    step: tuple[int, int]
    seconds: float | None = None
    picture_size: tuple[int, int] | None = None
    window: tuple[float, float, float, float] | None = None

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            name: check_whole_number(name, getattr(self, name), 1) for name in ("rows", "columns")
        }
        for name in ("size", "patch", "step", *(() if self.picture_size is None else ("picture_size",))):
            pair = check_items(name, getattr(self, name), "whole numbers", least=2)
            if len(pair) != 2:
                raise ValueError(f"{name}: expected a height and a width, got {pair}")
            values[name] = tuple(check_whole_number(name, number, 1) for number in pair)
        positions = check_items("positions", self.positions, "positions", least=1)
        values["positions"] = tuple(check_whole_number("positions", position, 0) for position in positions)
        count = len(set(values["positions"]))
        if count != values["rows"] * values["columns"] or count != len(positions):
            raise ValueError(
                f"positions: expected {values['rows'] * values['columns']} different ones, one per cell of "
                f"{values['rows']} x {values['columns']}, got {len(positions)}"
            )
        if self.seconds is not None:
            values["seconds"] = check_number("seconds", self.seconds, 0)
        if self.window is not None:
            values["window"] = _check_window(self.window, self.picture_size)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_sound(self) -> bool:
        """Whether the columns are times."""
        return self.seconds is not None

    @property
    def noun(self) -> str:
        """What a position of the grid is called: "frame" of a waveform, else "patch"."""
        return "frame" if self.is_sound and self.rows == 1 else "patch"

    @property
    def times(self) -> list[float] | None:
        """The time in seconds at which each column begins. None: it is a picture."""
        if self.seconds is None:
            return None
        return [column * self.step[1] * self.seconds for column in range(self.columns)]

    def place(self, position: int) -> tuple[int, int] | None:
        """Return the row and the column of a position; None if it is outside of the grid."""
        if position not in self.positions:
            return None
        return divmod(self.positions.index(position), self.columns)

    def box(self, position: int) -> tuple[int, int, int, int] | None:
        """Return top, left, bottom and right of a position's cell, in the unit of `size`; None outside.

        The cell contains neither its bottom nor its right.
        """
        place = self.place(position)
        if place is None:
            return None
        top, left = (index * step for index, step in zip(place, self.step, strict=True))
        return top, left, min(top + self.patch[0], self.size[0]), min(left + self.patch[1], self.size[1])

    def label(self, position: int) -> str | None:
        """Return the label of a position: "patch 3,5", "0.24 s" or "0.24 s, band 3"; None outside.

        Rows, columns and bands are numbered from 0.
        """
        place = self.place(position)
        if place is None or self.seconds is None:
            return None if place is None else f"patch {place[0]},{place[1]}"
        step = self.step[1] * self.seconds
        time = f"{place[1] * step:.{2 if step >= 0.01 else 4}f} s"
        return time if self.rows == 1 else f"{time}, band {place[0]}"

    def lay_out(self, row: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes row column"]:
        """Return the numbers of a row of a map at their places: `m.grid.lay_out(m.scores[-1, 0])`."""
        cells: Tensor = row[..., torch.tensor(self.positions, dtype=torch.long, device=row.device)]
        laid_out: Tensor = cells.unflatten(-1, (self.rows, self.columns))
        return laid_out

    def moved(self, new_position: Mapping[int, int]) -> Grid | None:
        """Return the grid after its positions have moved; None if not all of them remain."""
        if not set(self.positions) <= new_position.keys():
            return None
        return dataclasses.replace(
            self, positions=tuple(new_position[position] for position in self.positions)
        )

    def record(self) -> dict[str, Any]:
        """Return the fields as values that JSON can represent."""
        return {name: _as_list(value) for name, value in vars(self).items()}


def _check_window(window: Any, picture_size: Any) -> tuple[float, ...]:
    edges = tuple(check_number("window", edge) for edge in check_items("window", window, "edges", least=4))
    if picture_size is None or len(edges) != 4 or edges[0] >= edges[2] or edges[1] >= edges[3]:
        raise ValueError(
            "window: expected top, left, bottom and right, in this order, beside picture_size, got "
            f"{list(edges)} and picture_size={picture_size}"
        )
    return edges


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, Iterable) else value


def as_grid(grid: Any, count: int) -> Grid | None:
    """Return the grid of a map with `count` keys, given as a `Grid`, as its record, or as None.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it has a position that the map does not have.
    """
    if grid is None:
        return None
    if isinstance(grid, Mapping):
        grid = Grid(**grid)
    if not isinstance(grid, Grid):
        raise TypeError(f"grid: expected a Grid or None, got {type(grid).__name__}")
    if max(grid.positions) >= count:
        raise ValueError(f"grid: expected positions of the map's {count} keys, got {max(grid.positions)}")
    return grid
