"""Test what the page of a trace and a notebook have of an audit: verdicts, sources and numbers."""

from __future__ import annotations

import dataclasses
import functools
import html
import math
import re

import pytest
import torch

import lens_mix as lm
from lens_mix.measured import Fact
from lens_mix.traces.audit import Audit
from lens_mix.traces.claims import VERDICTS, Rules
from lens_mix.traces.documents import Documents
from lens_mix.view.audit import group_sources
from tests.traces.readers import reader
from tests.view.page.audits import find_sources, plant_audit
from tests.view.page.test_page import Reader
from tests.view.page.test_trace import data_of, spread
from tests.view.page.traces import make_trace


def test_without_an_audit_the_page_has_none():
    assert data_of(make_trace().show())["audit"] is None


def test_each_group_of_sources_has_its_role():
    t = make_trace()
    claim = plant_audit(t)[0]
    first, second, third = find_sources(t)
    needed, enough, against = group_sources(claim)
    assert [group.role for group in (needed, enough, against)] == ["needed", "one is enough", "against"]
    assert (needed.text, needed.loss, needed.instead) == ("cat", 6.25, "dog barked")
    assert [(each.source, each.share, each.removal.loss) for each in needed.sources] == [(first, 0.93, 6.25)]
    # The source that is most sufficient is the first one.
    assert [(each.source, each.share) for each in enough.sources] == [(first, 1.04), (second, 0.61)]
    assert (against.text.strip(), against.loss, against.instead) == ("slept", 3.5, " bark")
    (opposed,) = against.sources
    assert (opposed.source, opposed.removal.loss, math.isnan(opposed.share)) == (third, -0.25, True)
    unlisted = plant_audit(t)[1]
    assert [group.role for group in group_sources(unlisted)] == ["one is enough"]


def test_sources_that_do_not_matter_are_the_other_ones():
    t = make_trace()
    claim = plant_audit(t, is_in_parts=True)[0]
    *_, other = group_sources(claim)
    assert other.role == "other"
    assert [each.source for each in other.sources] == [find_sources(t)[2]]


def check_numbers(data, audit):
    """Compare the packed audit with the audit, source by source."""
    assert data["passes"] == audit.passes
    assert [spread(ranges) for _, ranges in data["kept"]] == [list(each.positions) for each in audit.kept]
    for packed, claim in zip(data["claims"], audit, strict=True):
        assert (packed["start"], packed["stop"]) == (claim.span.start, claim.span.stop)
        assert (packed["verdict"], packed["why"]) == (claim.verdict, claim.describe())
        losses = {each.sources[0].positions: each for each in claim.alone}
        found = [each for group in packed["groups"] for each in group["sources"]]
        for each in found:
            positions = tuple(spread(each["ranges"]))
            assert each["loss"] == pytest.approx(losses[positions].loss, rel=1e-5)
            assert each["probability"] == pytest.approx(losses[positions].probability, rel=1e-5)
        packed_roles = {
            role: {
                tuple(spread(each["ranges"]))
                for group in packed["groups"]
                if group["role"] == role
                for each in group["sources"]
            }
            for role in ("needed", "one is enough", "against")
        }
        assert packed_roles == {
            "needed": {each.sources[0].positions for each in claim.grounds if len(each.sources) == 1},
            "one is enough": {source.positions for group in claim.redundant for source in group},
            "against": {source.positions for each in claim.against for source in each.sources},
        }


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_its_numbers_are_those_of_the_audit(is_in_parts):
    t = make_trace()
    audit = plant_audit(t, is_in_parts)
    data = data_of(audit.show())["audit"]
    check_numbers(data, audit)
    if is_in_parts:
        redundant, repeated, remembered, unclear = data["claims"]
        assert redundant["without_all"] == [9.5, 0.002]
        # A claim without decisive tokens has no loss to show.
        assert remembered["without_all"] == [None, 0.3]
        assert repeated["follows"] == [redundant["start"], redundant["stop"]]
        # Its sources were measured for the claim that it repeats.
        assert repeated["measured_probability"] == redundant["probability"] != repeated["probability"]
        # Without enough passes nothing is known.
        assert unclear["without_all"] is None


