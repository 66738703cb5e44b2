"""Draw one position of one map as a small SVG image, for a notebook; nothing but the standard library draws.

The image is static: it has no script, loads nothing, and has no ids that could occur twice in a notebook.
"""

from __future__ import annotations

import html
import itertools
import unicodedata
from collections.abc import Sequence

from lens_mix.view.colors import BLUES, HIDDEN, MARK, SIGNED, color_step
from lens_mix.view.labels import INK, QUIET, make_visible, place_labels, space_evenly
from lens_mix.view.position import LayerRow, PositionView

_WIDTH = 700.0
_MARGIN = 10.0
_FONT = "system-ui,-apple-system,'Segoe UI','Noto Sans',sans-serif"
_LINE = 24.0  # the height of a line of colored text
_TEXT = 13.0  # the size of its letters
_LABEL = 9.5
_NUMBER = 30.0  # the width of a column of numbers


def draw_svg(view: PositionView) -> str:
    """Return the first map of a view as SVG: layers × tokens, or a colored text for a map with one layer."""
    panel = view.panels[0]
    draw = _draw_text if panel.has_one_layer else _draw_cells
    body, width, height = draw(view, panel)
    # The card is white in every theme, so that the colors of the scores have the same meaning.
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{html.escape(_FONT)}" font-size="{_LABEL}" '
        f'fill="{INK}"><rect width="100%" height="100%" rx="6" fill="#fff"/>{body}</svg>'
    )


def _draw_cells(view: PositionView, panel: LayerRow) -> tuple[str, float, float]:
    """Return the heat map with its labels, the width and the height."""
    scores, visible = view.read_columns(panel)
    layers, columns = scores.shape
    low, high = _find_scale(view, panel)
    left = _MARGIN + 12 + max(_estimate(label, _LABEL) for label in panel.layer_labels)
    written = {
        name: [panel.write_score(score).replace(" %", "%") for score in panel.total(keys).tolist()]
        for name, keys in view.numbers.items()
    }
    longest_number = max(
        (_estimate(number, _LABEL) for column in written.values() for number in column), default=0
    )
    number = max(_NUMBER, longest_number + 8)
    beside = number * len(written) + _MARGIN
    across = min(22.0, (_WIDTH - left - beside) / columns)
    up = min(max(330 / layers, 4.0), 16.0)
    top, width, height = 40.0, across * columns, up * layers
    share = (scores / high).tolist()
    steps = [
        [color_step(value, low < 0) if seen else -1 for value, seen in zip(row, seen_row, strict=True)]
        for row, seen_row in zip(share, visible.tolist(), strict=True)
    ]
    colors = SIGNED if low < 0 else BLUES
    ranked = view.rank_columns([panel])
    labels = [make_visible(view.keys[key]) for key in view.columns]
    chosen = place_labels(columns, max(int(width / (_LABEL * 1.15)), 1), ranked)
    rows = space_evenly(layers, max(int(height / (_LABEL * 1.1)), 1))
    whole = max(left + width + beside, 330.0)
    longest = max(_estimate(labels[column], _LABEL) for column in chosen)
    parts = [
        _text(_MARGIN, 15, panel.name, 'font-size="11" font-weight="600"'),
        _draw_scale(whole - _MARGIN, 15, low, high, colors, panel.unit),
        f'<g transform="translate({left:.1f} {top:.1f}) scale({across:.3f} {up:.3f})" '
        f'shape-rendering="crispEdges"><path fill="{colors[color_step(0, low < 0)]}" '
        f'd="M0 0h{columns}v{layers}h-{columns}z"/>',
        *_draw_runs(steps, colors, color_step(0, low < 0)),
        "</g>",
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="none" '
        'stroke="#ccc"/>',
    ]
    if view.best is not None and view.best[1].key in view.columns:
        column, layer = view.columns.index(view.best[1].key), view.best[1].layer
        parts.append(
            f'<rect x="{left + column * across - 0.5:.1f}" y="{top + layer * up - 0.5:.1f}" '
            f'width="{across + 1:.1f}" height="{up + 1:.1f}" fill="none" stroke="{MARK}" stroke-width="2"/>'
        )
    middle = [f"{top + (row + 0.5) * up + _LABEL / 3:.1f}" for row in range(layers)]
    parts += [_text(_MARGIN, top - 6, "layer", f'fill="{QUIET}"'), f'<g text-anchor="end" fill="{QUIET}">']
    parts += [f'<text x="{left - 5:.1f}" y="{middle[row]}">{panel.layer_labels[row]}</text>' for row in rows]
    for place, (name, column_of_numbers) in enumerate(written.items()):
        x = left + width + number * (place + 1) - 1
        parts.append(_text(x, top - 6, name))
        parts += [f'<text x="{x:.0f}" y="{middle[row]}">{column_of_numbers[row]}</text>' for row in rows]
    parts.append("</g>")
    for column in chosen:
        x, y = left + (column + 0.5) * across - _LABEL / 3, top + height + 5
        parts.append(
            f'<text transform="translate({x:.1f} {y:.1f}) rotate(90)">{html.escape(labels[column])}</text>'
        )
    return "".join(parts), whole, top + height + 8 + longest + _MARGIN


