"""Test `lm.audit` and `Trace.audit` on every kind of model and prompt, and what an `Audit` returns."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix.measured import _read_facts
from lens_mix.traces.audit import audit_in_steps
from lens_mix.traces.claims import VERDICTS
from tests.matrix import build_or_skip, case_of, model_of, prompt_of
from tests.tiny_models import bridge, hooked_encoder_decoder, hooked_transformer, toy_tokenizer
from tests.traces import planted
from tests.traces.planted import Word, audit_planted, sentence, trace_of
from tests.traces.readers import PLAIN, reader

pytestmark = pytest.mark.filterwarnings("ignore")

# ------------------------------------------------------------------ models and prompts


def require_audit(audit, n_claims=1):
    """Check that each claim has a verdict and finite numbers."""
    assert len(audit) == n_claims
    assert audit.passes >= 2
    for claim in audit:
        assert claim.verdict in VERDICTS
        assert math.isfinite(claim.memory.loss)
        assert 0 <= claim.memory.probability <= 1
        assert claim.memory.sources
    assert audit.trace.computed_audit is audit
    return audit


@pytest.mark.parametrize("label", ["bridge gpt2", "bridge llama", "HookedTransformer LN"])
def test_causal_models_with_tokens(label):
    case = case_of(label)
    if not case.exists:
        pytest.skip("this TransformerLens has no such model")
    model = model_of(case, torch.float64)
    tokens = prompt_of(model)[0]
    for sources in ("token", [[1, 2], [3], [0]]):
        audit = require_audit(lm.audit(model, tokens[:5], answer=tokens[5:], sources=sources, passes=99))
        # One of five tokens stays, or the tokens that are in no group.
        assert len(audit[0].memory.sources) == (4 if sources == "token" else 3)
        assert [each.positions for each in audit.kept] == ([] if sources == "token" else [(4,)])


ENCODER_DECODERS = [(bridge, "t5"), (bridge, "bart"), (bridge, "marian"), (hooked_encoder_decoder, None)]


@pytest.mark.parametrize(("build", "name"), ENCODER_DECODERS, ids=["t5", "bart", "marian", "hooked"])
def test_encoder_decoders(build, name):
    model = build_or_skip(build, *([name] if name else []), torch.float64)
    source, target = torch.arange(5, 11), torch.tensor([0, 20, 21, 22])
    try:
        audit = lm.audit(model, source, answer=target, sources="token", spans=[0, slice(1, 3)], passes=99)
    except lm.UnsupportedModelError as problem:
        assert "TransformerLens" in str(problem)
        pytest.skip(str(problem))
    require_audit(audit, 2)
    # The written tokens are not among the sources.
    n_source = len(source)
    assert all(place < n_source for each in audit[1].memory.sources for place in each.positions)
    assert audit[1].follows is None


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_encoder_decoders_with_text(name):
    model = build_or_skip(bridge, name, torch.float64, tokenizer=toy_tokenizer())
    try:
        audit = lm.audit(model, "w5 w6 w7 w8 w9 w10", answer="w20 w21", sources="word", keep=["w10"])
    except lm.UnsupportedModelError as problem:
        assert "TransformerLens" in str(problem)
        pytest.skip(str(problem))
    assert [each.text for each in audit.kept] == ["w10"]
    require_audit(audit)


def test_pictures():
    from tests.pictured_models import picture_prompt, pictured

    model = build_or_skip(pictured, "llava", tokenizer=toy_tokenizer())
    prompt = picture_prompt("llava", 2)
    audit = require_audit(lm.audit(model, prompt, answer=[10, 11, 12], passes=99))
    # The text after the last picture is what is asked.
    assert [each.kind for each in audit.kept] == ["prompt"]
    names = [each.text for each in audit[0].memory.sources]
    assert {"picture 1", "picture 2"} < set(names)
    t = audit.trace
    both = [each for each in t.sources() if each.kind == "picture"]
    rest = t.reading.without([place for each in both for place in each.positions])
    assert rest.pictures == ()
    with pytest.raises(
        lm.UnsupportedModelError, match="expected to delete all patches of picture 1 or none, because"
    ):
        t.by("token").audit()


def test_text_between_pictures_that_cannot_be_removed():
    from tests.pictured_models import picture_prompt, pictured

    if transformer_lens_version() < (4,):
        pytest.skip("only TransformerLens 4 computes Gemma 3 with pictures rightly")
    model = build_or_skip(pictured, "gemma3_pictures", tokenizer=toy_tokenizer())
    t = lm.trace(model, picture_prompt("gemma3_pictures", 2), answer=[10, 11, 12])
    # Both pictures stay, and the text between them is the only source.
    keep = [each.text for each in t.sources() if each.is_content and each.text != "w41 w40"]
    with pytest.raises(lm.UnsupportedModelError, match="pictures 1 and 2 would be neighbors"):
        t.audit(keep=keep)


TEXT = "Oslo has trains. It has 120 employees. Critics liked it. Where is Oslo?"
ANSWER = " Oslo has trains. Yes."


@pytest.mark.parametrize("unit", ["token", "word", "sentence", "message", "document"])
def test_a_question_stays_in_every_unit(unit):
    t = lm.trace(planted.model_of(), TEXT, answer=ANSWER, method="attention").by(unit)
    if unit in ("message", "document"):
        with pytest.raises(ValueError, match=r"audit: expected a prompt with sources besides what is asked"):
            t.audit()
        return
    audit = require_audit(t.audit(passes=50), 2)
    kept = "".join(each.text for each in audit.kept).replace(" ", "")
    assert kept == "WhereisOslo?"
    # A claim can repeat an earlier sentence, and not an earlier word.
    assert audit[1].follows is None or audit[1].follows.text == audit[0].span.text


def test_groups_of_texts_are_the_only_sources():
    t = lm.trace(planted.model_of(), TEXT, answer=ANSWER, sources=["Oslo has", "Critics liked it."])
    audit = require_audit(t.audit(), 2)
    (rest,) = audit.kept
    assert rest.text.endswith("Where is Oslo?")
    assert {each.name for each in audit[0].memory.sources} == {"Oslo has", "Critics liked it."}
    groups = lm.trace(planted.model_of(), TEXT, answer=ANSWER, sources=[[1, 2], [3]])
    audit = require_audit(groups.audit(), 2)
    assert {each.positions for each in audit[0].memory.sources} == {(1, 2), (3,)}


CHAT = [
    {"role": "system", "content": "Use the documents."},
    {"role": "user", "content": "Oslo has trains. It has 120 employees."},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Where is it?"},
]
DOCUMENTS = lm.Documents(
    {"report": "Oslo has trains. It has 120 employees.", "press": "Critics liked it."},
    "Where?",
    "Use the documents.",
)


@pytest.fixture(scope="module")
def chatting():
    return reader(template=PLAIN)


@pytest.mark.parametrize("unit", ["sentence", "message"])
def test_chat(chatting, unit):
    audit = require_audit(lm.audit(chatting, CHAT, answer="Oslo has trains.", sources=unit))
    assert [each.text for each in audit.kept] == ["Use the documents.", "Where is it?"]
    assert len(audit[0].memory.sources) == (3 if unit == "sentence" else 2)


def test_documents(chatting):
    t = lm.trace(chatting, DOCUMENTS, answer="Oslo has trains. Yes.")
    audit = require_audit(t.audit(), 2)
    assert [each.kind for each in audit.kept] == ["instruction", "question"]
    assert {each.name for each in audit[0].memory.sources} == {"report", "press"}
    whole = require_audit(t.by("document").audit(), 2)
    assert sorted(each.name for each in whole[0].memory.sources) == ["press", "report"]
    assert whole.kept == audit.kept
    # The sets of sources without all of them are the same.
    assert whole[0].memory.loss == pytest.approx(audit[0].memory.loss, abs=1e-9)
    plain = lm.audit(planted.model_of(), DOCUMENTS, answer=ANSWER)
    assert [each.kind for each in require_audit(plain, 2).kept] == ["instruction", "question"]


def test_paths_through_written_text(chatting):
    t = lm.trace(chatting, DOCUMENTS, answer="Oslo has trains. Yes.")
    direct, through = t.audit(), t.through().audit()
    # The order of the sources may be another one, and the losses are the same.
    for one, other in zip(direct, require_audit(through, 2), strict=True):
        assert one.memory.loss == pytest.approx(other.memory.loss, abs=1e-9)
        assert other.span.trace is through.trace
    assert t.computed_audit is through


def test_a_trace_of_a_file(chatting, tmp_path):
    t = lm.trace(chatting, DOCUMENTS, answer="Oslo has trains. Yes.")
    expected = t.audit()
    t.save(tmp_path / "t.trace")
    assert lm.Trace.load(tmp_path / "t.trace").computed_audit is None
    with pytest.raises(
        ValueError, match=r"expected a trace with its model, got one from a file; give it, as in lm\.Trace"
    ):
        lm.Trace.load(tmp_path / "t.trace").audit()
    loaded = lm.Trace.load(tmp_path / "t.trace", chatting).audit()
    assert repr(loaded) == repr(expected)
    with pytest.raises(ValueError, match=r"spans: expected spans of the trace that is audited, got 'Yes\."):
        t.audit([loaded.trace["Yes."]])


def test_what_the_model_writes_is_audited():
    model = planted.model_of()
    audit = lm.audit(model, TEXT, generate=6, seed=3, passes=60)
    assert audit.trace.reading.n_written <= 6
    assert audit.trace.provenance["generation"] == {"generate": 6, "seed": 3}
    require_audit(audit, len(audit.trace.spans))


def test_a_hooked_transformer_with_text():
    model = build_or_skip(hooked_transformer, "LN", torch.float64, tokenizer=toy_tokenizer())
    audit = lm.audit(model, "w5 w6 w7 w8", answer=" w9 w10", sources="word", keep=["w8"])
    require_audit(audit)
    assert [each.text.strip() for each in audit.kept] == ["w8"]


# ------------------------------------------------------------------ arguments


def test_it_is_the_audit_of_the_trace():
    model = planted.model_of()
    options = {"spans": ["Oslo has", 4], "keep": ["Critics", "Where"], "passes": 40}
    one = lm.audit(model, TEXT, answer=ANSWER, method="attention", language="en", **options)
    other = lm.trace(model, TEXT, answer=ANSWER, method="attention", language="en").audit(**options)
    assert repr(one) == repr(other)
    assert one.to_json() == other.to_json()
    assert one.trace.method_name == "attention, mean"
    assert [each.text for each in one.kept] == ["Critics liked it.", "Where is Oslo?"]


def test_kinds_of_spans():
    t = lm.trace(planted.model_of(), TEXT, answer=ANSWER, method="attention")
    for spans in ("trains", ["trains"], [t["trains"]], [t.by("word")["trains"]], t["trains"]):
        (claim,) = t.audit(spans)
        assert (claim.span.start, claim.span.stop) == (t["trains"].start, t["trains"].stop)
        assert claim.span.trace is t
    (first,) = t.audit(2)
    assert list(first.span.positions) == [t.n_prompt + 2]
    (part,) = t.audit(slice(1, 4))
    assert part.span.text == t[1:4].text
    assert [claim.span.text for claim in t.audit()] == [span.text for span in t.spans]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"spans": 3.5}, TypeError, "spans: expected texts, numbers or slices, as in t.*got 3.5"),
        ({"spans": [3.5]}, TypeError, "span: expected a text, a number or a slice"),
        ({"spans": {"a": 1}}, TypeError, "spans: expected texts, numbers or slices"),
        ({"spans": ["cars"]}, ValueError, "span: expected a text that was written, got 'cars'"),
        ({"spans": [99]}, ValueError, "span: expected a text, a number or a slice from"),
        ({"keep": 5}, TypeError, "keep: expected texts of the prompt, got 5"),
        ({"keep": ["Oslo", 5]}, TypeError, "keep: expected texts of the prompt, got 5"),
        ({"keep": ["cars"]}, ValueError, "keep: expected texts of the prompt, got 'cars', which no source"),
        ({"passes": "x"}, TypeError, "passes: expected a whole number, 2 or more, got 'x'"),
        ({"passes": 2.5}, TypeError, "passes: expected a whole number, 2 or more, got 2.5"),
        ({"passes": True}, TypeError, "passes: expected a whole number"),
        ({"passes": 1}, ValueError, "passes: expected a whole number, 2 or more, got 1"),
    ],
)
def test_wrong_arguments(options, error, message):
    t = lm.trace(planted.model_of(), TEXT, answer=ANSWER, method="attention")
    with pytest.raises(error, match=message):
        t.audit(**options)
    assert t.computed_audit is None


def test_nothing_but_a_question():
    with pytest.raises(
        ValueError,
        match=r"audit: expected a prompt with sources besides what is asked, got only 'Where is Oslo\?'; say "
        r"with keep= which texts stay, or use Documents",
    ):
        lm.audit(planted.model_of(), "Where is Oslo?", answer=ANSWER)


def test_an_answer_or_a_generation():
    with pytest.raises(ValueError, match="answer, generate: expected"):
        lm.audit(planted.model_of(), TEXT)
    with pytest.raises(TypeError, match=r"sentences: expected an argument of lm\.trace"):
        lm.audit(planted.model_of(), TEXT, answer=ANSWER, sentences=3)


# ------------------------------------------------------------------ what it returns

TWO = " Ann has a cat. Ben sees the animal. The man is old."
# The first claim needs source 0, and source 3 says something else. The second one is in two sources.
PLANTED = [
    Word("cat", {(0,): 12.0}),
    Word("animal", {(1, 2): 8.0}),
]


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr("lens_mix.traces.audit.precision_of", lambda verdict: [])
    token = planted.model_of().tokenizer(" dog", add_special_tokens=False)["input_ids"][0]
    other = Word("cat", {(3,): 6.0}, token=token, log_probability=-2.0)
    return audit_planted(monkeypatch, trace_of(4, TWO), [*PLANTED, other])


def test_claims_by_number_slice_and_text(found):
    assert isinstance(found, lm.Audit)
    assert [claim.verdict for claim in found] == ["conflicting", "redundant", "from memory"]
    assert len(found) == 3
    assert found[0] is found.claims[0]
    assert found[-1] is found.claims[2]
    assert found[1:] == found.claims[1:]
    assert found["animal"] is found[1]
    assert found[" Ben sees the animal."] is found[1]
    assert found[1] in found
    with pytest.raises(IndexError):
        found[3]
    with pytest.raises(
        ValueError, match=r"audit: expected a text of one claim, got 'cat. Ben', which no claim"
    ):
        found["cat. Ben"]
    with pytest.raises(ValueError, match=r"span: expected a text that was written, got 'cars'"):
        found["cars"]
    with pytest.raises(ValueError, match="occurs 2 times"):
        found["an"]


def test_a_text_of_no_claim(monkeypatch):
    audit = audit_planted(monkeypatch, trace_of(4, TWO), PLANTED, spans=["cat"])
    with pytest.raises(
        ValueError, match="expected a text of one claim, got 'animal', which no claim contains"
    ):
        audit["animal"]


def test_its_text(found):
    lines = repr(found).splitlines()
    assert lines[0] == "CONFLICTING  Ann has a cat."
    assert lines[1].startswith("    without any source it loses 12.0 nats; without what 'cat' rests on, ")
    assert f"needed: {sentence(0)!r}; without it -12.00 nats, with it alone 100%" in lines[2]
    assert lines[3].startswith(f"    against: {sentence(3)!r}; makes ")
    assert lines[3].endswith(" more probable by 6.00 nats")
    assert lines[4] == "REDUNDANT  Ben sees the animal."
    enough = [line for line in lines if "one is enough" in line]
    assert {name for name in (sentence(1), sentence(2)) for line in enough if repr(name) in line} == {
        sentence(1),
        sentence(2),
    }
    # A sum of losses may be a zero below zero.
    assert all(line.endswith("0.00 nats, with it alone 100%") for line in enough)
    assert lines[-3] == "FROM MEMORY  The man is old."
    assert lines[-1].startswith(f"{found.passes} forward passes without sources; ")
    assert lines[-1].endswith(f"kept in all of them: {planted.QUESTION!r}")
    assert all(claim.span.text.strip() in found._repr_html_() for claim in found)


def test_its_markdown(found):
    lines = found.to_markdown().splitlines()
    assert lines[0] == "- **conflicting**: Ann has a cat."
    assert lines[1].startswith("  without any source it loses 12.0 nats")
    assert lines[2].startswith("  - '")
    starts = [line.split(":")[0] for line in lines if line.startswith("- ")]
    assert starts == ["- **conflicting**", "- **redundant**", "- **from memory**"]
    assert lines[-2] == ""
    assert lines[-1] == repr(found).splitlines()[-1]


COLUMNS = [
    "claim",
    "verdict",
    "reason",
    "probability",
    "loss_without_all",
    "probability_without_all",
    "source",
    "name",
    "role",
    "loss",
    "probability_without",
    "sufficient",
    "instead",
]


def test_its_table(found):
    table = found.to_dataframe()
    assert list(table.columns) == COLUMNS
    rows = {(row["claim"].strip(), row["source"]): row for row in table.to_dict("records")}
    assert len(rows) == len(table)
    first, second, third = (claim.span.text.strip() for claim in found)
    needed, against = rows[first, sentence(0)], rows[first, sentence(3)]
    assert (needed["role"], against["role"]) == ("needed", "against")
    assert (needed["verdict"], needed["reason"]) == ("conflicting", "")
    assert needed["loss"] == needed["loss_without_all"] == pytest.approx(12)
    assert needed["probability_without"] == pytest.approx(found[0].alone[0].probability)
    assert needed["sufficient"] == pytest.approx(1)
    assert needed["instead"] == found[0].grounds[0].instead
    assert against["instead"] == found[0].against[0].instead
    assert math.isnan(against["sufficient"])
    assert {row["role"] for (claim, _), row in rows.items() if claim == second} == {"one is enough", "other"}
    assert rows[second, sentence(1)]["loss"] == pytest.approx(0)
    # A claim without sources has one row.
    empty = rows[third, ""]
    assert (empty["name"], empty["role"], empty["instead"]) == ("", "", "")
    assert all(math.isnan(empty[name]) for name in ("loss", "probability_without", "sufficient"))
    assert table["probability"].tolist() == [
        next(claim.span.probability for claim in found if claim.span.text == text) for text in table["claim"]
    ]


def test_its_table_of_claims(found):
    table = found.to_dataframe(per="claim")
    assert list(table.columns) == [*COLUMNS[:6], "rests_on", "against"]
    assert table["verdict"].tolist() == [claim.verdict for claim in found]
    assert table["rests_on"].tolist()[0] == repr(sentence(0))
    assert sorted(table["rests_on"].tolist()[1].split("; ")) == [repr(sentence(1)), repr(sentence(2))]
    assert table["against"].tolist() == [repr(sentence(3)), "", ""]
    with pytest.raises(ValueError, match="per: expected 'source' or 'claim', got 'token'"):
        found.to_dataframe(per="token")


def test_how_often_a_verdict_is_right(found, monkeypatch):
    fact = next(iter(_read_facts().values()))
    facts = {"redundant": [dataclasses.replace(fact, value=0.9, n=20, cases="claims", model="a model")]}
    monkeypatch.setattr("lens_mix.traces.audit.precision_of", lambda verdict: facts.get(verdict, []))
    assert set(found.precision) == set(VERDICTS) - {"unclear"}
    assert repr(found).splitlines()[-1] == "redundant is right in planted claims: 90% of 20 claims (a model)"
    assert found.to_markdown().splitlines()[-1] == repr(found).splitlines()[-1]
    (record,) = json.loads(found.to_json())["precision"]["redundant"]
    assert (record["value"], record["n"], record["model"]) == (0.9, 20, "a model")


def test_an_audit_in_steps():
    t = lm.trace(planted.model_of(), TEXT, answer=ANSWER, method="attention")
    seen = []
    for audit in audit_in_steps(t):
        seen.append(len(audit))
        assert t.computed_audit is None
    assert seen == [0, 1, 2]
    assert t.computed_audit is audit
    assert repr(t.audit()) == repr(audit)
    # Whoever stops leaves the last audit.
    last = t.computed_audit
    next(audit_in_steps(t))
    assert t.computed_audit is last


def test_its_json(found):
    record = json.loads(found.to_json())
    assert set(record) == {"model", "method", "written", "passes", "kept", "precision", "claims"}
    assert record["written"] == TWO
    assert record["passes"] == found.passes
    assert record["method"] == found.trace.method_name
    assert [each["text"] for each in record["kept"]] == [planted.QUESTION]
    for own, claim in zip(record["claims"], found, strict=True):
        # Every attribute of a claim is in it.
        assert own["text"] == claim.span.text
        assert own["tokens"] == [claim.span.start, claim.span.stop]
        assert (own["verdict"], own["reason"], own["follows"]) == (claim.verdict, claim.reason, None)
        assert own["log_probability"] == pytest.approx(claim.span.log_probability)
        assert own["decisive"] == list(claim.decisive)
        without = own["without_all"]
        assert (without["loss"], without["probability"]) == (claim.memory.loss, claim.memory.probability)
        assert [each["text"] for each in without["sources"]] == [each.text for each in claim.memory.sources]
        for ground, expected in zip(own["grounds"], claim.grounds, strict=True):
            assert [each["text"] for each in ground["sources"]] == [each.text for each in expected.sources]
            assert ground["tokens"] == list(expected.tokens)
            assert ground["sufficient"] == pytest.approx(list(expected.shares))
            assert {name: ground[name] for name in ("text", "loss", "instead")} == {
                name: getattr(expected, name) for name in ("text", "loss", "instead")
            }
        for removal, expected in zip(own["alone"], claim.alone, strict=True):
            assert removal["sources"][0]["positions"] == list(expected.sources[0].positions)
            assert (removal["loss"], removal["probability"]) == (expected.loss, expected.probability)
        for against, expected in zip(own["against"], claim.against, strict=True):
            assert [each["text"] for each in against["sources"]] == [each.text for each in expected.sources]
            fields = ("token", "instead", "support", "margin")
            assert [against[name] for name in fields] == [getattr(expected, name) for name in fields]


def test_its_json_without_a_number(found):
    """Check that a loss that was not measured is null, because JSON has no nan."""
    memory = found[0].memory._replace(loss=math.nan, probability=math.nan)
    claim = dataclasses.replace(found[0], memory=memory)

    def refuse(text):
        raise AssertionError(text)

    record = json.loads(lm.Audit(found.trace, [claim]).to_json(), parse_constant=refuse)
    assert record["claims"][0]["without_all"] is None


def test_a_claim_that_follows_another_one_in_its_outputs(monkeypatch):
    words = [Word("cat. So", {(0,): 12.0}), Word("cat sees", {(0, 1, 2, 3, 4): 9.0})]
    audit = audit_planted(monkeypatch, trace_of(4, " Ann has a cat. So the cat sees Ben."), words)
    assert "it repeats what the answer says before: 'Ann has a cat.'" in repr(audit)
    record = json.loads(audit.to_json())
    assert record["claims"][1]["follows"].strip() == "Ann has a cat."
    table = audit.to_dataframe()
    second = table[table["claim"] == audit[1].span.text]
    assert second["source"].tolist()[0] == sentence(0)


def test_its_page_is_that_of_the_trace(found, monkeypatch):
    monkeypatch.setattr(lm.Trace, "show", lambda t: t)
    assert found.show() is found.trace
