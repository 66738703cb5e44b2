"""Make what a notebook shows of an audit, and group the sources of a claim by their roles."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lens_mix.traces.audit import Audit
    from lens_mix.traces.claims import Claim
    from lens_mix.traces.removals import Removal
    from lens_mix.traces.sources import TextSource

# The colors suit a light and a dark ground, and the borders differ without a color, too.
_BADGES = {
    "supported": ("0,135,100", "2px solid"),
    "redundant": ("11,112,205", "3px double"),
    "conflicting": ("217,95,2", "2px dashed"),
    "from memory": ("150,80,180", "2px dotted"),
    "unclear": ("128,128,128", "1px solid"),
}


class MeasuredSource(NamedTuple):
    """A source of a claim.

    Attributes:
        source: The source.
        removal: What the claim loses without it alone; None if it was not measured.
        share: How much of what all sources bring remains with it alone; nan if it was not measured.
    """

    source: TextSource
    removal: Removal | None
    share: float = math.nan


class SourceGroup(NamedTuple):
    """Sources that have one role for some tokens of a claim.

    Attributes:
        role: "needed", "one is enough", "against" or "other".
        text: The text of these tokens; "" for "other".
        sources: The sources, the one first that is most sufficient.
        loss: What these tokens lose without all of the sources, in nats. For "against": how much more
            probable the sources make other text, in nats. nan for "other".
        instead: What the model would write without the sources. For "against": the text that they make more
            probable. "" for "other".
    """

    role: str
    text: str
    sources: tuple[MeasuredSource, ...]
    loss: float = math.nan
    instead: str = ""


def group_sources(claim: Claim) -> list[SourceGroup]:
    """Return the sources of a claim: what it rests on, what is against it, and others that were measured."""
    removals = {each.sources[0]: each for each in claim.alone}
    groups = [
        SourceGroup(
            "needed" if len(ground.sources) == 1 else "one is enough",
            ground.text,
            tuple(
                MeasuredSource(source, removals.get(source), share)
                for source, share in sorted(
                    zip(ground.sources, ground.shares, strict=True), key=lambda each: -each[1]
                )
            ),
            ground.loss,
            ground.instead,
        )
        for ground in claim.grounds
    ]
    trace = claim.span.trace
    for each in claim.against:
        sources = tuple(MeasuredSource(source, removals.get(source)) for source in each.sources)
        text = trace.text_of(each.token, each.token + 1)
        groups.append(SourceGroup("against", text, sources, each.support, each.instead))
    others = [MeasuredSource(source, removals[source]) for source in removals if source not in claim.sources]
    return [*groups, SourceGroup("other", "", tuple(others))] if others else groups


def describe_precision(audit: Audit) -> dict[str, str]:
    """Return for each verdict of the claims how often it is right, if that was measured."""
    precision = audit.precision
    found = {}
    for verdict in dict.fromkeys(claim.verdict for claim in audit):
        figures = [f"{fact} of {fact.n} {fact.cases} ({fact.model})" for fact in precision.get(verdict, [])]
        if figures:
            found[verdict] = f"right in {'; '.join(figures)}"
    return found


def describe_audit_html(audit: Audit) -> str:
    """Return the claims with their verdicts, and under each of them its sources with what was measured.

    It has no script, so that a notebook shows it before it is trusted. The colors are transparent, so that
    they suit a light and a dark notebook.
    """
    kept = f"; kept in all of them: {', '.join(map(str, audit.kept))}" if audit.kept else ""
    passes = "1 forward pass" if audit.passes == 1 else f"{audit.passes} forward passes"
    precision = [
        f"<div>{verdict}: {html.escape(text)}.</div>" for verdict, text in describe_precision(audit).items()
    ]
    return (
        f"<div><code>Audit: {len(audit)} claim{'' if len(audit) == 1 else 's'}</code></div>"
        f'<div style="max-width:60em">{"".join(map(_describe_claim, audit))}'
        f"<div>{passes} without sources{html.escape(kept)}.</div>{''.join(precision)}</div>"
        "<div><code>.show()</code> shows the sources in the prompt.</div>"
    )


def _describe_claim(claim: Claim) -> str:
    text = html.escape(" ".join(claim.span.text.split()))
    # A claim that repeats an earlier one has its sources.
    groups = [] if claim.follows else group_sources(claim)
    lines = "".join(f"<li>{line}</li>" for group in groups for line in _describe_group(group))
    sources = f'<ul style="margin:0">{lines}</ul>' if lines else ""
    why = claim.describe()
    return (
        f'<div style="margin:.6em 0">{_make_badge(claim.verdict)} <strong>{text}</strong>'
        f"<div>{html.escape(why[:1].upper() + why[1:])}.</div>"
        f"{sources}</div>"
    )


def _make_badge(verdict: str) -> str:
    color, border = _BADGES[verdict]
    style = f"background:rgba({color},.18);border:{border} rgb({color});border-radius:4px;padding:0 .35em"
    return f'<span style="{style}">{verdict}</span>'


def _describe_group(group: SourceGroup) -> list[str]:
    """Return one line for each source, as HTML; nothing for the sources that do not matter."""
    if group.role == "other":
        return []
    lines = []
    for source, removal, share in group.sources:
        numbers = []
        if removal is not None:
            numbers.append(f"loss without it: {removal.loss:+.2f} nats")
        if not math.isnan(share):
            numbers.append(f"with it alone {min(share, 1):.0%} remains")
        if group.role == "against":
            numbers.append(f"makes {group.instead.strip()!r} more probable by {group.loss:.2f} nats")
        target = f"{group.role}{'' if group.role == 'against' else ' for'} {group.text.strip()!r}"
        lines.append(f"<em>{html.escape(target)}</em>: {html.escape(f'{source}; ' + '; '.join(numbers))}")
    return lines
