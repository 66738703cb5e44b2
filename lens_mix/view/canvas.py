"""Define the figure class, the fonts and the colors.

This file imports matplotlib, so other files must import it inside functions only (`lazy.load_canvas`).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.textpath import TextPath

from lens_mix.arguments import check_instance, check_items, check_number
from lens_mix.files import replacing
from lens_mix.view.colors import BLUES, HIDDEN, SIGNED
from lens_mix.view.fonts import list_families, make_readable
from lens_mix.view.labels import (
    FONT,
    INK,
    NAME_FONT,
    PAPER_FONT,
    PAPER_WIDTH,
    QUIET,
    TITLE_FONT,
    place_labels,
)
from lens_mix.view.window import note_written

_LINE = "#cccccc"
DARK = BLUES[10]


class DrawnPicture(Figure):
    """Define a matplotlib Figure that is independent of pyplot: without global state and without a window.

    A notebook shows it as the result of a cell.
    """

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=150, facecolor="white")
        FigureCanvasAgg(self)  # sets the canvas of the figure

    def add_box(self, left: float, bottom: float, width: float, height: float) -> Any:
        """Return new axes at a place in inches from the lower left corner."""
        whole_width, whole_height = self.get_size_inches()
        box = (left / whole_width, bottom / whole_height, width / whole_width, height / whole_height)
        return self.add_axes(box)

    def draw(self, renderer: Any) -> None:
        """Draw the figure with a font for every character; a character without a font becomes its number."""
        _use_fonts(self)
        super().draw(renderer)

    def write(self, left: float, bottom: float, text: str, **options: Any) -> Any:
        """Write text at a place in inches; a `$` in it is a character, not the start of a formula."""
        whole_width, whole_height = self.get_size_inches()
        return self.text(left / whole_width, bottom / whole_height, text, parse_math=False, **options)

    def write_title(self, title: str | None, subtitle: str = "", size: float = TITLE_FONT) -> None:
        """Write the title in the upper left corner, and a gray line below it, if they are not empty."""
        top = self.get_size_inches()[1] - 0.12
        if title:
            self.write(0.12, top, title, size=size, color=INK, va="top", weight="bold", linespacing=1.3)
        if subtitle:
            below = top if title is None else top - 0.2 * (title.count("\n") + 1)
            self.write(0.12, below, subtitle, size=FONT, color=QUIET, va="top", linespacing=1.3)

    def add_color_bar(self, image: Any, left: float, bottom: float, height: float) -> Any:
        """Return a new narrow color bar at a place in inches; it ends in points as its scale says."""
        box = self.add_box(left, bottom, 0.1, height)
        bar = self.colorbar(image, cax=box, extendfrac=0.06)
        style_bar(bar)
        return bar

    def enlarge(self, factor: float) -> None:
        """Enlarge the figure together with all its text."""
        width, height = self.get_size_inches()
        self.set_size_inches(width * factor, height * factor)
        for text in self.findobj(Text):
            text.set_fontsize(float(text.get_fontsize()) * factor)
        for axes in self.axes:
            # Ticks that are made later, while the figure is drawn, have this size too.
            axes.tick_params(labelsize=FONT * factor)

    def savefig(self, fname: Any, **options: Any) -> Any:
        """Save the figure as matplotlib does, but replace an old file only once the new one is complete.

        In PDF and PostScript, text is written in TrueType fonts, which publishers accept.
        """
        with rc_context({"pdf.fonttype": 42, "ps.fonttype": 42}):
            return self._save(fname, **options)

    def _save(self, fname: Any, **options: Any) -> Any:
        note_written(self)
        if not isinstance(fname, (str, os.PathLike)):
            return super().savefig(fname, **options)
        path = str(os.fspath(fname))
        if not (options.get("format") or os.path.splitext(path)[1][1:]):
            # matplotlib adds the ending to a name without one; the temporary file needs the same ending.
            options["format"] = self.canvas.get_default_filetype()
            path = f"{path.rstrip('.')}.{options['format']}"
        with replacing(path) as temporary:
            return super().savefig(temporary, **options)

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()


class Panel:
    """A figure of one panel: axes with a title, in a new figure or in axes that a user gave.

    Attributes:
        axes: The axes.
    """

    def __init__(self, axes: Any, picture: DrawnPicture | None) -> None:
        self.axes, self._picture = axes, picture

    def add_color_bar(self, image: Any) -> Any:
        """Return a new color bar at the right of the panel."""
        if self._picture is None:
            bar = self.axes.figure.colorbar(image, ax=self.axes, pad=0.02, aspect=30)
            style_bar(bar)
            return bar
        box = self.axes.get_position()
        width, height = self._picture.get_size_inches()
        left, bottom = box.x1 * width + 0.1, box.y0 * height
        return self._picture.add_color_bar(image, left, bottom, box.height * height)

    def finish(self) -> Figure:
        """Return the figure, after its texts have a font for every character."""
        return finish_axes(self.axes) if self._picture is None else self._picture


def open_panel(
    left: float,
    bottom: float,
    inner: tuple[float, float],
    beside: tuple[float, float],
    title: str | None,
    ax: Any,
    figsize: Any,
) -> Panel:
    """Return a panel with its title, in a new figure or in axes that a user gave.

    Args:
        left: The space at the left of the panel, in inches.
        bottom: The space below it.
        inner: Its width and height.
        beside: The space at its right and above it.
        title: The title; None or "": no title.
        ax: The axes of a user, or None.
        figsize: The size that a user asked for, or None.

    Raises:
        TypeError: If `ax` is not matplotlib axes, or `figsize` not a pair of numbers.
        ValueError: If both are given, or `figsize` is too small.
    """
    if ax is not None:
        check_axes(ax, figsize, 1, "")
        if title:
            ax.set_title(title, size=NAME_FONT, color=INK, loc="left", parse_math=False)
        return Panel(ax, None)
    size = (left + inner[0] + beside[0], bottom + inner[1] + beside[1])
    if figsize is not None:
        size = check_size(figsize)
        inner = (size[0] - left - beside[0], size[1] - bottom - beside[1])
        if min(inner) < 0.5:
            needed = (left + 0.5 + beside[0], bottom + 0.5 + beside[1])
            raise ValueError(
                f"figsize: expected at least {needed[0]:.1f} x {needed[1]:.1f} inches for these labels, got "
                f"{size[0]} x {size[1]}"
            )
    picture = DrawnPicture(*size)
    picture.write_title(wrap(title or "", 10, (size[0] - 0.24) / 1.15), size=10)
    return Panel(picture.add_box(left, bottom, *inner), picture)


def draw_thin_frame(axes: Any, ticks: float) -> None:
    """Draw thin gray spines, and ticks of this length in points."""
    axes.spines[:].set(color=_LINE, linewidth=0.6)
    axes.tick_params(length=ticks, width=0.5, color=QUIET)


def style_bar(bar: Any) -> None:
    """Draw a color bar with thin gray lines and small numbers."""
    bar.outline.set(edgecolor=_LINE, linewidth=0.6)
    bar.ax.tick_params(labelsize=FONT, length=1.5, width=0.5, color=QUIET, labelcolor=INK)


def _make_color_map(signed: bool) -> Colormap:
    """Return the color map for scores from 0 up, or for signed scores; masked entries are gray."""
    steps = SIGNED if signed else BLUES
    return LinearSegmentedColormap.from_list("lens_mix", steps).with_extremes(bad=HIDDEN)


def choose_color_map(signed: bool, cmap: str | Colormap | None) -> Colormap:
    """Return the color map that a user chose, or the one that fits the scores; masked entries are gray.

    Raises:
        TypeError: If `cmap` is neither a name nor a color map.
        ValueError: If there is no color map of this name.
    """
    if cmap is None:
        return _make_color_map(signed)
    check_instance("cmap", cmap, (str, Colormap), "a color map of matplotlib or its name")
    if isinstance(cmap, str) and cmap not in colormaps:
        raise ValueError(f"cmap: expected a name in matplotlib.colormaps, such as 'viridis', got {cmap!r}")
    return colormaps.get_cmap(cmap).with_extremes(bad=HIDDEN)


def is_dark(color: Sequence[float]) -> bool:
    """Return whether white text on this color has more contrast than dark text."""
    red, green, blue = (float(share) ** 2.2 for share in color[:3])
    luminance: float = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return luminance < 0.22


def _use_fonts(artist: Any) -> None:
    """Give all texts of a figure or of axes a font for every character.

    A character that no installed font has becomes its number.
    """
    texts = artist.findobj(Text)
    families = list_families(text.get_text() for text in texts)
    for text in texts:
        text.set_fontfamily(families)
        if (shown := text.get_text()) != (readable := make_readable(shown)):
            text.set_text(readable)


def measure_longest(labels: Iterable[str], points: float) -> float:
    """Return the length in inches of the longest label, in a font of this size."""
    # A `$` would be read as the start of a formula, so it is measured as an S, which has the same width.
    readable = [make_readable(label.replace("$", "S")) for label in labels if label.strip()]
    font = font_manager.FontProperties(family=list_families(readable))
    paths = (TextPath((0, 0), label, size=points, prop=font) for label in readable)
    # The control points of the letters' curves are enough; their exact extent takes much longer.
    return max((float(np.ptp(path.vertices[:, 0])) for path in paths), default=0.0) / 72


def wrap(text: str, points: float, inches: float) -> str:
    """Return the text with line breaks at spaces, so that no line is longer than `inches`.

    A single longer word has a line of its own.
    """
    lines: list[list[str]] = [[]]
    space, used = measure_longest(["n"], points) / 2, 0.0
    for word in text.split(" "):
        # A word may contain line breaks; what follows is then beside its last line.
        pieces = word.split("\n")
        if lines[-1] and used + space + measure_longest(pieces[:1], points) > inches:
            lines.append([])
            used = 0.0
        used = (used + space if len(pieces) == 1 else 0.0) + measure_longest(pieces[-1:], points)
        lines[-1].append(word)
    return "\n".join(" ".join(line) for line in lines)


def check_axes(ax: Any, figsize: Any, count: int, argument: str) -> None:
    """Raise an error if a figure cannot be drawn in the axes that a user gave.

    Args:
        ax: The axes.
        figsize: The size that was asked for; the axes have their own.
        count: The number of heat maps or rows of the figure.
        argument: What to choose one of, for the error.

    Raises:
        TypeError: If `ax` is not matplotlib axes.
        ValueError: If there is more than one heat map or row, or a `figsize`.
    """
    check_instance("ax", ax, Axes, "axes of matplotlib, such as those of plt.subplots()")
    if count != 1:
        raise ValueError(
            f"ax: expected a figure with one panel to draw in axes, got {count} panels; choose one with "
            f"{argument}, or leave ax= out for a figure of its own"
        )
    if figsize is not None:
        raise ValueError(f"figsize: expected None beside ax=, whose figure has a size, got {figsize!r}")


def finish_axes(ax: Any) -> Figure:
    """Return the figure of axes that a user gave, after all texts in them have a font."""
    _use_fonts(ax)
    figure: Figure = ax.figure
    return figure


def measure_axes(ax: Any) -> tuple[float, float]:
    """Return the width and height of axes in inches."""
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def check_size(figsize: Any) -> tuple[float, float]:
    """Return a width and a height in inches.

    Raises:
        TypeError: If `figsize` is not a pair of numbers.
        ValueError: If a number is not above 0.
    """
    width, height = check_items("figsize", figsize, "a width and a height in inches", least=2)
    return check_number("figsize", width, 0, above=True), check_number("figsize", height, 0, above=True)


def choose_size(figsize: Any, style: str) -> tuple[float, float | None] | None:
    """Return the width and height in which a figure is laid out; None: as the content needs.

    A figure for paper is laid out smaller, because it is enlarged afterwards (`finish_style`).
    """
    if style != "paper":
        return None if figsize is None else check_size(figsize)
    width, height = (PAPER_WIDTH, None) if figsize is None else check_size(figsize)
    factor = FONT / PAPER_FONT
    return width * factor, None if height is None else height * factor


def finish_style(picture: DrawnPicture, style: str) -> DrawnPicture:
    """Return a figure with the size and the text of its style."""
    if style == "paper":
        picture.enlarge(PAPER_FONT / FONT)
    return picture


def label_ticks(
    axis: Any,
    labels: Sequence[str],
    limit: int | None = None,
    color: str = INK,
    rotation: int = 0,
    strongest: Sequence[int] = (),
) -> None:
    """Write labels at 0, 1, … on an axis; a `$` in a label is not the start of a formula.

    Args:
        axis: The axis.
        labels: One label per position.
        limit: The largest number of labels; None: all.
        color: The color of the labels.
        rotation: The angle of the labels, in degrees.
        strongest: If there are too many labels, the positions from the strongest to the weakest: each has a
            label if there is space beside the labels before it. Empty: the labels are evenly spaced.
    """
    chosen = place_labels(len(labels), len(labels) if limit is None else limit, strongest)
    axis.set_ticks(chosen, labels=[make_readable(labels[position]) for position in chosen])
    for label in axis.get_ticklabels():
        label.set(parse_math=False, size=FONT, color=color, rotation=rotation)
