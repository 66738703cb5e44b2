"""Audit an answer: what each of its claims rests on, by measured removals of the sources."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tqdm.auto import tqdm

from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix.arguments import check_choice, check_instance, check_whole_number
from lens_mix.measured import Fact, precision_of
from lens_mix.traces.auditor import Auditor, find_kept
from lens_mix.traces.claims import VERDICTS, Claim, Rules
from lens_mix.traces.documents import WRITTEN
from lens_mix.traces.removals import Passes, Removal
from lens_mix.traces.sources import TextSource
from lens_mix.traces.spans import WrittenSpan

if TYPE_CHECKING:
    from lens_mix.tables import Table
    from lens_mix.traces.trace import Trace
    from lens_mix.view.page import Page

# The default budget of forward passes for each claim.
PASSES_PER_CLAIM = 24


class Audit(Sequence[Claim]):
    """The verdicts on the claims of an answer, in the order of the text.

        >>> prompt = "Anna lives in Rome. Ben lives in Oslo. Where does Anna live?"
        >>> audit = lm.audit(model, prompt, answer=" In Rome.")
        >>> audit[0].verdict, audit["Rome"].sources

    Index it with the number of a claim or with a text that one claim contains.

    Attributes:
        trace: The trace of the answer.
        claims: The claims.
        kept: The sources that stayed in every pass, because they are what a reader asks.
        passes: The number of forward passes that the audit took.
    """

    def __init__(
        self, trace: Trace, claims: Sequence[Claim], kept: Sequence[TextSource] = (), passes: int = 0
    ) -> None:
        self.trace, self.claims, self.kept, self.passes = trace, tuple(claims), tuple(kept), passes

    def __len__(self) -> int:
        """Return the number of claims."""
        return len(self.claims)

    def __getitem__(self, place: Any) -> Any:
        """Return a claim by its number or by a text of it, or several claims by a slice.

        Raises:
            IndexError: If no claim has this number.
            ValueError: If the text does not occur exactly once in what was written, or is in no claim.
        """
        if not isinstance(place, str):
            return self.claims[place]
        span = self.trace[place]
        for claim in self.claims:
            if claim.span.start <= span.start and span.stop <= claim.span.stop:
                return claim
        raise ValueError(f"audit: expected a text of one claim, got {place!r}, which no claim contains")

    def to_dataframe(self, per: Literal["source", "claim"] = "source") -> Table:
        """Return a table with one row for each claim and source, or one row for each claim.

        The columns of both are claim, verdict, reason, probability (of the claim, 0 to 1), loss_without_all
        and probability_without_all (without any source). A number that was not measured is nan.

        Args:
            per: "source" adds source, name, role ("needed", "one is enough", "against" or "other"), loss and
                probability_without (without this source alone), sufficient (the share that remains with this
                source alone) and instead (what the model would write without what the claim rests on, or the
                token that a source against it makes more probable). A claim without sources has one row.
                "claim" adds rests_on and against, the texts of these sources.

        Raises:
            ValueError: If `per` is neither.
        """
        from lens_mix.tables import Table

        check_choice("per", per, ("source", "claim"))
        make = _make_rows if per == "source" else _make_row
        return Table([row for claim in self.claims for row in make(claim)])

    def to_json(self) -> str:
        """Return everything that was measured as JSON."""
        record = {
            "model": self.trace.provenance.get("model", ""),
            "method": self.trace.method_name,
            "written": self.trace.text,
            "passes": self.passes,
            "kept": [_record_source(source) for source in self.kept],
            "precision": {
                verdict: [dataclasses.asdict(fact) for fact in facts]
                for verdict, facts in self.precision.items()
            },
            "claims": [_record_claim(claim) for claim in self.claims],
        }
        return json.dumps(record, ensure_ascii=False, indent=1)

    def to_markdown(self) -> str:
        """Return the claims with their verdicts and sources, for a report."""
        lines: list[str] = []
        for claim in self.claims:
            lines += [f"- **{claim.verdict}**: {_one_line(claim.span.text)}", f"  {claim.describe()}"]
            lines += [f"  - {line}" for line in _describe_sources(claim)]
        return "\n".join([*lines, "", self._describe()])

    def show(self) -> Page:
        """Return the page of the trace with the verdicts; see `Trace.show`."""
        return self.trace.show()

    @property
    def precision(self) -> dict[str, list[Fact]]:
        """Return for each verdict how often it is right, on planted claims with known truth, 0 to 1.

        The verdict "unclear" has none. Each fact has its model, its number of claims and its interval.
        """
        return {each: precision_of(each) for each in VERDICTS if each != "unclear"}

    def _describe(self) -> str:
        """Return how many passes it were, what stayed in them, and how often such verdicts are right."""
        kept = f"; kept in all of them: {', '.join(map(str, self.kept))}" if self.kept else ""
        lines = [f"{self.passes} forward passes without sources{kept}"]
        for verdict in dict.fromkeys(claim.verdict for claim in self.claims):
            facts = self.precision.get(verdict, [])
            # The short claims of a model come before its hard ones.
            models: dict[str, list[str]] = {}
            for fact in sorted(facts, key=lambda each: each.cases, reverse=True):
                group = f"{fact.value:.0%} of {fact.n} {fact.cases.split()[0]}"
                models.setdefault(fact.model, []).append(group)
            if models:
                listed = "; ".join(f"{' and '.join(each)} ({name})" for name, each in models.items())
                lines.append(f"{verdict} is right in planted claims: {listed}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return each claim with its verdict and its sources."""
        lines: list[str] = []
        for claim in self.claims:
            lines.append(f"{claim.verdict.upper()}  {_one_line(claim.span.text)}")
            lines += [f"    {line}" for line in (claim.describe(), *_describe_sources(claim))]
        return "\n".join([*lines, self._describe()])

    def _repr_html_(self) -> str:
        """Return the claims with their verdicts and sources, as text with colors and without a script."""
        from lens_mix.view.audit import describe_audit_html

        return describe_audit_html(self)


