"""How `figures.layer_maps` and `figures.query_maps` draw: a grid of heat maps on one colour scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.maps import MixingMap
from lens_mix.view.labels import FONT, INK, NAME_FONT, QUIET, TITLE_FONT, room_for, shown_positions
from lens_mix.view.lazy import need_canvas


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where the heat maps stand, in inches."""

    names: list[str]
    title: str
    columns: int
    row_labels: list[str]
    key_labels: list[str]
    panel_width: float
    panel_height: float
    left: float
    bottom: float
    top: float
    gap: float = 0.12
    heading: float = 0.24
    bar: float = 0.85
    title_width: float = 0.0

    @classmethod
    def of(cls, names: list[str], columns: int, rows: list[str], keys: list[str], title: str) -> Grid:
        longest = need_canvas().longest
        columns = min(columns, len(names))
        # A single row of few heat maps has the room to be read token by token.
        widest_panel = 2.2 if columns > 3 else 5.4
        return cls(
            names=names,
            title=title,
            title_width=longest([title], TITLE_FONT) * 1.15,
            columns=columns,
            row_labels=rows,
            key_labels=keys,
            panel_width=max(min(0.15 * len(keys), widest_panel), 1.3, longest(names, NAME_FONT) + 0.1),
            panel_height=min(max(0.15 * len(rows), 1.3), widest_panel),
            left=0.36 + longest(rows, FONT),
            bottom=0.36 + longest(keys, FONT),
            top=0.42,
        )

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def rows(self) -> int:
        return math.ceil(self.count / self.columns)

    @property
    def right(self) -> float:
        """Where the last column ends."""
        return self.left + self.columns * (self.panel_width + self.gap) - self.gap

    @property
    def width(self) -> float:
        return max(self.right + self.gap + self.bar, self.title_width + 0.3)

    @property
    def height(self) -> float:
        return self.top + self.rows * (self.panel_height + self.heading) + self.bottom

    def corner(self, place: int) -> tuple[float, float]:
        """Left and bottom of one heat map."""
        row, column = divmod(place, self.columns)
        left = self.left + column * (self.panel_width + self.gap)
        below = self.rows - 1 - row
        return left, self.bottom + below * (self.panel_height + self.heading)


def draw_panel(
    picture: Any,
    grid: Grid,
    place: int,
    scores: Float[Tensor, "row key"],
    visible: Bool[Tensor, "row key"],
    limits: tuple[float, float],
) -> Any:
    """One heat map; entries that are not visible are grey. Labels only where no other heat map stands."""
    canvas = need_canvas()
    axes = picture.add_box(*grid.corner(place), grid.panel_width, grid.panel_height)
    image = axes.imshow(
        np.ma.masked_array(scores.detach().to("cpu", torch.float64).numpy(), ~visible.cpu().numpy()),
        cmap=canvas.colours(signed=limits[0] < 0),
        vmin=limits[0],
        vmax=limits[1],
        aspect="auto",
        interpolation="nearest",
    )
    canvas.thin_frame(axes, ticks=1.5)
    axes.set_title(grid.names[place], size=NAME_FONT, color=INK, pad=3)
    axes.tick_params(pad=1.5)
    for axis, names, inches, wanted, rotation in (
        (axes.yaxis, grid.row_labels, grid.panel_height, place % grid.columns == 0, 0),
        (axes.xaxis, grid.key_labels, grid.panel_width, place + grid.columns >= grid.count, 90),
    ):
        places = shown_positions(len(names), room_for(inches, FONT)) if wanted else []
        canvas.label_ticks(axis, places, [names[i] for i in places], size=FONT, color=INK, rotation=rotation)
    return image


def finish(picture: Any, grid: Grid, image: Any, rows: str, scale: str) -> None:
    """What the rows and columns of every heat map are, the colour bar and the title, once for all."""
    up = grid.height - grid.top - grid.heading - grid.bottom
    look = {"size": FONT + 1, "color": QUIET}
    picture.write(0.1, grid.bottom + up / 2, rows, rotation=90, ha="left", va="center", **look)
    picture.write((grid.left + grid.right) / 2, 0.08, "key", ha="center", va="bottom", **look)
    top, height = grid.height - grid.top - grid.heading, min(up, 2.6)
    bar = picture.add_colour_bar(image, grid.right + grid.gap + 0.06, top - height, height)
    bar.set_label(scale, size=FONT, color=QUIET)
    picture.write_title(grid.title)


def colour_limits(scores: Iterable[Tensor]) -> tuple[float, float]:
    """From 0 to the largest score of all, or as far below 0 as above where there are scores below."""
    ends = [(each.min().item(), each.max().item()) for each in scores]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    if low < 0:
        return -max(high, -low), max(high, -low)
    return 0.0, high or 1.0


def default_title(mixing_map: MixingMap, head: int | None) -> str:
    aggregation = mixing_map.provenance.get("aggregation")
    name = mixing_map.method + (f", {aggregation['name']}" if isinstance(aggregation, dict) else "")
    if mixing_map.has_heads:
        name += ", mean over heads" if head is None else f", head {head}"
    return name
