"""Report maps, traces and audits as text and as JSON, for the command line and the app."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix import registry
from lens_mix.aggregation.candidates import AS_IT_IS, candidate_rows
from lens_mix.arguments import write_count
from lens_mix.maps import MixingMap
from lens_mix.maps.arithmetic import normalize_by_magnitude
from lens_mix.maps.explained import as_records
from lens_mix.traces.audit import Audit
from lens_mix.traces.claims import VERDICTS, Claim
from lens_mix.traces.spans import WrittenSpan
from lens_mix.traces.trace import Trace
from lens_mix.view.labels import make_visible, name_model

_SOURCES = 5  # the number of keys that are listed for a row


def describe_maps(maps: Mapping[str, MixingMap], every_row: bool) -> str:
    """Return lines of text: what the maps of one prompt explain, and the strongest keys of their rows.

    Args:
        maps: The maps by their labels.
        every_row: Whether all rows of the maps are reported. False: the default row.
    """
    first = next(iter(maps.values()))
    explanation = next(filter(None, (m.explanation() for m in maps.values())), "")
    lines = [f"{name_model(first.provenance)}, {write_count(len(first.tokens), 'token')}"]
    lines += [explanation] if explanation and not every_row else []
    for label, m in maps.items():
        title = label if label == m.method else f"{label}, by {m.method}"
        line = registry.describe(m.method).line
        lines += ["", f"{title}: {line}" if line else title]
        for query in m.query_positions if every_row else [m.default_query_position]:
            lines += _describe_row(m, query, every_row)
    notes = list(dict.fromkeys(note for m in maps.values() for note in m.notes))
    lines += ["", *(f"note: {note}" for note in notes)] if notes else []
    return "\n".join(lines)


def _describe_row(m: MixingMap, query: int, is_explained: bool) -> list[str]:
    """Return the strongest sources of one row, and the first token apart from them in maps of layers."""
    is_single = len(m) == 1 or m.kind == "input"
    which = f"layer {m.layer_labels[0]}" if m.kind == "layer" else "all layers together"
    unit = f"share, {which}" if is_single else f"mean share of {len(m)} layers, and the largest one"
    explained = str(m.explained[m.row_index(query)]) if m.explained and is_explained else ""
    about = f", which predicts {explained}" if explained else ""
    lines = [f"  at {make_visible(m.tokens[query])} ({query}){about}: {unit}"]
    sources = _rank_sources(m, query)
    # The first token is an attention sink in most causal models, and would be the strongest source of all.
    is_sink = m.causal and m.kind == "layer" and len(sources) > 1
    apart = [source for source in sources if source["position"] == 0] if is_sink else []
    for source in [*[one for one in sources if one not in apart][:_SOURCES], *apart]:
        largest = "" if is_single else f"  {source['largest']:7.1%} in layer {source['layer']:<3}"
        ending = ", the first token" if source in apart else ""
        key = f"{make_visible(source['token'])} ({source['position']}){ending}"
        lines.append(f"  {source['share']:7.1%}{largest}  {key}")
    strongest = next((source for source in sources if source not in apart), None)
    return [*lines, _describe_heads(m, query, strongest)] if m.has_heads and strongest else lines


def _describe_heads(m: MixingMap, query: int, source: Mapping[str, Any]) -> str:
    """Return the heads that take the largest shares of their rows from a source."""
    heads = m.top_heads(query, source["position"], 3, unit="share")
    named = ", ".join(f"layer {head.layer} head {head.head} {head.share:.1%}" for head in heads)
    return f"  heads with the most of {make_visible(source['token'])} ({source['position']}): {named}"


def _rank_sources(m: MixingMap, query: int) -> list[dict[str, Any]]:
    """Return the keys that a row could see with their mean and largest shares, the largest mean first."""
    shares = _row_shares(m, query)
    mean = shares.mean(dim=0)
    visible = m.visible()[:, m.row_index(query)].any(dim=0).nonzero()[:, 0]
    order = torch.sort(mean[visible].abs(), descending=True, stable=True).indices
    ranked = []
    for key in visible[order].tolist():
        strongest = int(shares[:, key].abs().argmax())
        ranked.append(
            {
                "token": m.key_labels[key],
                "position": key,
                "share": mean[key].item(),
                "largest": shares[strongest, key].item(),
                "layer": m.layer_labels[strongest] if m.kind == "layer" else None,
            }
        )
    return ranked


def _row_shares(m: MixingMap, query: int) -> Float[Tensor, "layer key"]:
    """Return a row of every layer, divided by its sum of magnitudes; heads are averaged first.

    An input map has one row of all layers together.
    """
    if m.kind == "input":
        return normalize_by_magnitude(candidate_rows(m, query, {})[AS_IT_IS][None])
    return normalize_by_magnitude(m.merge_heads().scores[:, m.row_index(query)].double())


def to_records(maps: Mapping[str, MixingMap], every_row: bool) -> dict[str, Any]:
    """Return the maps of one prompt as values that JSON can represent.

    Args:
        maps: The maps by their labels.
        every_row: Whether all rows of the maps are reported. False: the default row.
    """
    first = next(iter(maps.values()))
    return {
        "model": name_model(first.provenance),
        "tokens": first.tokens,
        "maps": {label: _map_record(m, every_row) for label, m in maps.items()},
    }


def _map_record(m: MixingMap, every_row: bool) -> dict[str, Any]:
    positions = m.query_positions if every_row else [m.default_query_position]
    explained = as_records(m.explained) or [{}] * len(m.query_positions)
    return {
        "method": m.method,
        "says": registry.describe(m.method).line,
        "kind": m.kind,
        "keys": m.key_labels,
        "layers": m.layer_labels,
        "notes": list(m.notes),
        "rows": [
            {
                "position": query,
                "token": m.tokens[query],
                "explained": explained[m.row_index(query)],
                "sources": _rank_sources(m, query)[:_SOURCES],
                "scores": m.scores[..., m.row_index(query), :].tolist(),
            }
            for query in positions
        ],
    }


def describe_trace(trace: Trace, spans: Sequence[WrittenSpan], k: int) -> str:
    """Return lines of text: what was written, and the strongest sources of some parts of it.

    Args:
        trace: The trace.
        spans: The parts.
        k: The number of sources for each part.
    """
    listed = [span.top(k) for span in spans]
    lines = [_describe_written(trace)]
    lines += [f"the strongest sources by {trace.unit}, as shares of the scores of {trace.method_name}"]
    if any(each.loss is not None for scores in listed for each in scores):
        lines += ["nats: the loss, the log probability that the part loses without the source, measured"]
    for scores in listed:
        lines += ["", repr(scores)]
    return "\n".join([*lines, *_describe_notes(trace)])


def describe_audit(audit: Audit) -> str:
    """Return lines of text: what was written, and the verdict on each claim with what it rests on."""
    sources = audit.trace.sources()
    names = list(dict.fromkeys(source.name for source in sources if source.kind == "document"))
    lines = [_describe_written(audit.trace), *([f"documents: {', '.join(names)}"] if names else [])]
    return "\n".join([*lines, "", describe_verdicts(audit), *_describe_notes(audit.trace)])


def describe_verdicts(audit: Audit) -> str:
    """Return lines of text: how many claims have each verdict, and each claim with what it rests on."""
    lines = [f"{write_count(len(audit), 'claim')}: {count_verdicts(audit)}"]
    lines += [
        "nats: what the log probability of the claim's decisive tokens, which are quoted, loses or gains"
    ]
    return "\n".join([*lines, "", repr(audit)])


def count_verdicts(claims: Iterable[Claim]) -> str:
    """Return how many claims have each verdict, such as "2 supported, 1 unclear"."""
    count = collections.Counter(claim.verdict for claim in claims)
    return ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])


def _describe_written(trace: Trace) -> str:
    count = f"{write_count(trace.n_prompt, 'prompt token')}, {trace.reading.n_written} written"
    return f"{name_model(trace.provenance)}, {count}: {trace.text.strip()}"


def _describe_notes(trace: Trace) -> list[str]:
    return ["", *(f"note: {note}" for note in trace.notes)] if trace.notes else []


def trace_record(trace: Trace, spans: Sequence[WrittenSpan], k: int) -> dict[str, Any]:
    """Return a trace, with the strongest sources of some parts of it, as values that JSON can represent.

    Args:
        trace: The trace.
        spans: The parts.
        k: The number of sources for each part.
    """
    return {
        "model": name_model(trace.provenance),
        "method": trace.method_name,
        "tokens": trace.tokens,
        "prompt_tokens": trace.n_prompt,
        "text": trace.text,
        "unit": trace.unit,
        "spans": [_span_record(span, k) for span in spans],
        "notes": list(trace.notes),
    }


def _span_record(span: WrittenSpan, k: int) -> dict[str, Any]:
    listed = [{**each.source.__dict__, **each._asdict()} for each in span.top(k)]
    for each in listed:
        del each["source"]
    return {
        "text": span.text,
        "positions": list(span.positions),
        "log_probability": span.log_probability,
        "probability": span.probability,
        "sources": listed,
    }
