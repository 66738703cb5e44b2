"""Draw numbered marks on a figure of the library, for the page "How to read a map".

    PYTHONPATH=.:demos python -m docs.make.annotated

It runs the page's example on the demo model and writes docs/images/read_a_map.png.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import lens_mix as lm
from docs.make.pictures import PROMPT

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "read_a_map.png"
# All text stays legible on a telephone, because the figure is small in inches.
SIZE, LAYERS, DPI = (4.4, 4.9), range(16, 30), 220
_MARK, _RADIUS = "#b3400b", 0.078  # the color of a mark, and its radius in inches


def draw(model: Any) -> Any:
    """Return the figure of the page's example, with its marks."""
    layers = lm.run(model, PROMPT, "value_zeroing", layers=LAYERS)
    maps = lm.Maps({"input map": lm.input_map(model, PROMPT), "value_zeroing": layers})
    figure = maps.show(figsize=SIZE)
    mark(figure)
    return figure


def mark(figure: Any) -> int:
    """Draw the marks on a figure of one input map and one layer map, and return how many there are.

    Their order is that of the list on the page.
    """
    from matplotlib.patches import FancyBboxPatch, Rectangle
    from matplotlib.text import Text

    figure.draw_without_rendering()
    width, height = figure.get_size_inches()
    written = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    heading, title, sentence = figure.texts[:3]
    heat_map = next(axes for axes in figure.axes if axes.get_title(loc="left"))
    bar = figure.axes[-1]
    outlined = [
        box
        for box in figure.findobj(FancyBboxPatch)
        if box.get_linewidth() and box.get_linestyle() in ("-", "solid")
    ]
    (frame,) = (box for box in heat_map.patches if isinstance(box, Rectangle))
    numbers = next(text for text in written if text.get_text() == "own")
    layer, labels = heat_map.yaxis.label, heat_map.get_xticklabels()

    def find(artist: Any) -> Any:
        """Return the box of an artist in inches."""
        return artist.get_window_extent().transformed(figure.dpi_scale_trans.inverted())

    own, first = find(numbers), find(outlined[0])
    beside = 1.7 * _RADIUS
    places = [
        (find(title).x1 + beside, (find(title).y0 + find(title).y1) / 2),
        (find(sentence).x1 + beside, find(sentence).y0 + _RADIUS),
        (find(heading).x1 + beside, (find(heading).y0 + find(heading).y1) / 2),
        (first.x0 - 0.02, first.y1 + 0.01),
        (find(layer).x0 - 0.05, find(layer).y1 + _RADIUS + 0.04),
        (find(frame).x1 + beside, (find(frame).y0 + find(frame).y1) / 2),
        (find(labels[0]).x0 - beside, find(labels[0]).y0 + _RADIUS),
        (own.x0 - 0.01, own.y1 + _RADIUS + 0.03),
        ((find(bar).x0 + find(bar).x1) / 2 + 0.1, find(bar).y0 - 2 * _RADIUS),
    ]
    for number, (x, y) in enumerate(places, 1):
        x, y = (min(max(at, _RADIUS + 0.02), end - _RADIUS - 0.02) for at, end in ((x, width), (y, height)))
        look = {"boxstyle": "circle,pad=0.22", "fc": _MARK, "ec": "white", "lw": 0.8}
        figure.text(
            x / width, y / height, str(number), size=7.5, weight="bold", color="white", ha="center",
            va="center_baseline", bbox=look, zorder=10,
        )  # fmt: skip
    return len(places)


def main() -> None:
    """Write the picture in 128 colors, which makes the file small."""
    import models
    from PIL import Image

    content = io.BytesIO()
    draw(models.load(models.smollm2_folder())).savefig(content, dpi=DPI, format="png")
    few = Image.open(content).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    few.save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
