"""Convert an audit to the form that the page of a trace reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lens_mix.view.audit import SourceGroup, describe_precision, group_sources
from lens_mix.view.page.data import round_number, to_ranges

if TYPE_CHECKING:
    from lens_mix.traces.audit import Audit
    from lens_mix.traces.claims import Claim


def pack_audit(audit: Audit) -> dict[str, Any]:
    """Return the claims with their verdicts and sources, and what all passes had in common."""
    return {
        "unit": audit.trace.unit,
        "passes": audit.passes,
        "kept": [[source.name, to_ranges(source.positions)] for source in audit.kept],
        "precision": describe_precision(audit),
        "claims": [_pack_claim(claim) for claim in audit],
    }


def _pack_claim(claim: Claim) -> dict[str, Any]:
    follows, memory = claim.follows, claim.memory
    # The loss is that of the decisive tokens. An unclear claim without any may have been given up before.
    loss = round_number(memory.loss) if claim.decisive else None
    is_measured = bool(claim.decisive) or claim.verdict != "unclear"
    without_all = [loss, round_number(memory.probability)] if is_measured else None
    # The sources of a claim that repeats an earlier one were measured for that one.
    measured = claim.span if follows is None else follows
    return {
        "start": claim.span.start,
        "stop": claim.span.stop,
        "verdict": claim.verdict,
        "why": claim.describe(),
        "follows": None if follows is None else [follows.start, follows.stop],
        "probability": round_number(claim.span.probability),
        "without_all": without_all,
        "measured_probability": round_number(measured.probability),
        "groups": [_pack_group(group) for group in group_sources(claim)],
    }


def _pack_group(group: SourceGroup) -> dict[str, Any]:
    return {
        "role": group.role,
        "text": group.text,
        "loss": round_number(group.loss),
        "instead": group.instead,
        "sources": [
            {
                "name": source.name,
                "ranges": to_ranges(source.positions),
                "loss": None if removal is None else round_number(removal.loss),
                "probability": None if removal is None else round_number(removal.probability),
                "share": round_number(share),
            }
            for source, removal, share in group.sources
        ],
    }
