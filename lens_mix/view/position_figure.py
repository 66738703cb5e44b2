"""Draw one position: layers × tokens, several methods side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from lens_mix.arguments import check_choice, check_flags, check_instance, check_whole_number
from lens_mix.maps.spans import Span
from lens_mix.view.colored_text import TextBlock
from lens_mix.view.colors import MARK
from lens_mix.view.heat_maps import Scale, check_vmax, draw_cells, finish_bar, make_norm
from lens_mix.view.labels import (
    FONT,
    INK,
    NAME_FONT,
    QUIET,
    TITLE_FONT,
    Style,
    count_labels,
    make_visible,
    place_labels,
    quote,
    space_evenly,
)
from lens_mix.view.lazy import load_canvas
from lens_mix.view.position import LayerRow, MapsToDraw, PositionView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from lens_mix.view.canvas import DrawnPicture

_CELL = 0.15  # the largest width in inches of a column, so that each has a label
_ROW = 0.13  # the height of a layer
# The width of all heat maps side by side; of two, each has space for all labels of 36 tokens.
_WIDEST, _WIDEST_OF_TWO = 7.6, 8.7
_NUMBER = 0.29  # the smallest width of a column of numbers
_NUMBER_FONT = 5.5
_BAR = 0.6  # the width of a small color bar above a heat map
_SENTENCE_FONT = 8.5


def show_position(
    maps: MapsToDraw,
    query: int | str | None = None,
    *,
    columns: int = 3,
    normalize: bool | None = None,
    title: str | None = None,
    words: bool = False,
    keys: Span | None = None,
    scale: Scale = "linear",
    common_scale: bool | None = None,
    as_numbers: bool = True,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
    cmap: str | Colormap | None = None,
    vmax: float | None = None,
    style: Style = "screen",
) -> Figure:
    """Return a figure of what one position used, layer by layer: layers × tokens, methods side by side.

        >>> maps = lm.run(model, "The Eiffel Tower is in the city of", ["attention", "value_zeroing"])
        >>> lm.show_position(maps, columns=2).savefig("position.png")

    The title says what is explained, if the maps contain it: "After ' in': ' Italian' 0.66". The sentence
    below names the largest score, which has an orange frame. A map with one layer, such as an input map, is
    drawn above the others as colored text. For a map with heads, the mean over heads is drawn.

    The first token of a decoder, and the special tokens of an encoder, often have most of a row, because they
    are sinks of attention. Many methods also give the position itself a large share. These are numbers beside
    each layer, and the colors are for the others. If these numbers are more than 90 % of every row and no
    other token has 1 %, nothing is colored. Tokens are labeled from the strongest to the weakest, each if
    there is space beside the labels before it, and the same ones in every heat map. Keys that the position
    cannot see are left out.

    Args:
        maps: A map, a dict of maps by name, or a list of maps, all over the same tokens. Maps with more than
            one layer have the same layers.
        query: The position (negative: from the end), or a text of the prompt; each map must have its row.
            None: the default row of the first map that has one (`MixingMap.default_query`), else the last
            row.
        columns: The largest number of heat maps side by side, 1 or more.
        normalize: True: rows are divided by their sum. False: raw scores. None: True for each map without
            negative scores.
        title: The title; None: what is explained.
        words: Whether pieces are merged into words.
        keys: The positions of the columns to draw (of words, if merged), or a text; None: all that the
            position sees.
        scale: "linear", or "log" for a logarithmic scale from 1/10,000 of the largest score.
        common_scale: Whether all heat maps have one color scale. None: True if all are shares of a row, and
            the largest share of each is at least a third of the largest of all; smaller ones would be too
            pale to see. With `vmax=`, True if all have one unit. A colored text always has its own scale,
            and its heading names the largest score.
        as_numbers: Whether the first token (in an encoder, the special tokens) and the position itself are
            numbers instead of columns.
        ax: matplotlib axes to draw in, for a single map; None: a new figure.
        figsize: The width and height of the figure in inches; None: as the content needs.
        cmap: A matplotlib color map or its name; None: blues, and orange to purple for negative scores.
        vmax: The end of every color scale, above 0, so that several figures have the same scale:
            `lm.show_position(m, vmax=0.5)`. Larger scores have its last color, and the color bar then ends
            in a point. A scale with negative scores begins at -vmax. None: the largest score.
        style: "paper" is for a column of a printed page: 3.3 inches wide with text of 8 points, heat maps
            below each other, without a title and a frame, and in greys, so that nothing depends on hue: a
            scale with negative scores goes from white to black. `figsize=`, `title=` and `cmap=` change that.
            `m.show(style="paper").savefig("m.pdf")`

    Raises:
        TypeError: `maps` is or contains something else.
        ValueError: No maps; maps over different tokens or layers; a query that a map does not have; `columns`
            below 1; negative scores with `normalize=True`; several maps or `figsize` with `ax`; a `figsize`
            that is too small for the labels; a `vmax` that is not above 0.
        ImportError: Matplotlib is not installed.
    """
    columns, vmax = check_whole_number("columns", columns, 1), check_vmax(vmax)
    check_flags(words=words, as_numbers=as_numbers)
    for name, flag in (("normalize", normalize), ("common_scale", common_scale)):
        if flag is not None:
            check_flags(**{name: flag})
    check_choice("scale", scale, get_args(Scale))
    check_instance("title", title, (str, type(None)), "a text")
    canvas = load_canvas()
    view = PositionView.from_maps(maps, query, normalize, words, keys, as_numbers)
    check_choice("style", style, get_args(Style))
    if style == "paper":
        view = dataclasses.replace(view, title="", sentence="", subtitle="", best=None)
        cmap, columns = cmap or "Greys", columns if figsize else 1
    heading = view.title if title is None else title
    if common_scale is None:
        is_given = vmax is not None and len({panel.unit for panel in view.panels}) == 1
        common_scale = is_given or _are_comparable(view)
    norms = _make_norms(view, common_scale, scale == "log", vmax)
    if ax is not None:
        canvas.check_axes(ax, figsize, len(view.panels), "maps")
        _draw_in_axes(ax, view, norms[0], cmap, heading)
        drawn_in: Figure = canvas.finish_axes(ax)
        return drawn_in
    size = canvas.choose_size(figsize, style)
    frame = _Frame(view, columns, heading, common_scale, size)
    picture: DrawnPicture = canvas.DrawnPicture(*frame.size)
    _draw_blocks(picture, frame, norms, cmap)
    _draw_panels(picture, frame, norms, cmap)
    picture.write_title(frame.title)
    lines = ((frame.sentence, _SENTENCE_FONT, INK), (frame.subtitle, FONT, QUIET))
    top = frame.size[1] - frame.title_height
    for text, size, color in lines:
        if text:
            picture.write(0.12, top, text, size=size, color=color, va="top", linespacing=1.3)
            top -= frame.measure_height(text, size)
    finished: Figure = canvas.finish_style(picture, style)
    return finished


def _are_comparable(view: PositionView) -> bool:
    """Return whether one color scale is good for all heat maps."""
    panels = [panel for panel in view.panels if not panel.has_one_layer]
    largest = [view.read_columns(panel)[0].abs().max().item() for panel in panels]
    return all(panel.is_share for panel in panels) and min(largest, default=0) >= max(largest, default=0) / 3


def _make_norms(view: PositionView, common_scale: bool, logarithmic: bool, vmax: float | None) -> list[Any]:
    """Return the color scale of each map."""
    grid = [panel for panel in view.panels if not panel.has_one_layer]
    return [
        make_norm(
            view.read_scaled(grid if common_scale and not panel.has_one_layer else [panel]),
            logarithmic,
            vmax,
        )
        for panel in view.panels
    ]


class _Frame:
    """Compute the places of the figure, in inches from the top left corner.

    Attributes:
        blocks: The maps with one layer, which are drawn as colored text.
        grid: The indices of the other maps.
        size: The width and height of the figure.
        panel: The width and height of a heat map.
        numbers: The width of the numbers beside a heat map.
        ranked: The columns from the strongest to the weakest of all heat maps, which label the same columns.
    """

    def __init__(
        self,
        view: PositionView,
        columns: int,
        title: str,
        common_scale: bool,
        figsize: tuple[float, float | None] | None,
    ) -> None:
        self.view, self.common = view, common_scale
        self.texts = [index for index, panel in enumerate(view.panels) if panel.has_one_layer]
        self.grid = [index for index, panel in enumerate(view.panels) if not panel.has_one_layer]
        self.rows = math.ceil(len(self.grid) / columns)
        self.columns = math.ceil(len(self.grid) / self.rows) if self.grid else 0
        self.key_labels = [make_visible(view.keys[key]) for key in view.columns]
        self.numbers = _measure_numbers(view) * len(view.numbers) + (0.06 if view.numbers else 0)
        self.beside = self.numbers + 0.18
        layer_labels = view.panels[self.grid[0]].layer_labels if self.grid else []
        self.left = 0.4 + load_canvas().measure_longest(layer_labels, FONT) if self.grid else 0.12
        fixed = self.left + self.columns * self.beside + (0.72 if common_scale else 0)
        whole, width = self._choose_width(fixed) if figsize is None else (figsize[0], figsize[0] - fixed)
        width = width if figsize is None else width / max(self.columns, 1)
        around = self._place_head(title, max(whole, 1.0)) + self.rows * self._measure_labels(width) + 0.06
        height = min(max(_ROW * len(layer_labels), 1.3), 6.5)
        if figsize is not None:
            # In a narrow column, not each layer has a label.
            total = around + self.rows * min(height, 1.9) if figsize[1] is None else figsize[1]
            needed = (max(fixed + self.columns * 0.8, 2.0), around + self.rows * 0.6)
            if figsize[0] < needed[0] or total < needed[1]:
                raise ValueError(
                    f"figsize: expected at least {needed[0]:.1f} x {needed[1]:.1f} inches for these labels, "
                    f"got {figsize[0]} x {total}"
                )
            height = (total - around) / max(self.rows, 1)
        else:
            total = around + self.rows * height
        self.panel = (width, height)
        self.size = (whole, total)

    def _choose_width(self, fixed: float) -> tuple[float, float]:
        """Return the width of the figure and that of each heat map, as the labels need.

        Args:
            fixed: The width of what is beside the heat maps.
        """
        if not self.grid:
            return 6.6, 0.0
        names = [self.view.panels[index].name for index in self.grid]
        # A small color bar is beside the name of each heat map that has its own scale.
        longest = load_canvas().measure_longest(names, NAME_FONT) * 1.15 + 0.1
        longest += 0 if self.common else _BAR + 0.5
        widest = _WIDEST_OF_TWO if self.columns == 2 else _WIDEST
        width = min(_CELL * len(self.view.columns), widest / self.columns)
        width = max(width, longest - self.numbers, 1.5)
        # The heat maps of a few tokens are wider, so that the title has space.
        width = max(width, min((4.6 - fixed) / self.columns, 2 * width))
        return fixed + self.columns * width, width

    def _place_head(self, title: str, whole: float) -> float:
        """Break the texts into lines, and return the height of all that is above the heat maps."""
        canvas, inner = load_canvas(), whole - 0.24
        self.title = canvas.wrap(title, TITLE_FONT, inner / 1.15)
        self.sentence = canvas.wrap(self.view.sentence, _SENTENCE_FONT, inner / 1.1)
        noise = [
            (panel.name, self.view.describe_noise(panel))
            for panel in self.view.panels
            if not panel.has_one_layer
        ]
        pale = [f"{name}: {words}" for name, words in noise if words]
        subtitle = " · ".join(filter(None, (self.view.subtitle, _explain_numbers(self.view), *pale)))
        self.subtitle = canvas.wrap(subtitle, FONT, inner / 1.1)
        self.title_height = 0.17 + (self.measure_height(self.title, TITLE_FONT) if title else 0)
        head = self.title_height + self.measure_height(self.sentence, _SENTENCE_FONT)
        self.head = head + self.measure_height(self.subtitle, FONT) + 0.06
        self.blocks = [self._make_block(index, inner) for index in self.texts]
        self.block_height = sum(block.height + 0.16 for block in self.blocks)
        return float(self.head + self.block_height)

    def _measure_labels(self, width: float) -> float:
        """Return the height of the name above a heat map, and of the tokens below it."""
        self.above = 0.32 if self.view.numbers else 0.24
        limit, count = count_labels(width, FONT), len(self.key_labels)
        self.ranked = self.view.rank_columns([self.view.panels[index] for index in self.grid])
        labels = [self.key_labels[key] for key in place_labels(count, limit, self.ranked)]
        self.below = 0.16 + float(load_canvas().measure_longest(labels, FONT))
        return float(self.above + self.below)

    def _make_block(self, index: int, width: float) -> TextBlock:
        view, panel = self.view, self.view.panels[index]
        scores = panel.scores[0].tolist()
        numbers = [
            f"{name} {panel.write_score(panel.total(keys)[0].item())}" for name, keys in view.numbers.items()
        ]
        largest = view.columns[view.rank_columns([panel])[0]]
        numbers.append(f"{quote(view.keys[largest])} {panel.write_score(scores[largest])}")
        heading = f"{panel.name}, {panel.unit}: {', '.join(numbers)}"
        heading = "; ".join(filter(None, (heading, view.describe_noise(panel))))
        shown = sorted([*view.columns, *view.number_keys])
        tokens = [view.keys[key] for key in shown]
        outlined = {shown.index(key) for key in view.number_keys}
        return TextBlock(heading, tokens, [scores[key] for key in shown], outlined, width, view.prediction)

    @staticmethod
    def measure_height(text: str, points: float) -> float:
        """Return the height of lines of text."""
        return 0.0 if not text else (text.count("\n") + 1) * points * 1.42 / 72 + 0.04

    def find_corner(self, place: int) -> tuple[float, float]:
        """Return the left and the bottom of a heat map, from the lower left corner of the figure."""
        row, column = divmod(place, self.columns)
        top = self.head + self.block_height + row * (self.panel[1] + self.above + self.below) + self.above
        return self.left + column * (self.panel[0] + self.beside), self.size[1] - top - self.panel[1]


def _explain_numbers(view: PositionView) -> str:
    """Return what the numbers beside the layers are."""
    # Positions outside of a grid, such as [CLS], are not called tokens.
    special = "the positions " if view.has_grid else "the special tokens "
    meanings = {"first": "the first token ", "special": special, "own": "the position itself"}
    named = [
        f"{name}: {meanings[name]}{'' if name == 'own' else ' '.join(quote(view.keys[key]) for key in keys)}"
        for name, keys in view.numbers.items()
    ]
    return ", ".join(named)


def _draw_blocks(picture: Any, frame: _Frame, norms: Sequence[Any], cmap: Any) -> None:
    """Draw the maps with one layer as colored text, from the top down."""
    top = frame.size[1] - frame.head
    for block, index in zip(frame.blocks, frame.texts, strict=True):
        block.draw(picture, 0.12, top, norms[index], cmap)
        top -= block.height + 0.16


def _draw_panels(picture: Any, frame: _Frame, norms: Sequence[Any], cmap: Any) -> None:
    canvas, view, (width, height) = load_canvas(), frame.view, frame.panel
    for place, index in enumerate(frame.grid):
        panel = view.panels[index]
        left, bottom = frame.find_corner(place)
        axes = picture.add_box(left, bottom, width, height)
        image = draw_cells(axes, *view.read_columns(panel), norms[index], cmap)
        pad = 3.5 if not view.numbers else 9
        axes.set_title(panel.name, size=NAME_FONT, color=INK, pad=pad, loc="left", weight="bold")
        axes.title.set_parse_math(False)
        # Layers have labels beside the first heat map of each line, tokens below each heat map.
        if place % frame.columns == 0:
            canvas.label_ticks(axes.yaxis, panel.layer_labels, count_labels(height, FONT))
            axes.set_ylabel("layer", size=FONT, color=QUIET, labelpad=2)
        limit = count_labels(width, FONT)
        canvas.label_ticks(axes.xaxis, frame.key_labels, limit, rotation=90, strongest=frame.ranked)
        _write_numbers(axes, view, panel, width, height)
        _mark_best(axes, view, index)
        if not frame.common:
            _add_small_bar(picture, image, left + width + frame.numbers, bottom + height)
    if frame.common and frame.grid:
        left, bottom = frame.find_corner(frame.columns - 1)
        size = min(height, 2.4)
        left += width + frame.numbers + 0.14
        bar = picture.add_color_bar(image, left, bottom + height - size, size)
        finish_bar(bar, image.norm, view.panels[frame.grid[0]].unit)


def _add_small_bar(picture: Any, image: Any, right: float, bottom: float) -> None:
    """Draw the color bar of one heat map above its right corner, with the ends of the scale."""
    norm = image.norm
    high = f"{'≥ ' * (norm.extend in ('max', 'both'))}{norm.vmax:.2g}"
    end = load_canvas().measure_longest([high], _NUMBER_FONT)
    axes = picture.add_box(right - end - 0.04 - _BAR, bottom + 0.16, _BAR, 0.07)
    bar = picture.colorbar(image, cax=axes, orientation="horizontal", ticks=[])
    bar.ax.minorticks_off()
    bar.outline.set(linewidth=0.4, edgecolor=QUIET)
    look = {"size": _NUMBER_FONT, "color": QUIET, "va": "center_baseline"}
    picture.write(right - end, bottom + 0.192, high, ha="left", **look)
    picture.write(right - end - 0.08 - _BAR, bottom + 0.192, f"{norm.vmin:.2g}", ha="right", **look)


def _write_numbers_of(panel: LayerRow, keys: Sequence[int]) -> list[str]:
    """Return the number beside each layer."""
    return [panel.write_score(number).replace(" %", "%") for number in panel.total(keys).tolist()]


def _measure_numbers(view: PositionView) -> float:
    """Return the width of a column of numbers."""
    numbers = {
        number
        for panel in view.panels
        for keys in view.numbers.values()
        for number in _write_numbers_of(panel, keys)
    }
    longest = sorted(numbers, key=len)[-3:]
    return max(_NUMBER, float(load_canvas().measure_longest(longest, _NUMBER_FONT)) + 0.1)


def _write_numbers(axes: Any, view: PositionView, panel: LayerRow, width: float, height: float) -> None:
    """Write the numbers of each layer at the right of the heat map."""
    number = _measure_numbers(view)
    rows = space_evenly(len(panel.layers), count_labels(height, _NUMBER_FONT - 1))
    look = {"size": _NUMBER_FONT, "color": QUIET, "ha": "right", "clip_on": False}
    for place, (name, keys) in enumerate(view.numbers.items()):
        written = _write_numbers_of(panel, keys)
        x = 1 + number * (place + 1) / width
        across, over = axes.get_yaxis_transform(), axes.transAxes
        axes.text(x, 1 + 0.025 / height, name, transform=over, va="bottom", **{**look, "color": INK})
        for row in rows:
            axes.text(x, row, written[row], transform=across, va="center_baseline", **look)


def _mark_best(axes: Any, view: PositionView, index: int) -> None:
    """Draw a frame around the score that the sentence names."""
    from matplotlib.patches import Rectangle

    if view.best is None or view.best[0] != index or view.best[1].key not in view.columns:
        return
    corner = view.columns.index(view.best[1].key) - 0.5, view.best[1].layer - 0.5
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, ec=MARK, lw=1.2, clip_on=False, zorder=3))


def _draw_in_axes(axes: Any, view: PositionView, norm: Any, cmap: Any, title: str) -> None:
    """Draw the only map in axes of a user's figure, with its color bar beside them."""
    canvas, panel = load_canvas(), view.panels[0]
    image = draw_cells(axes, *view.read_columns(panel), norm, cmap)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02 + 0.06 * len(view.numbers), aspect=30)
    canvas.style_bar(bar)
    finish_bar(bar, norm, panel.unit)
    width, height = canvas.measure_axes(axes)
    labels = [make_visible(view.keys[key]) for key in view.columns]
    canvas.label_ticks(axes.yaxis, panel.layer_labels, count_labels(height, FONT))
    limit, ranked = count_labels(width, FONT), view.rank_columns()
    canvas.label_ticks(axes.xaxis, labels, limit, rotation=90, strongest=ranked)
    axes.set_ylabel("layer", size=FONT, color=QUIET)
    axes.set_title(title, size=NAME_FONT, color=INK, loc="left", pad=12, parse_math=False)
    _write_numbers(axes, view, panel, width, height)
    _mark_best(axes, view, 0)