def test_the_audit_of_a_model_is_in_the_page(monkeypatch):
    # A random model depends little on anything, so that the thresholds of real ones would find nothing.
    lax = functools.partial(
        Rules, decisive=(0.0, 0.5), memory=1e-6, between=0.0, written=(0.0, 0.0), further=2.0, instead=2
    )
    monkeypatch.setattr("lens_mix.traces.audit.Rules", lax)
    model = reader(dtype=torch.float64)
    report = "The models were trained on eight GPUs. Critics liked the new product. Trains run every hour."
    documents = Documents({"report": report}, question="On what were the models trained?")
    audit = lm.audit(model, documents, answer=" They were trained on eight GPUs. Trains run.")
    data = data_of(audit.show())["audit"]
    check_numbers(data, audit)
    assert any(packed["groups"] for packed in data["claims"])
    assert [name for name, _ in data["kept"]] == ["question"]


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_a_notebook_shows_the_claims_without_a_script(is_in_parts):
    audit = plant_audit(make_trace(), is_in_parts)
    shown = audit._repr_html_()
    assert "<script" not in shown
    elements = Reader(shown).elements
    assert [text.strip() for tag, _, text in elements if tag == "span"] == [claim.verdict for claim in audit]
    assert [text.strip() for tag, _, text in elements if tag == "strong"] == [
        " ".join(claim.span.text.split()) for claim in audit
    ]
    listed = [claim for claim in audit if not claim.follows]
    rows = [group for claim in listed for group in group_sources(claim) if group.role != "other"]
    assert [tag for tag, *_ in elements].count("li") == sum(len(group.sources) for group in rows)
    if not is_in_parts:
        assert "loss without it: +6.25 nats; with it alone 93% remains" in shown
        assert "makes &#x27;bark&#x27; more probable by 3.50 nats" in shown
    assert "17 forward passes without sources; kept in all of them: instruction" in shown


def test_how_often_a_verdict_is_right_is_there_if_it_was_measured(monkeypatch):
    audit = plant_audit(make_trace())
    monkeypatch.setattr("lens_mix.traces.audit.precision_of", lambda verdict: [])
    assert data_of(audit.show())["audit"]["precision"] == {}
    rest = dict.fromkeys(("score", "date", "release", "command", "recorded_in"), "")
    fact = Fact(0.97, 0.91, 0.99, 80, "planted <claims>", model="Tiny", digits=2, **rest)
    facts = {"redundant": [fact, dataclasses.replace(fact, model="Small")], "supported": [fact]}
    monkeypatch.setattr("lens_mix.traces.audit.precision_of", lambda verdict: facts.get(verdict, []))
    shown = "0.97 [0.91, 0.99] of 80 planted <claims>"
    text = f"right in {shown} (Tiny); {shown} (Small)"
    # No claim is supported.
    assert data_of(audit.show())["audit"]["precision"] == {"redundant": text}
    assert f"redundant: {html.escape(text)}." in audit._repr_html_()


def test_verdicts_differ_without_their_colors():
    t = make_trace()
    claims = [dataclasses.replace(plant_audit(t)[0], verdict=verdict) for verdict in VERDICTS]
    badges = [given for tag, given, _ in Reader(Audit(t, claims)._repr_html_()).elements if tag == "span"]
    borders = [re.search(r"border:(\w+ \w+)", badge["style"])[1] for badge in badges]
    assert len(borders) == len(set(borders)) == len(VERDICTS)


def test_text_stays_text():
    documents = Documents({"n<b>": "One <i>. Two </script>.", "m": "Three."}, question="<u>?")
    t = make_trace(documents, " The <b>cat slept. It did so for hours!")
    audit = plant_audit(t)
    for shown in (audit._repr_html_(), audit.show().html):
        tags = [tag for tag, *_ in Reader(shown).elements]
        assert not {"b", "i", "u"} & set(tags)
    assert "n&lt;b&gt;" in audit._repr_html_()
