"""Define the figure class, the fonts and the colours.

This file imports matplotlib, so other files must import it inside functions only (`lazy.load_canvas`).
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib import colormaps, font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.textpath import TextPath

from lens_mix.files import replacing
from lens_mix.view.labels import FONT, INK, QUIET, TITLE_FONT, place_labels

# The colours go from almost white to almost black in one hue, at equal distances in CIELAB. Equal differences
# of scores then look equal, and the order can be seen by colour-blind readers and in grey print.
_BLUES = """f9fbfd e3f3fb cce9f7 b4def3 9ed1ed 89c3e6 73b4de 5ca6d6 4296cb
2985bc 1c75ad 19659f 155690 094680 09376d 0e2b5a 111f47"""
_SIGNED = "PuOr"
_HIDDEN = "#e9e9e9"
_LINE = "#cccccc"
_LEADER = 5.0  # the length in points of the line from a column to its label
# Usual fonts for other scripts and for signs; matplotlib cannot draw fonts with coloured emoji.
_OTHER_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR"),
    *("Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "IPAexGothic"),
    *("PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic"),
    *("Arial Unicode MS", "Noto Sans Devanagari", "Noto Sans Arabic", "Noto Sans Thai", "Noto Emoji"),
    *("Symbola", "Segoe UI Symbol", "Segoe UI Emoji", "Unifont"),
)


class Picture(Figure):
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
        for text in self.findobj(Text):
            text.set_fontfamily(_list_families())
            if not (shown := text.get_text()).isascii() and shown != (readable := _make_readable(shown)):
                text.set_text(readable)
        super().draw(renderer)

    def write(self, left: float, bottom: float, text: str, **options: Any) -> Any:
        """Write text at a place in inches; a `$` in it is a character, not the start of a formula."""
        whole_width, whole_height = self.get_size_inches()
        return self.text(left / whole_width, bottom / whole_height, text, parse_math=False, **options)

    def write_title(self, title: str | None, subtitle: str = "", size: float = TITLE_FONT) -> None:
        """Write the title in the upper left corner, and a grey line below it, if they are not empty."""
        top = self.get_size_inches()[1] - 0.12
        if title:
            self.write(0.12, top, title, size=size, color=INK, va="top", weight="bold")
        if subtitle:
            below = top if title is None else top - 0.2
            self.write(0.12, below, subtitle, size=FONT, color=QUIET, va="top")

    def add_colour_bar(self, image: Any, left: float, bottom: float, height: float, extend: str) -> Any:
        """Return a new narrow colour bar at a place in inches."""
        box = self.add_box(left, bottom, 0.1, height)
        bar = self.colorbar(image, cax=box, extend=extend, extendfrac=0.03)
        bar.outline.set(edgecolor=_LINE, linewidth=0.6)
        bar.ax.tick_params(labelsize=FONT, length=1.5, width=0.5, color=QUIET, labelcolor=INK)
        return bar

    def savefig(self, fname: Any, **options: Any) -> Any:
        """Save the figure as matplotlib does, but replace an old file only once the new one is complete."""
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


def draw_thin_frame(axes: Any, ticks: float) -> None:
    """Draw thin grey spines, and ticks of this length in points."""
    axes.spines[:].set(color=_LINE, linewidth=0.6)
    axes.tick_params(length=ticks, width=0.5, color=QUIET)


def make_colour_map(signed: bool) -> Colormap:
    """Return the colour map for scores from 0 up, or for signed scores; masked entries are grey."""
    if signed:
        return colormaps[_SIGNED].with_extremes(bad=_HIDDEN)
    steps = [f"#{step}" for step in _BLUES.split()]
    return LinearSegmentedColormap.from_list("lens_mix", steps).with_extremes(bad=_HIDDEN)


@functools.cache
def _list_families() -> list[str]:
    """Return matplotlib's own font, and the installed fonts with other scripts and signs."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _OTHER_FONTS if name in installed)]


@functools.cache
def _has_glyph(character: str) -> bool:
    files = (font_manager.findfont(name, fallback_to_default=False) for name in _list_families())
    return any(font_manager.get_font(file).get_char_index(ord(character)) for file in files)


def _make_readable(text: str) -> str:
    """Return the text with a number, as U+4E2D, for each character that no font has."""
    return "".join(
        character if character.isascii() or _has_glyph(character) else f"U+{ord(character):04X}"
        for character in text
    )


def measure_longest(labels: Iterable[str], points: float) -> float:
    """Return the length in inches of the longest label, in a font of this size."""
    font = font_manager.FontProperties(family=_list_families())
    # A `$` would be read as the start of a formula, so it is measured as an S, which has the same width.
    paths = (
        TextPath((0, 0), _make_readable(label.replace("$", "S")), size=points, prop=font)
        for label in labels
        if label.strip()
    )
    return max((path.get_extents().width for path in paths), default=0.0) / 72


def label_ticks(
    axis: Any,
    labels: Sequence[str],
    limit: int | None = None,
    colour: str = INK,
    rotation: int = 0,
    strongest: Sequence[int] = (),
) -> None:
    """Write labels at 0, 1, … on an axis; a `$` in a label is not the start of a formula.

    Args:
        axis: The axis.
        labels: One label per position.
        limit: The largest number of labels; None: all.
        colour: The colour of the labels.
        rotation: The angle of the labels, in degrees.
        strongest: Positions that keep their labels if there are too many. The other labels are then grey, and
            a line connects each position with its label, which may be moved to one side.
    """
    chosen = place_labels(len(labels), len(labels) if limit is None else limit, strongest)
    axis.set_ticks(
        [place for _, place in chosen], labels=[_make_readable(labels[position]) for position, _ in chosen]
    )
    has_leaders = len(chosen) < len(labels) and bool(strongest)
    for label, (position, _) in zip(axis.get_ticklabels(), chosen, strict=True):
        hue = QUIET if has_leaders and position not in strongest else colour
        label.set(parse_math=False, size=FONT, color=hue, rotation=rotation)
    if has_leaders:
        _draw_leaders(axis, chosen)


def _draw_leaders(axis: Any, chosen: Sequence[tuple[int, float]]) -> None:
    """Draw a line from each column to its label, instead of ticks."""
    axes = axis.axes
    points = axes.get_position().height * axes.figure.get_size_inches()[1] * 72
    axis.set_tick_params(length=0, pad=_LEADER + 1)
    for position, place in chosen:
        axes.plot(
            [position, place],
            [0, -_LEADER / points],
            transform=axes.get_xaxis_transform(),
            color=QUIET,
            lw=0.5,
            clip_on=False,
            scalex=False,
            scaley=False,
        )
