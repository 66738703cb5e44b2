"""Draw the plots of the evidence pages from the recorded tables: dots with their intervals.

    PYTHONPATH=.:demos python -m docs.make.plots           draw every plot
    PYTHONPATH=.:demos python -m docs.make.plots traces    one of them

`docs/plots/NAME.toml` says what is compared, and `docs/images/evidence/NAME.svg` is drawn from it. The
figures are facts of `benchmarks/facts.py`, so a plot cannot differ from its record:

    axis = "rank agreement, controlled for position"
    better = "right"                                  # where the good values are: "right" or "left"
    scale = "linear"                                  # or "log"

    [[panel]]
    title = "SmolLM2-135M-Instruct"                   # n is added if the rows share one
    rows = [["lm.input_map", "TABLE: row [column]"]]  # a label, and a fact or a number that the score defines
    rivals = [["attention rollout", "TABLE: row"]]
    baselines = [["position alone", 0.0]]

With `across`, a plot has two axes: the second fact of an entry is its place on a horizontal axis of counts,
whose steps are those of log(1 + count), so that 0 is on it:

    axis = "share of right answers"                   # or one for each panel
    across = "forward passes"                         # fewer are better
    rows = [["the audit", "TABLE: row [column]", "TABLE: row [passes]"]]

The drawing follows the reader's light or dark setting by a media query, and needs no script and no font.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tomllib
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import facts

DOCS = Path(__file__).parents[1]
DECLARED, DRAWN = DOCS / "plots", DOCS / "images" / "evidence"

# Lengths in units of the drawing, which is as wide as the text of a page.
_WIDTH, _LEFT, _RIGHT = 700, 262, 530
_LINE, _HEAD, _FOOT = 24, 30, 62
_LONGEST_LABEL = 32
_KINDS = {"rows": "method", "rivals": "rival", "baselines": "baseline"}

_STYLE = """
svg { color-scheme: light dark; font: 14px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.page { fill: #fff; } text { fill: #1a2230; } .quiet { fill: #5a6577; font-size: 13px; }
.name { font-weight: 650; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: #e3e8ee; } .reference { stroke: #8a94a3; stroke-dasharray: 4 3; }
.whisker { stroke-width: 2; }
.method { fill: #0b5cad; stroke: #0b5cad; } .rival { fill: #b04a00; stroke: #b04a00; }
.baseline { fill: #fff; stroke: #5a6577; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
.page { fill: #12161d; } text { fill: #e8ecf3; } .quiet { fill: #9aa7ba; }
.grid { stroke: #2a323e; } .reference { stroke: #7a879a; }
.method { fill: #74b6ff; stroke: #74b6ff; } .rival { fill: #ffa45c; stroke: #ffa45c; }
.baseline { fill: #12161d; stroke: #9aa7ba; }
}
"""


@dataclasses.dataclass(frozen=True)
class Dot:
    """One value with its interval, as a plot shows it.

    Attributes:
        label: The name beside it.
        kind: "method", "rival" or "baseline".
        value: The value.
        ends: The ends of its interval; None without one.
        text: The value and its interval as they are recorded.
        n: The number of cases; None if it is not recorded, or if the score defines the value.
    """

    label: str
    kind: str
    value: float
    ends: tuple[float, float] | None
    text: str
    n: int | None


def read_dots(panel: dict[str, Any]) -> list[Dot]:
    """Return the dots of one panel, in the order in which they are drawn.

    Raises:
        LookupError: A fact is not recorded.
        ValueError: The panel has no baseline, or a label is too long.
    """
    if not panel.get("baselines"):
        raise ValueError(f"panel {panel['title']!r}: expected at least one entry in baselines, got none")
    return [
        _read_dot(label, fact, kind)
        for group, kind in _KINDS.items()
        for label, fact, *_ in panel.get(group, [])
    ]


def read_counts(panel: dict[str, Any]) -> list[float]:
    """Return the place of each dot of a panel on the horizontal axis of counts.

    Raises:
        LookupError: A fact is not recorded.
    """
    counts = [count for group in _KINDS for *_, count in panel.get(group, [])]
    return [_read_dot("", count, "").value for count in counts]


def _read_dot(label: str, fact: str | float, kind: str) -> Dot:
    if len(label) > _LONGEST_LABEL:
        raise ValueError(f"label {label!r}: expected at most {_LONGEST_LABEL} characters, got {len(label)}")
    if not isinstance(fact, str):
        return Dot(label, kind, float(fact), None, "by definition", None)
    found = facts.look_up(fact)
    value, *others = (float(text.replace("−", "-").replace(",", "")) for text in found["texts"])
    shown, *shown_ends = (text.replace("-", "−") for text in found["texts"])
    ends = None
    if len(others) == 2:
        ends = (others[0], others[1])
        shown += f" [{', '.join(shown_ends)}]"
    elif others:
        ends = (value - others[0], value + others[0])
        shown += f" ± {shown_ends[0]}"
    return Dot(label, kind, value, ends, shown, found["n"])


def draw(declared: dict[str, Any]) -> str:
    """Return the SVG of a plot.

    Args:
        declared: The content of its TOML file.
    """
    if "across" in declared:
        return _draw_against_counts(declared)
    panels = [(panel["title"], read_dots(panel)) for panel in declared["panel"]]
    dots = [dot for _, of_panel in panels for dot in of_panel]
    axis = _Axis.around(dots, is_log=declared["scale"] == "log")
    parts: list[str] = []
    top = 8
    for title, of_panel in panels:
        shared = _describe_cases(of_panel)
        parts.append(_text(12, top + 18, f"{title}{shared}", "name"))
        below = top + _HEAD + _LINE * len(of_panel)
        parts += _frame(axis, of_panel, top + _HEAD, below)
        for number, dot in enumerate(of_panel):
            count = "" if shared or dot.n is None else f" (n = {dot.n})"
            parts += _row(axis, dot, top + _HEAD + _LINE * (number + 0.5), count)
        top = below + 14
    parts += _foot(axis, declared, top, dots)
    return _finish(parts, top + _FOOT)


def _describe_cases(dots: Sequence[Dot]) -> str:
    """Return the number of cases that all dots of a panel share, for its title; "" if they differ."""
    counts = {dot.n for dot in dots if dot.n is not None}
    return f", n = {counts.pop()}" if len(counts) == 1 else ""


def _finish(parts: Sequence[str], height: float) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img">'
    )
    page = f'<rect class="page" width="{_WIDTH}" height="{height}" rx="6"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", page, *parts, "</svg>"]) + "\n"


@dataclasses.dataclass(frozen=True)
class _Axis:
    """The horizontal axis: the range of its values and its ticks."""

    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool

    @classmethod
    def around(cls, dots: Sequence[Dot], is_log: bool) -> _Axis:
        """Return the axis on which all dots and their intervals are visible."""
        values = [value for dot in dots for value in (dot.value, *(dot.ends or ()))]
        low, high = min(values), max(values)
        if is_log:
            exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            steps = (1, 2, 5) if len(exponents) <= 3 else (1,)
            ticks = [step * 10.0**exponent for exponent in exponents for step in steps]
            margin = (high / low) ** 0.05
            low, high = low / margin, high * margin
        else:
            low, high = min(low, 0.0), max(high, 0.0)
            step = _round_up((high - low) / 5)
            ticks = [step * count for count in range(math.floor(low / step), math.ceil(high / step) + 1)]
            margin = 0.04 * (high - low)
            low, high = low - margin, high + margin
        return cls(low, high, [tick for tick in ticks if low <= tick <= high], is_log)

    @classmethod
    def of_counts(cls, counts: Sequence[float]) -> _Axis:
        """Return the axis of 1 + count for some counts."""
        high = 1 + max(counts)
        steps = [step * 10**exponent for exponent in range(math.ceil(math.log10(high))) for step in (1, 2, 5)]
        return cls(high**-0.15, high**1.09, [1 + each for each in (0, *steps) if each < high], is_log=True)

    def place(self, value: float, left: float = _LEFT, right: float = _RIGHT) -> float:
        """Return the place of a value, from the left of the drawing."""
        low, high, here = self.low, self.high, value
        if self.is_log:
            low, high, here = math.log(low), math.log(high), math.log(here)
        return round(left + (right - left) * (here - low) / (high - low), 1)


def _round_up(step: float) -> float:
    size = 10.0 ** math.floor(math.log10(step))
    return next(size * digit for digit in (1, 2, 2.5, 5, 10) if size * digit >= step * 0.999)


def _frame(axis: _Axis, dots: Sequence[Dot], top: float, below: float) -> Iterator[str]:
    """Yield the lines behind the dots of a panel; the first baseline's is dashed."""
    for tick in axis.ticks:
        yield _line(axis.place(tick), top, axis.place(tick), below, "grid")
    reference = next(dot.value for dot in dots if dot.kind == "baseline")
    yield _line(axis.place(reference), top, axis.place(reference), below, "reference")


def _row(axis: _Axis, dot: Dot, middle: float, count: str) -> Iterator[str]:
    yield _text(_LEFT - 14, middle + 5, f"{dot.label}{count}", "end")
    if dot.ends:
        yield _line(axis.place(dot.ends[0]), middle, axis.place(dot.ends[1]), middle, f"whisker {dot.kind}")
    yield _mark(dot.kind, axis.place(dot.value), middle)
    yield _text(_RIGHT + 14, middle + 5, dot.text, "quiet")


def _foot(axis: _Axis, declared: dict[str, Any], top: float, dots: Sequence[Dot]) -> Iterator[str]:
    for tick in axis.ticks:
        yield _text(axis.place(tick), top + 4, f"{tick:g}".replace("-", "−"), "quiet middle")
    better = "better →" if declared["better"] == "right" else "← better"
    yield _text(_WIDTH - 12, top + 26, f"{declared['axis']} ({better})", "quiet end")
    yield from _legend(declared, top, dots)


def _legend(declared: dict[str, Any], top: float, dots: Sequence[Dot]) -> Iterator[str]:
    left = 18.0
    kinds = {dot.kind for dot in dots}
    for kind in (kind for kind in _KINDS.values() if kind in kinds):
        yield _mark(kind, left, top + 46)
        yield _text(left + 10, top + 51, kind, "quiet")
        left += 95
    if any(dot.ends for dot in dots):
        interval = declared.get("interval", "95 % interval over the cases")
        yield _text(_WIDTH - 12, top + 51, f"bars: {interval}", "quiet end")


# ------------------------------------------------------------------ against counts

# The sides of a panel, its height, and the distance of dots with the same count.
_SIDES, _HEIGHT, _BESIDE = (46.0, 688.0), 320, 15
# A label's height, and the width of one of its characters, at most.
_LABEL, _CHARACTER = 14, 7.2


@dataclasses.dataclass(frozen=True)
class _Box:
    """A rectangle that no label may cover."""

    left: float
    top: float
    right: float
    below: float

    def meets(self, other: _Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.below and other.top < self.below


def _draw_against_counts(declared: dict[str, Any]) -> str:
    """Return the SVG of a plot whose horizontal axis has counts."""
    panels = [
        (panel["title"], panel.get("axis") or declared["axis"], read_dots(panel), read_counts(panel))
        for panel in declared["panel"]
    ]
    dots = [dot for *_, of_panel, _ in panels for dot in of_panel]
    axis = _Axis.of_counts([count for *_, counts in panels for count in counts])
    upward = _Axis.around(dots, is_log=False)
    parts: list[str] = []
    top = 8.0
    for title, name, of_panel, counts in panels:
        below = top + _HEAD + 34 + _HEIGHT
        parts.append(_text(12, top + 18, f"{title}{_describe_cases(of_panel)}", "name"))
        parts.append(_text(12, top + 38, f"{name} (better ↑)", "quiet"))
        parts += _panel_of_counts(axis, upward, of_panel, counts, below)
        top = below + 30
    parts.append(_text(_WIDTH - 12, top + 12, f"{declared['across']} (← better)", "quiet end"))
    parts += _legend(declared, top - 8, dots)
    return _finish(parts, top + _FOOT - 8)


def _panel_of_counts(
    axis: _Axis, upward: _Axis, dots: Sequence[Dot], counts: Sequence[float], below: float
) -> Iterator[str]:
    left, right = _SIDES

    def height(value: float) -> float:
        return upward.place(value, below, below - _HEIGHT)

    for tick in axis.ticks:
        place = axis.place(tick, left, right)
        yield _line(place, below - _HEIGHT, place, below, "grid")
        yield _text(place, below + 18, f"{tick - 1:g}", "quiet middle")
    for tick in upward.ticks:
        yield _line(left, height(tick), right, height(tick), "grid")
        yield _text(left - 6, height(tick) + 5, f"{tick:g}", "quiet end")
    places = _spread([axis.place(1 + count, left, right) for count in counts])
    taken = []
    for dot, x in zip(dots, places, strict=True):
        ends = dot.ends or (dot.value, dot.value)
        taken.append(_Box(x - 8, height(dot.value) - 8, x + 8, height(dot.value) + 8))
        taken.append(_Box(x - 3, height(ends[1]), x + 3, height(ends[0])))
        if dot.ends:
            yield _line(x, height(ends[0]), x, height(ends[1]), f"whisker {dot.kind}")
    area = _Box(left, below - _HEIGHT - 14, right, below)
    for dot, x in zip(dots, places, strict=True):
        y, width = height(dot.value), _CHARACTER * len(dot.label)
        box = _find_room(x, y, width, taken, area)
        taken.append(box)
        yield from _lead(x, y, box)
        yield _mark(dot.kind, x, y)
        yield _text(box.left + width / 2, box.below - 3, dot.label, "quiet middle")


def _spread(places: Sequence[float]) -> list[float]:
    """Return places of which equal ones are side by side."""
    found = []
    for number, place in enumerate(places):
        before, same = places[:number].count(place), places.count(place)
        found.append(round(place + _BESIDE * (before - (same - 1) / 2), 1))
    return found


def _find_room(x: float, y: float, width: float, taken: Sequence[_Box], area: _Box) -> _Box:
    """Return the nearest place for a label beside, above or below a dot that covers nothing.

    Raises:
        ValueError: There is none.
    """
    lefts = [
        x - width / 2,
        *(x + away for away in (12, 24, 40, 70)),
        *(x - away - width for away in (12, 24, 40, 70)),
    ]
    steps = range(0, _HEIGHT, _LABEL // 2)
    tops = [y - _LABEL / 2 + sign * step for step in steps for sign in (1, -1)]
    boxes = [_Box(left, top, left + width, top + _LABEL) for top in tops for left in lefts]
    free = [
        box
        for box in boxes
        if area.left <= box.left and box.right <= area.right and area.top <= box.top
        if box.below <= area.below and not any(box.meets(other) for other in taken)
    ]
    if not free:
        raise ValueError("expected room for every label, got none; make labels shorter or fewer")
    others = [box for box in taken if not (box.left < x < box.right and box.top <= y <= box.below)]

    def cost(box: _Box) -> float:
        # A line that crosses another dot or label could be taken for theirs.
        crossed = sum(_crosses((x, y), _nearest(x, y, box), other) for other in others)
        return math.hypot(*_gap(x, y, box)) + _HEIGHT / 4 * crossed

    return min(free, key=cost)


def _nearest(x: float, y: float, box: _Box) -> tuple[float, float]:
    """Return the point of a box that is nearest to a point."""
    return min(max(x, box.left), box.right), min(max(y, box.top), box.below)


def _crosses(start: tuple[float, float], stop: tuple[float, float], box: _Box) -> bool:
    """Return whether a line crosses a box, by some of its points."""
    count = 20
    shares = [number / count for number in range(count + 1)]
    points = [[low + share * (high - low) for low, high in zip(start, stop, strict=True)] for share in shares]
    return any(box.left <= x <= box.right and box.top <= y <= box.below for x, y in points)


def _gap(x: float, y: float, box: _Box) -> tuple[float, float]:
    """Return how far a box is from a point, to the side and up or down."""
    near = _nearest(x, y, box)
    return near[0] - x, near[1] - y


def _lead(x: float, y: float, box: _Box) -> Iterator[str]:
    """Yield a line from a dot to its label, if they are not side by side."""
    if math.hypot(*_gap(x, y, box)) > 16:
        yield _line(x, y, *_nearest(x, y, box), "reference")


def _mark(kind: str, x: float, y: float) -> str:
    if kind == "method":
        return f'<circle class="{kind}" cx="{x}" cy="{y}" r="5"/>'
    if kind == "rival":
        points = f"{x},{y - 6} {x + 6},{y} {x},{y + 6} {x - 6},{y}"
        return f'<polygon class="{kind}" points="{points}"/>'
    return f'<rect class="{kind}" x="{x - 4.5}" y="{y - 4.5}" width="9" height="9"/>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{escape(text)}</text>'


def draw_all(names: Sequence[str] = ()) -> dict[Path, str]:
    """Return the SVG of every plot, or of those that are named, by its path.

    Raises:
        LookupError: A fact of a plot is not recorded; the message has the name of the file.
        ValueError: A declaration is wrong; the message has the name of the file.
    """
    drawn = {}
    for path in sorted(DECLARED.glob("*.toml")):
        if names and path.stem not in names:
            continue
        try:
            drawn[DRAWN / f"{path.stem}.svg"] = draw(tomllib.loads(path.read_text(encoding="utf-8")))
        except (LookupError, ValueError) as error:
            raise type(error)(f"docs/plots/{path.name}: {error}") from error
    return drawn


def write(names: Sequence[str] = ()) -> None:
    """Write every plot, or those that are named."""
    DRAWN.mkdir(parents=True, exist_ok=True)
    for path, text in draw_all(names).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1:])