def _draw_runs(steps: Sequence[Sequence[int]], colors: Sequence[str], background: int) -> list[str]:
    """Return one path per color, of all neighboring cells with this color; -1 is hidden."""
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(steps):
        start = 0
        for step, run in itertools.groupby(line):
            length = len(list(run))
            if step != background:
                paths.setdefault(step, []).append(f"M{start} {row}h{length}v1h-{length}z")
            start += length
    return [
        f'<path fill="{HIDDEN if step < 0 else colors[step]}" d="{"".join(path)}"/>'
        for step, path in sorted(paths.items())
    ]


def _draw_text(view: PositionView, panel: LayerRow) -> tuple[str, float, float]:
    """Return the tokens in boxes with their colors, the width and the height."""
    scores = panel.scores[0]
    low, high = _find_scale(view, panel)
    colors = SIGNED if low < 0 else BLUES
    numbers = [
        f"{name} {panel.write_score(panel.total(keys)[0].item())}" for name, keys in view.numbers.items()
    ]
    heading = f"{panel.name}: {', '.join(numbers)}" if numbers else panel.name
    parts = [
        _text(_MARGIN, 15, heading, 'font-size="11" font-weight="600"'),
        _draw_scale(_WIDTH - _MARGIN, 15, low, high, colors, panel.unit),
        f'<g font-size="{_TEXT}">',
    ]
    x, y = _MARGIN, 28.0
    shown: list[int | None] = [*sorted([*view.columns, *view.number_keys])]
    for key in [*shown, None] if view.prediction is not None else shown:
        token = view.prediction if key is None else view.keys[key]
        visible = make_visible(token or "", 40)
        text = visible.removeprefix("·") or visible
        inner = _estimate(text, _TEXT)
        width = inner + (6 if text == visible else 10)
        x += 8 if key is None else 0
        if x + width > _WIDTH - _MARGIN and x > _MARGIN:
            x, y = _MARGIN, y + _LINE
        if key is None:
            look, ink = f'fill="none" stroke="{BLUES[10]}" stroke-dasharray="4 3"', BLUES[10]
        else:
            step = color_step(scores[key].item() / high, low < 0)
            is_dark = abs(step - len(colors) // 2) > 3 if low < 0 else step >= 9
            look, ink = f'fill="{colors[step]}"', "#fff" if is_dark else INK
            if key in view.number_keys:
                # Its score is a number in the heading.
                look, ink = f'fill="#fff" stroke="{INK}"', INK
        parts.append(
            f'<rect x="{x + 0.5:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="20" rx="3" {look}/>'
            f'<text x="{x + width - inner - 3:.1f}" y="{y + 14.5:.1f}" fill="{ink}" '
            f'textLength="{inner:.1f}" lengthAdjust="spacingAndGlyphs">{html.escape(text)}</text>'
        )
        x += width
    return "".join([*parts, "</g>"]), _WIDTH, y + _LINE + _MARGIN


def _draw_scale(right: float, base: float, low: float, high: float, colors: Sequence[str], unit: str) -> str:
    """Return the colors of the scale with their ends and their unit, on one line that ends at `right`."""
    text = f"{high:.2g} {unit}"
    end = right - _estimate(text, _LABEL)
    start = end - 4 - 5 * len(colors)
    boxes = "".join(
        f'<rect x="{start + 5 * index:.1f}" y="{base - 8:.1f}" width="5" height="8" fill="{color}"/>'
        for index, color in enumerate(colors)
    )
    low_end = _text(start - 4, base, f"{low:.2g}", f'text-anchor="end" fill="{QUIET}"')
    return boxes + low_end + _text(end, base, text, f'fill="{QUIET}"')


def _find_scale(view: PositionView, panel: LayerRow) -> tuple[float, float]:
    """Return the ends of a scale from 0 to the largest score, or around 0 if there are scores below it."""
    columns, _ = view.read_columns(panel)
    (scaled,) = view.read_scaled([panel])
    high = float(scaled.abs().max()) or 1.0
    return (-high if bool((columns < 0).any()) else 0.0), high


def _text(x: float, y: float, text: str, look: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{html.escape(text)}</text>'


def _estimate(text: str, size: float) -> float:
    """Return the width of a text in pixels, roughly, because the viewer's font is not known."""
    return size * sum(map(_estimate_character, text))


def _estimate_character(character: str) -> float:
    if unicodedata.east_asian_width(character) in "WF":
        return 1.02
    if character in "iljtfrI.,'!|:;()[] ·":
        return 0.34
    return 0.86 if character in "mwMW@%—…→" else 0.68 if character.isupper() else 0.57