def audit_trace(
    trace: Trace, spans: Sequence[Any] | None, keep: Sequence[str] | None, passes: int | None
) -> Audit:
    """Return the audit of a trace; see `Trace.audit`."""
    *_, found = audit_in_steps(trace, spans, keep, passes, show_bar=True)
    return found


def audit_in_steps(
    trace: Trace,
    spans: Sequence[Any] | None = None,
    keep: Sequence[str] | None = None,
    passes: int | None = None,
    show_bar: bool = False,
) -> Iterator[Audit]:
    """Yield the audit of a trace without any claim, and then once for each claim, with that of all before it.

    The trace keeps the last one. Whoever stops before it leaves the trace as it was.

    Args:
        trace: As in `Trace.audit`, and so are the other arguments.
        spans: The claims.
        keep: Texts of sources that are never removed.
        passes: The largest number of forward passes.
        show_bar: Whether to show a bar over the claims, in a terminal or a notebook.
    """
    if trace.reading.sound_grid is not None:
        raise UnsupportedModelError(
            "audit: expected a prompt of text, whose sources contain claims, got a sound; use t.verify, "
            "which measures what a word loses without a stretch"
        )
    claims = trace.spans if spans is None else [_read_span(trace, each) for each in _check_spans(spans)]
    budget = PASSES_PER_CLAIM * len(claims)
    if passes is not None:
        budget = check_whole_number("passes", passes, 2)
    kept = find_kept(trace, None if keep is None else _check_texts(keep))
    sources = [source for source in trace.sources() if source.is_content and source not in kept]
    if not sources:
        raise ValueError(
            "audit: expected a prompt with sources besides what is asked, got only "
            f"{', '.join(map(str, kept))}; say with keep= which texts stay, or use Documents"
        )
    # A claim may repeat an earlier sentence, also if the sources are words or documents.
    units = trace.sources() if trace.reading.prompt_text is None else trace.sources("sentence")
    # An encoder-decoder writes into another part of the model, whose text cannot be removed with the sources.
    written = [] if trace.reading.n_source else [each for each in units if each.kind == WRITTEN]
    measured = Passes(trace, [*sources, *written], budget)
    auditor = Auditor(measured, len(sources), kept, Rules())
    found: list[Claim] = []
    yield (last := Audit(trace, found, kept, measured.count))
    # tqdm disables a bar itself, for None, if the standard error is not a terminal.
    shown = {
        "desc": f"audit, at most {budget} passes",
        "unit": "claim",
        "disable": None if show_bar else True,
    }
    for span in tqdm(claims, delay=2, leave=False, **shown):
        found.append(auditor.audit(span))
        yield (last := Audit(trace, found, kept, measured.count))
    trace.keep_audit(last)


def _check_spans(spans: Any) -> Sequence[Any]:
    if isinstance(spans, (str, int, slice, WrittenSpan)):
        return [spans]
    found: Sequence[Any] = check_instance("spans", spans, Sequence, "texts, numbers or slices, as in t[...]")
    return found


def _check_texts(keep: Any) -> list[str]:
    texts = (
        [keep]
        if isinstance(keep, str)
        else list(check_instance("keep", keep, Sequence, "texts of the prompt"))
    )
    for text in texts:
        check_instance("keep", text, str, "texts of the prompt")
    return texts


