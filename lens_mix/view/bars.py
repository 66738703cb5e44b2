"""How `figures.token_bars` draws: the frame, one row of bars, the tokens below."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lens_mix.view.labels import FONT, INK, NAME_FONT, QUIET, TITLE_FONT
from lens_mix.view.lazy import need_canvas

_BAR = "#a9c3dd"
_BAR_OF_THE_LARGEST = "#2c5f8a"
_ONE_TOKEN_TAKES_IT_ALL = 0.9  # a share above this hides every other bar of its row: the row says so
_SMALLEST_SEEN = 0.002  # the share of a row's height below which a bar is not seen
_APART = 0.3  # as a share of the range, how far two numbers at the axis have to be apart
_NUMBER = 0.26  # the width in inches of a number at a bar


class BarFrame:
    """Where the rows of bars stand, in inches."""

    row, gap = 0.78, 0.2

    def __init__(self, names: list[str], labels: list[str], title: str | None, subtitle: str) -> None:
        longest = need_canvas().longest
        self.inner = min(max(0.3 * len(labels), 5.0), 14.0)
        self.turned = bool(longest(labels, FONT) > self.inner / len(labels))
        self.left = 0.6 + longest("\n".join(names).split("\n"), NAME_FONT)
        self.bottom = 0.18 + (longest(labels, FONT) if self.turned else 0.15)
        self.top = (0.45 if title else 0.1) + (0.15 if subtitle else 0)
        written = max(longest([title or ""], TITLE_FONT) * 1.15, longest([subtitle], FONT) * 1.1)
        self.width = max(self.left + self.inner + 0.15, written + 0.3)
        self.height = self.top + len(names) * self.row + self.bottom


def draw_bars(axes: Any, values: Float[Tensor, " key"], labels: list[str]) -> None:
    known = values.nan_to_num(0.0)
    low, high = min(known.min().item(), 0.0), max(known.max().item(), 0.0)
    reach = (high - low) or 1.0
    numbered = largest([values])
    colours = [_BAR_OF_THE_LARGEST if i in numbered else _BAR for i in range(len(labels))]
    axes.bar(range(len(labels)), known.tolist(), width=0.72, color=colours)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_ylim(low - (0.3 * reach if low < 0 else 0), high + 0.3 * reach)
    width = axes.get_position().width * axes.figure.get_size_inches()[0] / len(labels)
    written: list[int] = []
    for i in numbered:
        # A neighbour's number would be written over it.
        if any(abs(i - other) * width < _NUMBER for other in written):
            continue
        written.append(i)
        value = known[i].item()
        before, behind = (i + 0.5) * width, (len(labels) - i - 0.5) * width
        side = "left" if before < _NUMBER / 2 else "right" if behind < _NUMBER / 2 else "center"
        above = {"va": "bottom", "xytext": (0, 1)} if value > 0 else {"va": "top", "xytext": (0, -1)}
        axes.annotate(
            _number(value), (i, value), textcoords="offset points", ha=side, size=6, color=INK, **above
        )
    for i in values.isnan().nonzero().flatten().tolist():
        axes.text(i, 0.03 * reach, "–", ha="center", va="bottom", size=FONT, color=QUIET)
    axes.set_xticks([])
    ends = [0.0, *(end for end in (low, high) if end), *([] if low or high else [1.0])]
    # The smaller end of signed bars may lie so close to 0 that the two would be written over each other.
    ends = [end for end in ends if end == 0 or abs(end) >= _APART * (high - low)]
    axes.set_yticks(ends, ["0" if end == 0 else _number(end) for end in ends], size=6, color=QUIET)
    need_canvas().thin_frame(axes, ticks=1.5)
    axes.tick_params(pad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    _say_if_one_takes_it_all(axes, known, labels)


def largest(rows: Iterable[Float[Tensor, " key"]]) -> list[int]:
    """The three largest bars of each row, by magnitude; a bar too small to be seen is none of them."""
    bars: dict[int, None] = {}
    for values in rows:
        sizes = values.nan_to_num(0.0).abs()
        order = sizes.argsort(descending=True).tolist()[:3]
        bars |= dict.fromkeys(i for i in order if sizes[i] > 0 and sizes[i] >= _SMALLEST_SEEN * sizes.max())
    return list(bars)


def _say_if_one_takes_it_all(axes: Any, values: Float[Tensor, " key"], labels: list[str]) -> None:
    total = values.sum().item()
    if values.min() < 0 or total <= 0 or len(labels) < 2:
        return
    first = int(values.argmax())
    share = values[first].item() / total
    if share <= _ONE_TOKEN_TAKES_IT_ALL:
        return
    # Rounding up to "100 %" would deny the others the little that they have.
    alone = int((values != 0).sum()) == 1
    shown = "more than 99.9" if share > 0.999 and not alone else f"{100 * share:.3g}"
    text = f"{labels[first]} takes {shown} %"
    place, side = (0.99, "right") if first < len(labels) / 2 else (0.01, "left")
    look = {"size": FONT, "style": "italic", "color": QUIET, "parse_math": False}
    axes.text(place, 0.8, text, transform=axes.transAxes, ha=side, va="top", **look)


def _number(value: float) -> str:
    return f"{value:.2f}" if 0.01 <= abs(value) < 100 else f"{value:.2g}"
