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
from lens_mix.maps.characters import joined
from lens_mix.maps.exchange import full_name
from lens_mix.view.labels import FONT, INK, NAME_FONT, QUIET, TITLE_FONT, labels_that_fit, visible_token
from lens_mix.view.layers import layer_names
from lens_mix.view.lazy import need_canvas

_FAINTEST = 1e-4  # on a logarithmic scale, this share of the largest score and less have the lightest colour
_LONGEST_PROMPT = 60  # characters of a prompt in a subtitle


class Grid:
    """Where the heat maps stand, in inches, and what is written at them."""

    top, gap, heading, bar = 0.42, 0.12, 0.24, 0.85

    def __init__(
        self, names: list[str], columns: int, rows: list[str], keys: list[str], title: str, subtitle: str
    ) -> None:
        longest = need_canvas().longest
        self.names, self.row_labels, self.key_labels = names, rows, keys
        self.title, self.subtitle = title, subtitle
        self.columns = min(columns, len(names))
        # A single row of few heat maps has the room to be read token by token.
        widest_panel = 2.2 if self.columns > 3 else 5.4
        self.panel_width = max(min(0.15 * len(keys), widest_panel), 1.3, longest(names, NAME_FONT) + 0.1)
        self.panel_height = min(max(0.15 * len(rows), 1.3), widest_panel)
        self.left, self.bottom = 0.36 + longest(rows, FONT), 0.42 + longest(keys, FONT)
        # where the last column ends, and the first row begins
        self.right = self.left + self.columns * (self.panel_width + self.gap) - self.gap
        self.rows = math.ceil(len(names) / self.columns)
        self.ceiling = self.bottom + self.rows * (self.panel_height + self.heading) - self.heading
        written = max(longest([title], TITLE_FONT) * 1.15, longest([subtitle], FONT) * 1.1)
        self.width = max(self.right + self.gap + self.bar, written + 0.3)
        self.height = self.ceiling + self.heading + self.top + (0.16 if subtitle else 0)

    def corner(self, place: int) -> tuple[float, float]:
        """Left and bottom of one heat map."""
        row, column = divmod(place, self.columns)
        left = self.left + column * (self.panel_width + self.gap)
        return left, self.bottom + (self.rows - 1 - row) * (self.panel_height + self.heading)


def draw_grid(
    grid: Grid,
    panels: Sequence[tuple[Float[Tensor, "row key"], Bool[Tensor, "row key"]]],
    rows: str,
    unit: str,
    logarithmic: bool,
    strongest: Sequence[int],
) -> Any:
    """The figure of heat maps (scores, and which are visible) on one colour scale.

    `rows` and `unit` are what the rows and the colours stand for, written once for all; `strongest` are the
    keys that have a label whatever happens.
    """
    canvas = need_canvas()
    picture = canvas.Picture(grid.width, grid.height)
    norm = _norm((scores.masked_fill(~visible, 0) for scores, visible in panels), logarithmic)
    for place, (scores, visible) in enumerate(panels):
        axes = picture.add_box(*grid.corner(place), grid.panel_width, grid.panel_height)
        image = _draw_panel(axes, scores, visible, norm)
        axes.set_title(grid.names[place], size=NAME_FONT, color=INK, pad=3)
        # Labels only where no other heat map stands.
        if place % grid.columns == 0:
            canvas.label_ticks(axes.yaxis, grid.row_labels, labels_that_fit(grid.panel_height, FONT))
        if place + grid.columns >= len(grid.names):
            limit = labels_that_fit(grid.panel_width, FONT)
            canvas.label_ticks(axes.xaxis, grid.key_labels, limit, rotation=90, strongest=strongest)
    up, look = grid.ceiling - grid.bottom, {"size": FONT + 1, "color": QUIET}
    picture.write(0.1, grid.bottom + up / 2, rows, rotation=90, ha="left", va="center", **look)
    picture.write((grid.left + grid.right) / 2, 0.08, "key", ha="center", va="bottom", **look)
    height = min(up, 2.6)
    left = grid.right + grid.gap + 0.06
    bar = picture.add_colour_bar(image, left, grid.ceiling - height, height, extend="neither")
    least = f", logarithmic from {_FAINTEST * norm.vmax:.2g}" if logarithmic else ""
    if logarithmic and norm.vmin < 0:
        # Its own ticks would be written over each other around 0.
        ticks = [share * norm.vmax for share in (-1, -0.1, -0.01, 0, 0.01, 0.1, 1)]
        bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
        bar.ax.minorticks_off()
    bar.set_label(unit + least, size=FONT, color=QUIET)
    picture.write_title(grid.title, grid.subtitle)
    return picture


def _draw_panel(
    axes: Any, scores: Float[Tensor, "row key"], visible: Bool[Tensor, "row key"], norm: Any
) -> Any:
    """One heat map; entries that are not visible are grey."""
    canvas = need_canvas()
    # A logarithmic scale starts above 0: what lies below has its lightest colour.
    drawn = scores.detach().to("cpu", torch.float64).clamp_min(norm.vmin)
    image = axes.imshow(
        np.ma.masked_array(drawn.numpy(), ~visible.cpu().numpy()),
        cmap=canvas.colours(signed=norm.vmin < 0),
        norm=norm,
        aspect="auto",
        interpolation="nearest",
    )
    canvas.thin_frame(axes, ticks=1.5)
    axes.tick_params(pad=1.5)
    axes.set(xticks=[], yticks=[])
    return image


def _norm(scores: Iterable[Tensor], logarithmic: bool) -> Any:
    """From 0 to the largest score of all, or as far below 0 as above where there are scores below."""
    from matplotlib import colors

    lows, highs = zip(*((each.min().item(), each.max().item()) for each in scores), strict=True)
    low, high = min(lows), max(highs)
    bound = max(high, -low) or 1.0
    if not logarithmic:
        return colors.Normalize(-bound if low < 0 else 0.0, bound)
    if low < 0:
        return colors.SymLogNorm(_FAINTEST * bound, vmin=-bound, vmax=bound)
    return colors.LogNorm(_FAINTEST * bound, bound)


def default_title(mixing_map: MixingMap, head: int | str | None) -> str:
    name = full_name(mixing_map, ", ")
    if head == "all":
        return f"{name}, {layer_names(mixing_map)[0]}" if len(mixing_map) == 1 else name
    if mixing_map.has_heads:
        name += ", mean over heads" if head is None else f", head {head}"
    return name


def subtitle(mixing_map: MixingMap, unit: str) -> str:
    """The model, the prompt and the unit, as far as the map's record tells them."""
    record = mixing_map.provenance
    # Of a hub's name all, of a folder the end.
    model = "/".join(str(record.get("model", "")).rstrip("/").split("/")[-2:])
    text = record.get("prompt")
    prompt = text if isinstance(text, str) else joined(mixing_map.tokens) if model else ""
    prompt = prompt and visible_token(prompt, _LONGEST_PROMPT).replace("·", " ").strip()
    return " · ".join(part for part in (model, f"“{prompt}”" if prompt else "", unit) if part)
