"""Make the page of a trace: click a written sentence or token, and its sources in the prompt are colored."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.registry import describe
from lens_mix.traces.documents import PADDING, SOUND, TEMPLATE
from lens_mix.version import __version__
from lens_mix.view.labels import name_model
from lens_mix.view.page import Page, make_document
from lens_mix.view.page.audits import pack_audit
from lens_mix.view.page.data import Numbers, make_plain, round_number, to_ranges

if TYPE_CHECKING:
    from lens_mix.traces.sources import PlacedText, TextSource
    from lens_mix.traces.spans import WrittenSpan
    from lens_mix.traces.trace import Trace

_SCRIPTS = ("common.js", "drawing.js", "audit.js", "trace.js")
# The waveform of a stretch of sound is drawn as this many lines.
_WAVE_PIECES = 48
_STYLES = ("page.css", "trace.css")
# The units that the page can switch between, the first one that exists being shown if the trace has another.
_UNITS = ("sentence", "document", "message", "word", "token", "given")


def trace_page(trace: Trace) -> Page:
    """Return the page of a trace; see `lens_mix.traces.trace.Trace.show`.

    The scores of the written sentences are computed if they were not before. The scores of single tokens are
    in the page if `Trace.steps` was read, and the verdicts on the claims if `Trace.audit` was called.
    """
    numbers = Numbers()
    spans = _find_spans(trace)
    data = {
        "version": __version__,
        "model": name_model(trace.provenance),
        "method": trace.method_name,
        "line": describe(trace.method_name.partition(",")[0]).line,
        "parameters": make_plain(trace.parameters),
        "generated": "generation" in trace.provenance,
        "hops": trace.hops,
        "notes": list(trace.notes),
        "tokens": trace.tokens,
        "n_prompt": trace.n_prompt,
        "boxes": (boxes := _find_boxes(trace)),
        "waves": _pack_waves(trace, boxes),
        "seconds": trace.reading.seconds,
        "blocks": _find_blocks(trace),
        "unit": trace.unit,
        "sources": _pack_sources(trace),
        "spans": [_pack_span(trace, kind, span, numbers) for kind, span in spans],
        "steps": _pack_steps(trace, numbers),
        "log_probabilities": [round_number(number) for number in trace.log_probabilities.tolist()],
        "predictions": [[entry.prediction, entry.probability] for entry in trace.explained],
        "audit": None if trace.computed_audit is None else pack_audit(trace.computed_audit),
    }
    document = make_document(data, numbers, "trace.html", _STYLES, _SCRIPTS)
    return Page(document, "the sources of a text")


def _find_spans(trace: Trace) -> list[tuple[str, WrittenSpan]]:
    """Return the spans of the page with their kinds: sentences, everything, and other parts with scores."""
    found: dict[tuple[int, int], tuple[str, WrittenSpan]] = {}
    listed = [
        *(("sentence", span) for span in trace.spans),
        ("everything", trace[:]),
        *(("part", span) for span in trace.computed_spans),
    ]
    for kind, span in listed:
        try:
            trace.scores_of(span.start, span.stop)
        except ValueError:
            if trace.has_explainer:
                raise
            # A trace that was loaded from a file has only the scores that were computed before.
            continue
        found.setdefault((span.start, span.stop), (kind, span))
    return list(found.values())


def _pack_span(trace: Trace, kind: str, span: WrittenSpan, numbers: Numbers) -> dict[str, Any]:
    losses = trace.losses_of(span.start, span.stop)
    return {
        "kind": kind,
        "start": span.start,
        "stop": span.stop,
        "log_probability": round_number(span.log_probability),
        "scores": _pack_row(span.scores, numbers),
        "losses": [[to_ranges(positions), round_number(loss)] for positions, loss in losses.items()],
    }


def _pack_steps(trace: Trace, numbers: Numbers) -> list[dict[str, Any]] | None:
    """Return the scores of each written token; None if they were not computed."""
    return [_pack_row(row, numbers) for row in trace.steps.scores[0]] if trace.has_steps else None


def _pack_row(row: Float[Tensor, " key"], numbers: Numbers) -> dict[str, Any]:
    """Return the place of a row's numbers, which are stored as float16 of the largest magnitude."""
    wide = row.detach().cpu().to(torch.float64)
    largest = float(wide.abs().max()) or 1.0
    return {"largest": largest, "data": numbers.add((wide / largest).numpy().astype("<f2").tobytes())}


def _pack_sources(trace: Trace) -> dict[str, list[list[Any]]]:
    """Return the kind, the name and the positions of all sources of each unit that the trace has."""
    packed = {}
    # The boxes of a sound are the sources of one unit.
    units = _UNITS if trace.reading.sound_grid is None else (trace.unit,)
    for unit in units:
        try:
            sources: list[TextSource] = trace.sources(unit)
        except ValueError:
            # Tokens have no sentences, and most traces have no sources of their own.
            continue
        packed[unit] = [[each.kind, each.name, to_ranges(each.positions)] for each in sources]
    places = {unit: [ranges for *_, ranges in sources] for unit, sources in packed.items()}
    if "message" in places and places["message"] == places["document"]:
        # A prompt without documents, or without messages, has the same sources by both units.
        has_messages = any(message is not None for _, _, message, *_ in _find_blocks(trace))
        same = ["document", "message"] if has_messages else ["message", "document"]
        packed.pop(next(unit for unit in same if unit != trace.unit))
    return packed


