"""The figure class and the colours. Importing this file imports matplotlib: do so inside functions only."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from lens_mix.view.labels import FONT, INK, QUIET, TITLE_FONT, shown_positions

# From almost white to almost black through one hue, at equal distances in CIELAB: equal steps of a score
# look equal, and the order holds for colour-blind readers and in grey.
BLUES = """f9fbfd e3f3fb cce9f7 b4def3 9ed1ed 89c3e6 73b4de 5ca6d6 4296cb
2985bc 1c75ad 19659f 155690 094680 09376d 0e2b5a 111f47"""
SIGNED = "PuOr"
HIDDEN = "#e9e9e9"
LINE = "#cccccc"


class Picture(Figure):
    """A matplotlib Figure outside pyplot: no global state, no window, and notebooks show it."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=150, facecolor="white")
        FigureCanvasAgg(self)

    def add_box(self, left: float, bottom: float, width: float, height: float) -> Any:
        """Axes at a place given in inches from the lower left corner."""
        whole_width, whole_height = self.get_size_inches()
        box = (left / whole_width, bottom / whole_height, width / whole_width, height / whole_height)
        return self.add_axes(box)

    def write(self, left: float, bottom: float, text: str, **options: Any) -> Any:
        """Text at a place given in inches; a `$` in it stays a `$`."""
        whole_width, whole_height = self.get_size_inches()
        return self.text(left / whole_width, bottom / whole_height, text, parse_math=False, **options)

    def write_title(self, title: str | None, size: float = TITLE_FONT) -> None:
        """The title in the upper left corner, if there is one."""
        if title:
            top = self.get_size_inches()[1] - 0.12
            self.write(0.12, top, title, size=size, color=INK, va="top", weight="bold")

    def add_colour_bar(self, image: Any, left: float, bottom: float, height: float, extend: str) -> Any:
        """A narrow colour bar at a place given in inches."""
        box = self.add_box(left, bottom, 0.1, height)
        bar = self.colorbar(image, cax=box, extend=extend, extendfrac=0.03)
        bar.outline.set(edgecolor=LINE, linewidth=0.6)
        bar.ax.tick_params(labelsize=FONT, length=1.5, width=0.5, color=QUIET, labelcolor=INK)
        return bar

    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        self.savefig(drawn, format="png")
        return drawn.getvalue()


def thin_frame(axes: Any, ticks: float) -> None:
    """Thin grey spines, and ticks of this length in points."""
    axes.spines[:].set(color=LINE, linewidth=0.6)
    axes.tick_params(length=ticks, width=0.5, color=QUIET)


def colours(signed: bool) -> Colormap:
    """The colour map of scores from 0 up, or of scores on both sides of 0; masked entries are grey."""
    from matplotlib import colormaps

    if signed:
        return colormaps[SIGNED].with_extremes(bad=HIDDEN)
    steps = [f"#{step}" for step in BLUES.split()]
    return LinearSegmentedColormap.from_list("lens_mix", steps).with_extremes(bad=HIDDEN)


def longest(labels: Iterable[str], points: float) -> float:
    """The length in inches of the longest label."""
    # A `$` would be read as the start of a formula; an S is as wide.
    paths = (TextPath((0, 0), label.replace("$", "S"), size=points) for label in labels if label.strip())
    return max((path.get_extents().width for path in paths), default=0.0) / 72


def label_ticks(
    axis: Any, labels: Sequence[str], limit: int | None = None, colour: str = INK, rotation: int = 0
) -> None:
    """Tokens as labels at 0, 1, …, thinned to `limit` of them (None: all); a `$` in one is no formula."""
    places = shown_positions(len(labels), len(labels) if limit is None else limit)
    axis.set_ticks(places, labels=[labels[place] for place in places])
    for label in axis.get_ticklabels():
        label.set(parse_math=False, size=FONT, color=colour, rotation=rotation)
