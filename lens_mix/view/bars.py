"""Draw the rows of bars of `figures.token_bars`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.view.labels import FONT, INK, NAME_FONT, QUIET, TITLE_FONT
from lens_mix.view.lazy import load_canvas

_BAR = "#a9c3dd"
_LARGEST_BAR = "#2c5f8a"
_DOMINANT_SHARE = 0.9  # with a larger share, one bar makes the others too small, so the share is written
_SMALLEST_VISIBLE = 0.002  # a bar with a smaller share of the row's height cannot be seen
_TICK_DISTANCE = 0.3  # the smallest distance of two numbers at the axis, as a share of the axis
_NUMBER_WIDTH = 0.26  # the width in inches of a number at a bar


class BarFrame:
    """Compute the places of the rows of bars, in inches.

    Attributes:
        row: The height of one row with the gap above it.
        gap: The gap between two rows.
        inner: The width of a row of bars.
        turned: Whether the tokens are written vertically.
        left: The space on the left, for the names.
        bottom: The space at the bottom, for the tokens.
        top: The space at the top, for the title.
        width: The width of the figure.
        height: The height of the figure.
    """

    row, gap = 0.78, 0.2

    def __init__(
        self,
        names: list[str],
        labels: list[str],
        title: str | None,
        subtitle: str,
        figsize: tuple[float, float] | None = None,
    ) -> None:
        canvas = load_canvas()
        measure = canvas.measure_longest
        size = None if figsize is None else canvas.check_size(figsize)
        self.left = 0.6 + measure("\n".join(names).split("\n"), NAME_FONT)
        self.inner = min(max(0.3 * len(labels), 5.0), 14.0) if size is None else size[0] - self.left - 0.15
        self.width = self.left + self.inner + 0.15
        self.turned = bool(measure(labels, FONT) > self.inner / len(labels))
        self.bottom = 0.18 + (measure(labels, FONT) if self.turned else 0.15)
        self.title = canvas.wrap(title or "", TITLE_FONT, (self.width - 0.24) / 1.15)
        self.subtitle = canvas.wrap(subtitle, FONT, (self.width - 0.24) / 1.1)
        self.top = measure_head(self.title, self.subtitle)
        self.height = self.top + len(names) * self.row + self.bottom
        if size is not None:
            self.row = (size[1] - self.top - self.bottom) / len(names)
            self.height = size[1]
            if self.row < 0.5 or self.inner < 2:
                needed = (self.left + 2.15, self.top + self.bottom + 0.5 * len(names))
                raise ValueError(
                    f"figsize: expected at least {needed[0]:.1f} x {needed[1]:.1f} inches for these labels, "
                    f"got {size[0]} x {size[1]}"
                )


def measure_head(title: str, subtitle: str) -> float:
    """Return the height in inches of a title and a subtitle of some lines, and of the space around them."""
    lines = title.count("\n") + 1 if title else 0
    small = subtitle.count("\n") + 1 if subtitle else 0
    return 0.1 + (0.15 + 0.2 * lines if title else 0.0) + 0.15 * small


def draw_bars(axes: Any, values: Float[Tensor, " key"], labels: list[str]) -> None:
    """Draw one row of bars, the numbers of the largest ones, and a dash for each NaN."""
    known = values.nan_to_num(0.0)
    low, high = min(known.min().item(), 0.0), max(known.max().item(), 0.0)
    span = (high - low) or 1.0
    numbered = _find_largest([values])
    colors = [_LARGEST_BAR if key in numbered else _BAR for key in range(len(labels))]
    axes.bar(range(len(labels)), known.tolist(), width=0.72, color=colors)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_ylim(low - (0.3 * span if low < 0 else 0), high + 0.3 * span)
    width = axes.get_position().width * axes.figure.get_size_inches()[0] / len(labels)
    written: list[int] = []
    for key in numbered:
        # Two numbers that are closer than their width would overlap.
        if any(abs(key - other) * width < _NUMBER_WIDTH for other in written):
            continue
        written.append(key)
        value = known[key].item()
        before, after = (key + 0.5) * width, (len(labels) - key - 0.5) * width
        side = "left" if before < _NUMBER_WIDTH / 2 else "right" if after < _NUMBER_WIDTH / 2 else "center"
        above = {"va": "bottom", "xytext": (0, 1)} if value > 0 else {"va": "top", "xytext": (0, -1)}
        axes.annotate(
            _format(value), (key, value), textcoords="offset points", ha=side, size=6, color=INK, **above
        )
    for key in values.isnan().nonzero().flatten().tolist():
        axes.text(key, 0.03 * span, "–", ha="center", va="bottom", size=FONT, color=QUIET)
    axes.set_xticks([])
    ends = [0.0, *(end for end in (low, high) if end), *([] if low or high else [1.0])]
    # The smaller end of signed bars may be so close to 0 that the two numbers would overlap.
    ends = [end for end in ends if end == 0 or abs(end) >= _TICK_DISTANCE * (high - low)]
    axes.set_yticks(ends, ["0" if end == 0 else _format(end) for end in ends], size=6, color=QUIET)
    load_canvas().draw_thin_frame(axes, ticks=1.5)
    axes.tick_params(pad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    _write_dominant_share(axes, known, labels)


def rank_bars(rows: Iterable[Float[Tensor, " key"]]) -> list[int]:
    """Return all keys: first the largest bars of each row, then the others by their largest bar."""
    rows = list(rows)
    largest = _find_largest(rows)
    sizes = torch.stack(
        [values.nan_to_num(0.0).abs() / (values.nan_to_num(0.0).abs().max() or 1) for values in rows]
    )
    order = sizes.amax(0).argsort(descending=True, stable=True).tolist()
    return list(dict.fromkeys([*largest, *order]))


def _find_largest(rows: Iterable[Float[Tensor, " key"]]) -> list[int]:
    """Return the keys of the three largest bars of each row, by magnitude, without bars too small to see."""
    bars: dict[int, None] = {}
    for values in rows:
        sizes = values.nan_to_num(0.0).abs()
        order = sizes.argsort(descending=True).tolist()[:3]
        smallest = _SMALLEST_VISIBLE * sizes.max()
        bars |= dict.fromkeys(key for key in order if sizes[key] > 0 and sizes[key] >= smallest)
    return list(bars)


def _write_dominant_share(axes: Any, values: Float[Tensor, " key"], labels: list[str]) -> None:
    """Write the share of the largest bar, if it is so large that the other bars cannot be compared."""
    total = values.sum().item()
    if values.min() < 0 or total <= 0 or len(labels) < 2:
        return
    first = int(values.argmax())
    share = values[first].item() / total
    if share <= _DOMINANT_SHARE:
        return
    # A share that rounds to 100 % must not look as if the other tokens had nothing.
    is_only = int((values != 0).sum()) == 1
    shown = "more than 99.9" if share > 0.999 and not is_only else f"{100 * share:.3g}"
    text = f"{labels[first]} has {shown} % of this row"
    place, side = (0.99, "right") if first < len(labels) / 2 else (0.01, "left")
    look = {"size": FONT, "style": "italic", "color": QUIET, "parse_math": False}
    axes.text(place, 0.8, text, transform=axes.transAxes, ha=side, va="top", **look)


def _format(value: float) -> str:
    return f"{value:.2f}" if 0.01 <= abs(value) < 100 else f"{value:.2g}"
