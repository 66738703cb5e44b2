"""The figure class and the colours. Importing this file imports matplotlib: do so inside functions only."""

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
from lens_mix.view.labels import FONT, INK, QUIET, TITLE_FONT, label_places

# From almost white to almost black through one hue, at equal distances in CIELAB: equal steps of a score
# look equal, and the order holds for colour-blind readers and in grey.
_BLUES = """f9fbfd e3f3fb cce9f7 b4def3 9ed1ed 89c3e6 73b4de 5ca6d6 4296cb
2985bc 1c75ad 19659f 155690 094680 09376d 0e2b5a 111f47"""
_SIGNED = "PuOr"
_HIDDEN = "#e9e9e9"
_LINE = "#cccccc"
_LEADER = 5.0  # how long, in points, the line from a column to its label is
# Fonts of other scripts and of signs, as systems have them; matplotlib draws no colour emoji.
_OTHER_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR"),
    *("Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "IPAexGothic"),
    *("PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic"),
    *("Arial Unicode MS", "Noto Sans Devanagari", "Noto Sans Arabic", "Noto Sans Thai", "Noto Emoji"),
    *("Symbola", "Segoe UI Symbol", "Segoe UI Emoji", "Unifont"),
)


class Picture(Figure):
    """A matplotlib Figure outside pyplot: no global state, no window, and notebooks show it."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=150, facecolor="white")
        FigureCanvasAgg(self)  # sets itself as the figure's canvas

    def add_box(self, left: float, bottom: float, width: float, height: float) -> Any:
        """Axes at a place given in inches from the lower left corner."""
        whole_width, whole_height = self.get_size_inches()
        box = (left / whole_width, bottom / whole_height, width / whole_width, height / whole_height)
        return self.add_axes(box)

    def draw(self, renderer: Any) -> None:
        """Drawn with a font for every character, or the character's number where no font has it."""
        for text in self.findobj(Text):
            text.set_fontfamily(_families())
            if not (shown := text.get_text()).isascii() and shown != (legible := _readable(shown)):
                text.set_text(legible)
        super().draw(renderer)

    def write(self, left: float, bottom: float, text: str, **options: Any) -> Any:
        """Text at a place given in inches; a `$` in it stays a `$`."""
        whole_width, whole_height = self.get_size_inches()
        return self.text(left / whole_width, bottom / whole_height, text, parse_math=False, **options)

    def write_title(self, title: str | None, subtitle: str = "", size: float = TITLE_FONT) -> None:
        """The title in the upper left corner, and a quiet line below it, if there are any."""
        top = self.get_size_inches()[1] - 0.12
        if title:
            self.write(0.12, top, title, size=size, color=INK, va="top", weight="bold")
        if subtitle:
            below = top if title is None else top - 0.2
            self.write(0.12, below, subtitle, size=FONT, color=QUIET, va="top")

    def add_colour_bar(self, image: Any, left: float, bottom: float, height: float, extend: str) -> Any:
        """A narrow colour bar at a place given in inches."""
        box = self.add_box(left, bottom, 0.1, height)
        bar = self.colorbar(image, cax=box, extend=extend, extendfrac=0.03)
        bar.outline.set(edgecolor=_LINE, linewidth=0.6)
        bar.ax.tick_params(labelsize=FONT, length=1.5, width=0.5, color=QUIET, labelcolor=INK)
        return bar

    def savefig(self, fname: Any, **options: Any) -> Any:
        """Save as matplotlib does; the file is written whole or not at all, and an old one never cut."""
        if not isinstance(fname, (str, os.PathLike)):
            return super().savefig(fname, **options)
        place = str(os.fspath(fname))
        if not (options.get("format") or os.path.splitext(place)[1][1:]):
            # matplotlib adds the ending itself.
            options["format"] = self.canvas.get_default_filetype()
            place = f"{place.rstrip('.')}.{options['format']}"
        with replacing(place) as beside:
            return super().savefig(beside, **options)

    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        self.savefig(drawn, format="png")
        return drawn.getvalue()


def thin_frame(axes: Any, ticks: float) -> None:
    """Thin grey spines, and ticks of this length in points."""
    axes.spines[:].set(color=_LINE, linewidth=0.6)
    axes.tick_params(length=ticks, width=0.5, color=QUIET)


def colours(signed: bool) -> Colormap:
    """The colour map of scores from 0 up, or of scores on both sides of 0; masked entries are grey."""
    if signed:
        return colormaps[_SIGNED].with_extremes(bad=_HIDDEN)
    steps = [f"#{step}" for step in _BLUES.split()]
    return LinearSegmentedColormap.from_list("lens_mix", steps).with_extremes(bad=_HIDDEN)


@functools.cache
def _families() -> list[str]:
    """matplotlib's own font, then those that are installed of the ones with other scripts and signs."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _OTHER_FONTS if name in installed)]


@functools.cache
def _has_a_glyph(character: str) -> bool:
    files = (font_manager.findfont(name, fallback_to_default=False) for name in _families())
    return any(font_manager.get_font(file).get_char_index(ord(character)) for file in files)


def _readable(text: str) -> str:
    """The text; a character that no font has becomes its number, U+4E2D say, and no empty box."""
    return "".join(c if c.isascii() or _has_a_glyph(c) else f"U+{ord(c):04X}" for c in text)


def longest(labels: Iterable[str], points: float) -> float:
    """The length in inches of the longest label."""
    font = font_manager.FontProperties(family=_families())
    # A `$` would be read as the start of a formula; an S is as wide.
    paths = (
        TextPath((0, 0), _readable(label.replace("$", "S")), size=points, prop=font)
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
    """Tokens as labels at 0, 1, …, thinned to `limit` of them (None: all); a `$` in one is no formula.

    Where they are thinned, the `strongest` positions keep theirs (on a horizontal axis a line leads from one
    that had to be moved aside to its place), and the others are quiet.
    """
    chosen = label_places(len(labels), len(labels) if limit is None else limit, strongest)
    axis.set_ticks(
        [place for _, place in chosen], labels=[_readable(labels[position]) for position, _ in chosen]
    )
    thinned = len(chosen) < len(labels) and bool(strongest)
    for label, (position, _) in zip(axis.get_ticklabels(), chosen, strict=True):
        hue = QUIET if thinned and position not in strongest else colour
        label.set(parse_math=False, size=FONT, color=hue, rotation=rotation)
    if thinned:
        _lead_to_labels(axis, chosen)


def _lead_to_labels(axis: Any, chosen: Sequence[tuple[int, float]]) -> None:
    """Lines in place of ticks, from a column to its label."""
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
