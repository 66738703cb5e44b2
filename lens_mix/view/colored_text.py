"""Draw a text whose tokens are colored by their scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lens_mix.view.labels import INK, NAME_FONT, QUIET, make_visible
from lens_mix.view.lazy import load_canvas

_TEXT_FONT = 9.0
_LINE = 0.225  # the height in inches of a line of text
_BOX = 0.18  # the height of a token's box
_HEADING = 0.2
_SPACE = 0.03  # the space around a token in its box


class TextBlock:
    """Compute the lines of a colored text, and draw them.

    A token's box is colored by its score and contains the space before it. The first token and the position
    itself have an outline and no color, because their scores are numbers in the heading. The predicted next
    token comes last, in a dashed box.

    Attributes:
        height: The height of the heading and the lines, in inches.
    """

    def __init__(
        self,
        heading: str,
        tokens: Sequence[str],
        scores: Sequence[float],
        outlined: Collection[int],
        width: float,
        prediction: str | None,
    ) -> None:
        self.scores, self.outlined = scores, outlined
        self.heading = load_canvas().wrap(heading, NAME_FONT, width / 1.15)
        self.top = _HEADING + 0.15 * self.heading.count("\n")  # the height of the heading
        texts = [_make_plain(token) for token in tokens]
        self.prediction = len(texts) if prediction is not None else None
        texts += [] if prediction is None else [_make_plain(prediction)]
        measure = load_canvas().measure_longest
        self.boxes: list[tuple[float, int, float, str]] = []  # the left, the line, the width, and the text
        left, line = 0.0, 0
        for index, text in enumerate(texts):
            left += 0.06 if index == self.prediction else 0.0
            space = 0.03 if text.startswith(" ") else 0.0
            # The prediction is bold.
            letters = measure([text.strip()], _TEXT_FONT) * (1.13 if index == self.prediction else 1)
            size = letters + 2 * _SPACE + space
            if left + size > width and left > 0:
                left, line = 0.0, line + 1
            self.boxes.append((left, line, size, text.strip()))
            left += size
        self.height = self.top + (line + 1) * _LINE

    def draw(self, picture: Any, left: float, top: float, norm: Any, cmap: Any) -> None:
        """Draw the block with its upper left corner at a place in inches."""
        from matplotlib.patches import FancyBboxPatch

        canvas = load_canvas()
        whole_width, whole_height = picture.get_size_inches()
        picture.write(left, top - 0.02, self.heading, size=NAME_FONT, color=INK, va="top", weight="bold")
        axes = picture.add_axes((0, 0, 1, 1), zorder=-1)
        axes.set(xlim=(0, whole_width), ylim=(0, whole_height))
        axes.set_axis_off()
        colors = canvas.choose_color_map(norm.vmin < 0, cmap)
        for index, (place, line, width, text) in enumerate(self.boxes):
            bottom = top - self.top - line * _LINE - _BOX
            look: dict[str, Any] = {"lw": 0, "fc": "white", "ec": QUIET}
            ink, weight = INK, "normal"
            if index == self.prediction:
                look |= {"lw": 0.9, "ec": canvas.DARK, "ls": (0, (3, 2))}
                ink, weight = canvas.DARK, "bold"
            elif index in self.outlined:
                look |= {"lw": 0.9}
            else:
                look["fc"] = colors(norm(self.scores[index]))
                ink = "white" if canvas.is_dark(look["fc"]) else INK
            corner = (left + place + 0.008, bottom)
            shape = "round,pad=0,rounding_size=0.025"
            axes.add_patch(FancyBboxPatch(corner, width - 0.016, _BOX, boxstyle=shape, **look))
            middle = bottom + _BOX / 2 - 0.005
            where = {"ha": "center", "va": "center_baseline", "size": _TEXT_FONT, "weight": weight}
            axes.text(left + place + width / 2, middle, text, color=ink, parse_math=False, **where)


def _make_plain(token: str) -> str:
    """Return the token as visible characters, with its leading space as a space."""
    visible = make_visible(token, 40)
    return f" {visible[1:]}" if visible.startswith("·") and len(visible) > 1 else visible