def _read_span(trace: Trace, span: Any) -> WrittenSpan:
    if not isinstance(span, WrittenSpan):
        return trace[span]
    if span.trace.reading is not trace.reading:
        raise ValueError(
            f"spans: expected spans of the trace that is audited, got {span.text!r} of another one; give "
            "their texts"
        )
    # Its sources may be of another unit.
    return WrittenSpan(trace, span.start, span.stop)


# ---------------------------------------------------------------------- in words and rows


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _describe_sources(claim: Claim) -> list[str]:
    """Return one line for each source that matters."""
    lines = []
    losses = {each.sources[0]: each for each in claim.alone}
    for ground in claim.grounds:
        role = "needed" if len(ground.sources) == 1 else "one is enough"
        for source, share in zip(ground.sources, ground.shares, strict=True):
            loss = losses[source].loss if source in losses else math.nan
            effects = f"without it {-loss:+.2f} nats, with it alone {min(share, 1):.0%}"
            lines.append(f"{ground.text!r}, {role}: {source}; {effects}")
    for each in claim.against:
        names = " and ".join(map(str, each.sources))
        lines.append(f"against: {names}; makes {each.instead!r} more probable by {each.support:.2f} nats")
    return lines


def _describe_claim(claim: Claim) -> dict[str, Any]:
    return {
        "claim": claim.span.text,
        "verdict": claim.verdict,
        "reason": claim.reason,
        "probability": claim.span.probability,
        "loss_without_all": claim.memory.loss,
        "probability_without_all": claim.memory.probability,
    }


def _make_row(claim: Claim) -> list[dict[str, Any]]:
    rests_on = [str(source) for ground in claim.grounds for source in ground.sources]
    against = [str(source) for each in claim.against for source in each.sources]
    named = {"rests_on": rests_on, "against": against}
    return [
        {**_describe_claim(claim), **{name: "; ".join(dict.fromkeys(each)) for name, each in named.items()}}
    ]


def _make_rows(claim: Claim) -> list[dict[str, Any]]:
    known = _describe_claim(claim)
    roles: dict[TextSource, tuple[str, float, str]] = {}
    for ground in claim.grounds:
        for source, share in zip(ground.sources, ground.shares, strict=True):
            role = "needed" if len(ground.sources) == 1 else "one is enough"
            roles[source] = (role, share, ground.instead)
    for each in claim.against:
        for source in each.sources:
            roles.setdefault(source, ("against", math.nan, each.instead))
    removals: dict[TextSource, Removal] = {each.sources[0]: each for each in claim.alone}
    rows = []
    for source in dict.fromkeys([*roles, *removals]):
        role, share, instead = roles.get(source, ("other", math.nan, ""))
        removal = removals.get(source)
        rows.append(
            {
                **known,
                "source": source.text,
                "name": source.name,
                "role": role,
                "loss": math.nan if removal is None else removal.loss,
                "probability_without": math.nan if removal is None else removal.probability,
                "sufficient": share,
                "instead": instead,
            }
        )
    empty = {"source": "", "name": "", "role": "", "loss": math.nan, "probability_without": math.nan}
    return rows or [{**known, **empty, "sufficient": math.nan, "instead": ""}]


def _record_source(source: TextSource) -> dict[str, Any]:
    return {
        "text": source.text,
        "name": source.name,
        "kind": source.kind,
        "positions": list(source.positions),
    }


def _record_removal(removal: Removal) -> dict[str, Any]:
    sources = [_record_source(source) for source in removal.sources]
    return {"sources": sources, "loss": removal.loss, "probability": removal.probability}


def _record_claim(claim: Claim) -> dict[str, Any]:
    return {
        "text": claim.span.text,
        "tokens": [claim.span.start, claim.span.stop],
        "verdict": claim.verdict,
        "reason": claim.reason,
        "log_probability": claim.span.log_probability,
        "decisive": list(claim.decisive),
        "without_all": None if math.isnan(claim.memory.loss) else _record_removal(claim.memory),
        "grounds": [
            {
                "text": ground.text,
                "tokens": list(ground.tokens),
                "sources": [_record_source(source) for source in ground.sources],
                "loss": ground.loss,
                "instead": ground.instead,
                "sufficient": list(ground.shares),
            }
            for ground in claim.grounds
        ],
        "alone": [_record_removal(removal) for removal in claim.alone],
        "against": [
            {
                "sources": [_record_source(source) for source in each.sources],
                "token": each.token,
                "instead": each.instead,
                "support": each.support,
                "margin": each.margin,
            }
            for each in claim.against
        ],
        "follows": None if claim.follows is None else claim.follows.text,
    }