def _find_boxes(trace: Trace) -> list[list[Any]]:
    """Return the text as boxes of neighboring tokens: [first, after the last, text, whether it is a mark].

    A box has one token, or all tokens that spell one character. A token that spells nothing is a mark, such
    as <s>. The texts of the other boxes, joined, are the whole text, unless it is unknown.
    """
    reading = trace.reading
    boxes: list[list[Any]] = [] if reading.sound_grid is None else _sound_boxes(trace)
    for placed, start, stop in (
        (reading.prompt_text, len(boxes) and reading.n_source, trace.n_prompt),
        (reading.written_text, trace.n_prompt, len(trace.tokens)),
    ):
        boxes += _place_boxes(trace.tokens, placed, start, stop)
    return boxes


def _sound_boxes(trace: Trace) -> list[list[Any]]:
    """Return a box for each run of neighboring frames that belong to one source."""
    sources, count = trace.sources(), trace.reading.n_source
    owner = {position: source for source in sources for position in source.positions}
    runs = [list(run) for _, run in itertools.groupby(range(count), lambda frame: id(owner[frame]))]
    return [
        [run[0], run[-1] + 1, f"{owner[run[0]].text} ", False]
        if len(run) == len(owner[run[0]].positions)
        else [run[0], run[-1] + 1, f"{trace.tokens[run[0]]} ", False]
        for run in runs
    ]


def _pack_waves(trace: Trace, boxes: Sequence[Sequence[Any]]) -> list[Any] | None:
    """Return the smallest and the largest sample of equal times of each box; None without a waveform."""
    grid, samples = trace.reading.sound_grid, trace.reading.prompt.features
    if grid is None or samples is None or samples.ndim > 1:
        return None
    samples = samples.detach().to("cpu", torch.float32)
    packed: list[Any] = []
    for start, stop, *_ in boxes:
        first, last = grid.box(start), grid.box(stop - 1)
        if first is None or last is None:
            packed.append(None)
            continue
        pieces = samples[first[1] : last[3]].tensor_split(_WAVE_PIECES)
        packed.append(
            [[float(f"{piece.min():.3g}"), float(f"{piece.max():.3g}")] for piece in pieces if len(piece)]
        )
    return packed


def _place_boxes(tokens: Sequence[str], placed: PlacedText | None, start: int, stop: int) -> list[list[Any]]:
    boxes: list[list[Any]] = []
    end = 0
    for position in range(start, stop):
        low, high = _offsets_of(placed, position)
        if low == high or placed is None:
            boxes.append([position, position + 1, tokens[position], placed is not None])
        elif high > end:
            # White space between two tokens belongs to the second one.
            boxes.append([position, position + 1, placed.text[end:high], False])
            end = high
        else:
            boxes[-1][1] = position + 1
    if placed is not None and end and end < len(placed.text):
        last = max(index for index, box in enumerate(boxes) if not box[3])
        boxes[last][2] += placed.text[end:]
    return boxes


def _offsets_of(placed: PlacedText | None, position: int) -> tuple[int, int]:
    """Return the first character of a token and the one after the last; equal if it spells nothing."""
    index = -1 if placed is None else position - placed.first
    return placed.offsets[index] if placed is not None and 0 <= index < len(placed.offsets) else (0, 0)


def _find_blocks(trace: Trace) -> list[list[Any]]:
    """Return the prompt as blocks: [kind, name, message, first position, position after the last].

    Between the sections of the prompt are blocks of the template.
    """
    placed, count, grid = trace.reading.prompt_text, trace.n_prompt, trace.reading.sound_grid
    if grid is not None:
        stops = [(SOUND, len(grid.positions)), (PADDING, trace.reading.n_source), (TEMPLATE, count)]
        starts = [0, *(stop for _, stop in stops)]
        return [
            [kind, kind, None, start, stop]
            for start, (kind, stop) in zip(starts, stops, strict=False)
            if stop > start
        ]
    if placed is None:
        return [["prompt", "prompt", None, 0, count]]
    blocks: list[list[Any]] = []
    end = 0
    for section in placed.sections:
        inside = placed.find_tokens(section.start, section.stop)
        if not inside or inside[-1] < end:
            continue
        start, stop = max(inside[0], end), inside[-1] + 1
        if start > end:
            blocks.append(["template", "template", None, end, start])
        # White space belongs to the text before it, as in the sources.
        while stop < count and not trace.tokens[stop].strip():
            stop += 1
        blocks.append([section.kind, section.name, section.message, start, stop])
        end = stop
    if end < count:
        blocks.append(["template", "template", None, end, count])
    return blocks
