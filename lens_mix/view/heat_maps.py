"""Draw heat maps, and a grid of them on one color scale for `figures.layer_maps`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import check_number
from lens_mix.maps import MixingMap
from lens_mix.view.bars import measure_head
from lens_mix.view.labels import FONT, INK, NAME_FONT, QUIET, TITLE_FONT, count_labels, name_map
from lens_mix.view.layers import name_layers
from lens_mix.view.lazy import load_canvas

if TYPE_CHECKING:
    from lens_mix.view.canvas import DrawnPicture

_FAINTEST = 1e-4  # the start of a logarithmic scale, as a share of the largest score

Scale = Literal["linear", "log"]


class HeatMapPlaces:
    """Compute the places of the heat maps, in inches, and keep the texts that are written at them."""

    gap, heading, bar, least = 0.12, 0.24, 0.85, 0.8

    def __init__(
        self,
        names: list[str],
        columns: int,
        rows: list[str],
        keys: list[str],
        title: str,
        subtitle: str,
        figsize: tuple[float, float | None] | None = None,
    ) -> None:
        canvas = load_canvas()
        measure = canvas.measure_longest
        self.names, self.row_labels, self.key_labels = names, rows, keys
        self.left, self.bottom = 0.36 + measure(rows, FONT), 0.42 + measure(keys, FONT)
        # In a narrow figure without a height, fewer heat maps are side by side.
        while figsize is not None and figsize[1] is None and columns > 1:
            if (figsize[0] - self._measure_beside(columns)) / columns >= self.least:
                break
            columns -= 1
        self.rows = math.ceil(len(names) / columns)
        # The heat maps are spread over the lines, so that no line is half empty.
        self.columns = math.ceil(len(names) / self.rows)
        # A few heat maps side by side can be so wide that every token has a label.
        widest_panel = 2.2 if self.columns > 3 else 5.4
        self.panel_width = max(min(0.15 * len(keys), widest_panel), 1.3, measure(names, NAME_FONT) + 0.1)
        self.panel_height = min(max(0.15 * len(rows), 1.3 if len(rows) > 1 else 0.3), widest_panel)
        beside = self._measure_beside(self.columns)
        if figsize is not None:
            self.panel_width = (figsize[0] - beside) / self.columns
            # Rows that are as high as columns are wide need the least space for their labels.
            self.panel_height = min(self.panel_height, self.panel_width * max(len(rows) / len(keys), 0.2))
        self.right = self.left + self.columns * (self.panel_width + self.gap) - self.gap
        self.width = max(self.right + self.gap + self.bar, 3.6 if figsize is None else 0)
        self.title = canvas.wrap(title, TITLE_FONT, (self.width - 0.24) / 1.15)
        self.subtitle = canvas.wrap(subtitle, FONT, (self.width - 0.24) / 1.1)
        head = measure_head(self.title, self.subtitle)
        around = self.bottom + self.rows * self.heading + head
        if figsize is not None:
            height = around + self.rows * self.panel_height if figsize[1] is None else figsize[1]
            self.panel_height = (height - around) / self.rows
            if self.panel_width < 0.5 or self.panel_height < 0.2:
                needed = (beside + 0.5 * self.columns, around + 0.2 * self.rows)
                raise ValueError(
                    f"figsize: expected at least {needed[0]:.1f} x {needed[1]:.1f} inches for these labels, "
                    f"got {figsize[0]} x {height}"
                )
        self.ceiling = self.bottom + self.rows * (self.panel_height + self.heading) - self.heading
        self.height = around + self.rows * self.panel_height

    def _measure_beside(self, columns: int) -> float:
        """Return the width of all that is beside the heat maps."""
        return float(self.left + columns * self.gap + self.bar)

    def find_corner(self, index: int) -> tuple[float, float]:
        """Return the left and the bottom of one heat map."""
        row, column = divmod(index, self.columns)
        left = self.left + column * (self.panel_width + self.gap)
        return left, self.bottom + (self.rows - 1 - row) * (self.panel_height + self.heading)


def draw_grid(
    grid: HeatMapPlaces,
    panels: Sequence[tuple[Float[Tensor, "row key"], Bool[Tensor, "row key"]]],
    rows: str,
    unit: str,
    logarithmic: bool,
    strongest: Sequence[int],
    cmap: Any = None,
    vmax: float | None = None,
) -> DrawnPicture:
    """Return a figure of heat maps on one color scale.

    Args:
        grid: The places and texts.
        panels: For each heat map its scores, and which of them are visible.
        rows: The meaning of the rows, "query" or "layer"; it is written once.
        unit: The unit of the scores, written at the color bar.
        logarithmic: Whether the color scale is logarithmic.
        strongest: The keys, the strongest first, which are labeled in this order.
        cmap: A color map of the user.
        vmax: The end of the color scale; None: the largest score.
    """
    canvas = load_canvas()
    picture: DrawnPicture = canvas.DrawnPicture(grid.width, grid.height)
    norm = make_norm((scores.masked_fill(~visible, 0) for scores, visible in panels), logarithmic, vmax)
    for index, (scores, visible) in enumerate(panels):
        axes = picture.add_box(*grid.find_corner(index), grid.panel_width, grid.panel_height)
        image = draw_cells(axes, scores, visible, norm, cmap)
        axes.set_title(grid.names[index], size=NAME_FONT, color=INK, pad=3, loc="center", parse_math=False)
        # Only the first column and the last row have labels, because inside there is no space for them.
        if index % grid.columns == 0:
            canvas.label_ticks(axes.yaxis, grid.row_labels, count_labels(grid.panel_height, FONT))
        if index + grid.columns >= len(grid.names):
            limit = count_labels(grid.panel_width, FONT)
            canvas.label_ticks(axes.xaxis, grid.key_labels, limit, rotation=90, strongest=strongest)
    up, look = grid.ceiling - grid.bottom, {"size": FONT + 1, "color": QUIET}
    picture.write(0.1, grid.bottom + up / 2, rows, rotation=90, ha="left", va="center", **look)
    picture.write((grid.left + grid.right) / 2, 0.08, "key", ha="center", va="bottom", **look)
    height = min(up, 2.6)
    left = grid.right + grid.gap + 0.06
    bar = picture.add_color_bar(image, left, grid.ceiling - height, height)
    finish_bar(bar, norm, unit)
    picture.write_title(grid.title, grid.subtitle)
    return picture


def draw_cells(
    axes: Any, scores: Float[Tensor, "row key"], visible: Bool[Tensor, "row key"], norm: Any, cmap: Any = None
) -> Any:
    """Return the image of one heat map, drawn in axes; entries that are not visible are gray."""
    canvas = load_canvas()
    # A logarithmic scale starts above 0, so smaller scores are raised to its start.
    drawn = scores.detach().to("cpu", torch.float64).clamp_min(norm.vmin)
    image = axes.imshow(
        np.ma.masked_array(drawn.numpy(), ~visible.cpu().numpy()),
        cmap=canvas.choose_color_map(norm.vmin < 0, cmap),
        norm=norm,
        aspect="auto",
        interpolation="nearest",
    )
    canvas.draw_thin_frame(axes, ticks=1.5)
    axes.tick_params(pad=1.5)
    axes.set(xticks=[], yticks=[])
    return image


def make_norm(scores: Iterable[Tensor], logarithmic: bool, vmax: float | None = None) -> Any:
    """Return a color scale from 0 to the largest score, symmetric around 0 if there are negative scores.

    Its attribute `extend` says at which ends scores are beyond it, which the color bar draws as points.

    Args:
        scores: The scores of one or several heat maps.
        logarithmic: Whether the scale is logarithmic.
        vmax: The end of the scale; None: the largest score.
    """
    from matplotlib import colors

    lows, highs = zip(*((panel.min().item(), panel.max().item()) for panel in scores), strict=True)
    low, high = min(lows), max(highs)
    bound = (max(high, -low) or 1.0) if vmax is None else vmax
    norm: Any
    if not logarithmic:
        norm = colors.Normalize(-bound if low < 0 else 0.0, bound)
    elif low < 0:
        norm = colors.SymLogNorm(_FAINTEST * bound, vmin=-bound, vmax=bound)
    else:
        norm = colors.LogNorm(_FAINTEST * bound, bound)
    # Shares that sum to 1 may be larger by rounding.
    beyond = bound * (1 + 1e-9)
    above, below = high > beyond, low < -beyond
    norm.extend = "both" if above and below else "max" if above else "min" if below else "neither"
    return norm


def check_vmax(vmax: float | None) -> float | None:
    """Return the end of a color scale that a user chose; raise an error unless it is above 0, or None."""
    return None if vmax is None else check_number("vmax", vmax, 0, above=True)


def finish_bar(bar: Any, norm: Any, unit: str) -> None:
    """Write the unit at a color bar, and the start of a logarithmic scale."""
    from matplotlib import colors

    is_logarithmic = isinstance(norm, (colors.LogNorm, colors.SymLogNorm))
    least = f", logarithmic from {_FAINTEST * norm.vmax:.2g}" if is_logarithmic else ""
    if is_logarithmic and norm.vmin < 0:
        # The default ticks would overlap around 0.
        ticks = [share * norm.vmax for share in (-1, -0.1, -0.01, 0, 0.01, 0.1, 1)]
        bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
        bar.ax.minorticks_off()
    bar.set_label(unit + least, size=FONT, color=QUIET)


def make_title(mixing_map: MixingMap, head: int | str | None) -> str:
    """Return the default title of a figure: the method, the aggregation, and which heads are drawn."""
    name = name_map(mixing_map)
    if head == "all":
        return f"{name}, {name_layers(mixing_map)[0]}" if len(mixing_map) == 1 else name
    if mixing_map.has_heads:
        name += ", mean over heads" if head is None else f", head {head}"
    return name
