"""How `figures.layer_maps` and `figures.query_maps` draw: a grid of heat maps on one colour scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.maps import MixingMap
from lens_mix.view.labels import FONT, INK, NAME_FONT, QUIET, TITLE_FONT, room_for
from lens_mix.view.lazy import need_canvas


class Grid:
    """Where the heat maps stand, in inches, and what is written at them."""

    top, gap, heading, bar = 0.42, 0.12, 0.24, 0.85

    def __init__(self, names: list[str], columns: int, rows: list[str], keys: list[str], title: str) -> None:
        longest = need_canvas().longest
        self.names, self.row_labels, self.key_labels, self.title = names, rows, keys, title
        self.columns = min(columns, len(names))
        # A single row of few heat maps has the room to be read token by token.
        widest_panel = 2.2 if self.columns > 3 else 5.4
        self.panel_width = max(min(0.15 * len(keys), widest_panel), 1.3, longest(names, NAME_FONT) + 0.1)
        self.panel_height = min(max(0.15 * len(rows), 1.3), widest_panel)
        self.left, self.bottom = 0.36 + longest(rows, FONT), 0.36 + longest(keys, FONT)
        # where the last column ends, and the first row begins
        self.right = self.left + self.columns * (self.panel_width + self.gap) - self.gap
        self.rows = math.ceil(len(names) / self.columns)
        self.ceiling = self.bottom + self.rows * (self.panel_height + self.heading) - self.heading
        self.width = max(self.right + self.gap + self.bar, longest([title], TITLE_FONT) * 1.15 + 0.3)
        self.height = self.ceiling + self.heading + self.top

    def corner(self, place: int) -> tuple[float, float]:
        """Left and bottom of one heat map."""
        row, column = divmod(place, self.columns)
        left = self.left + column * (self.panel_width + self.gap)
        return left, self.bottom + (self.rows - 1 - row) * (self.panel_height + self.heading)


def draw_grid(
    grid: Grid,
    panels: Sequence[tuple[Float[Tensor, "row key"], Bool[Tensor, "row key"]]],
    rows: str,
    scale: str,
) -> Any:
    """The figure of heat maps (scores, and which are visible) on one colour scale.

    `rows` and `scale` are what the rows and the colours stand for, written once for all.
    """
    picture = need_canvas().Picture(grid.width, grid.height)
    limits = _colour_limits(scores for scores, _ in panels)
    for place, (scores, visible) in enumerate(panels):
        image = _draw_panel(picture, grid, place, scores, visible, limits)
    up, look = grid.ceiling - grid.bottom, {"size": FONT + 1, "color": QUIET}
    picture.write(0.1, grid.bottom + up / 2, rows, rotation=90, ha="left", va="center", **look)
    picture.write((grid.left + grid.right) / 2, 0.08, "key", ha="center", va="bottom", **look)
    height = min(up, 2.6)
    left = grid.right + grid.gap + 0.06
    bar = picture.add_colour_bar(image, left, grid.ceiling - height, height, extend="neither")
    bar.set_label(scale, size=FONT, color=QUIET)
    picture.write_title(grid.title)
    return picture


def _draw_panel(
    picture: Any, grid: Grid, place: int, scores: Tensor, visible: Tensor, limits: tuple[float, float]
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
    axes.set(xticks=[], yticks=[])
    if place % grid.columns == 0:
        canvas.label_ticks(axes.yaxis, grid.row_labels, room_for(grid.panel_height, FONT))
    if place + grid.columns >= len(grid.names):
        canvas.label_ticks(axes.xaxis, grid.key_labels, room_for(grid.panel_width, FONT), rotation=90)
    return image


def _colour_limits(scores: Iterable[Tensor]) -> tuple[float, float]:
    """From 0 to the largest score of all, or as far below 0 as above where there are scores below."""
    ends = [(each.min().item(), each.max().item()) for each in scores]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    bound = max(high, -low) if low < 0 else high or 1.0
    return (-bound, bound) if low < 0 else (0.0, bound)


def default_title(mixing_map: MixingMap, head: int | None) -> str:
    aggregation = mixing_map.provenance.get("aggregation")
    name = mixing_map.method + (f", {aggregation['name']}" if isinstance(aggregation, dict) else "")
    if mixing_map.has_heads:
        name += ", mean over heads" if head is None else f", head {head}"
    return name
