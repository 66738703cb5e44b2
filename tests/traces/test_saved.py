"""Test that saved traces are read as they were, with a model and without one, and what they cannot do."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from safetensors.torch import save_file

import lens_mix as lm
from tests.damage import damage_bytes, damage_tensors
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import available, bridge
from tests.traces.readers import PLAIN, reader

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = lm.Documents(
    {"report": "The company was founded in Oslo. It has 120 employees.", "press": "Critics 😀 liked it."},
    "Where?",
    "Use the documents.",
)
UNITS = ("token", "word", "sentence", "message", "document")


@functools.cache
def model_of():
    return reader(template=PLAIN)


def traced(**options):
    return lm.trace(model_of(), PROMPT, **{"answer": "In Oslo 😀. Yes.", **options})


def again(t, folder, model=None):
    t.save(folder / "one.trace")
    return lm.Trace.load(folder / "one.trace", model)


def require_equal(one, other):
    assert one.tokens == other.tokens
    assert one.n_prompt == other.n_prompt
    assert one.text == other.text
    assert one.unit == other.unit
    assert one.notes == other.notes
    assert one.explained == other.explained
    assert one.method_name == other.method_name
    assert dict(one.provenance) == dict(other.provenance)
    assert torch.equal(one.log_probabilities, other.log_probabilities)
    assert torch.equal(one.reading.ids, other.reading.ids)
    for unit in UNITS:
        assert one.sources(unit) == other.sources(unit)
    assert repr(one) == repr(other)
    assert one.top(9) == other.top(9)
    assert [span.text for span in one.spans] == [span.text for span in other.spans]


def test_what_is_read_without_a_model(tmp_path):
    t = traced(generate=9, answer=None)
    spans = [span.top(9) for span in t.spans]
    part = t[1:3].top(9)
    steps, through, table = t.steps, t.through().top(9), t.to_dataframe()
    read = again(t, tmp_path)
    require_equal(t, read)
    assert read.model is None
    assert [span.top(9) for span in read.spans] == spans
    assert read[1:3].top(9) == part
    assert torch.equal(read.steps.scores, steps.scores)
    assert read.steps.explained == steps.explained
    assert read.through().top(9) == through
    # These are computed from the rows.
    assert read.through(1).top(9) == t.through(1).top(9)
    assert read.context_share().equals(t.context_share())
    assert read.to_dataframe().equals(table)
    assert read.by("document").top(9) == t.by("document").top(9)
    assert torch.equal(read[1:3].map.scores, t[1:3].map.scores)
    require_equal(t, again(read, tmp_path))


def test_what_needs_the_model(tmp_path):
    read = again(traced(), tmp_path)
    for function in (
        lambda: read[1:3].top(),
        lambda: read.steps,
        lambda: read.through(),
        lambda: read.context_share(),
        lambda: read.verify(),
    ):
        with pytest.raises(
            ValueError, match=r"trace: expected a trace with its model.*lm\.Trace\.load\(path, model\)"
        ):
            function()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "attention", "aggregation": "rollout"},
        {"method": lm.methods.InputGradients(score="times_input")},
    ],
)
def test_with_the_model_everything_can_be_computed(tmp_path, options):
    t = traced(**options)
    read = again(t, tmp_path, model_of())
    torch.testing.assert_close(read[1:3].scores, t[1:3].scores, atol=1e-12, rtol=0)
    torch.testing.assert_close(read.steps.scores, t.steps.scores, atol=1e-12, rtol=0)
    assert read.verify(9) == t.verify(9)
    assert dict(read.parameters) == dict(t.parameters) or options
    torch.testing.assert_close(read.through()[:].scores, t.through()[:].scores, atol=1e-12, rtol=0)


@pytest.mark.skipif(not available(bridge, "gpt2"), reason="no TransformerBridge in this TransformerLens")
def test_a_trace_with_the_name_that_a_method_had_before(tmp_path):
    t = traced(method=lm.methods.TokenPatching(n_exact=1, n_samples=1), answer="In Oslo.")
    read = again(dataclasses.replace(t, method_name="attribution_patching"), tmp_path, model_of())
    torch.testing.assert_close(read[1:3].scores, t[1:3].scores, atol=1e-12, rtol=0)


def test_a_through_trace(tmp_path):
    t = traced().through(1)
    read = again(t, tmp_path)
    assert read.hops == t.hops == 1
    require_equal(t, read)
    assert torch.equal(read.steps.scores, t.steps.scores)
    assert read[0].top(9) == t[0].top(9)
    assert read.through(0).top(9) == t.through(0).top(9)


def test_groups_of_the_users(tmp_path):
    t = traced(sources={"city": "Oslo", "size": ["120", "employees"]})
    read = again(t, tmp_path)
    assert read.unit == "given"
    assert read.sources() == t.sources()
    assert read.top(9) == t.top(9)
    assert read.by("sentence").by("given").top(9) == t.top(9)
    with pytest.raises(ValueError, match="unit: expected one of the others"):
        again(traced(), tmp_path).by("given")


def test_sentences_of_the_users(tmp_path):
    t = traced(sources=lambda text: [(0, len(text) // 2), (len(text) // 2, len(text))])
    assert again(t, tmp_path).sources() == t.sources()


def test_prompts_as_tokens(tmp_path):
    t = lm.trace(
        model_of(), torch.tensor([1, 30, 40, 50]), answer=[60, 70], sources="token", method="attention"
    )
    read = again(t, tmp_path)
    assert read.sources() == t.sources()
    assert read.top(9) == t.top(9)
    assert read.text == t.text
    with pytest.raises(ValueError, match="sources: expected 'token', 'word' or groups"):
        read.by("sentence")


def test_an_encoder_decoder(tmp_path):
    model = build_or_skip(bridge, "bart", torch.float64)
    source, target = prompt_of(model)
    t = lm.trace(model, source, answer=target, sources="token")
    read = again(t, tmp_path, model)
    assert read.sources() == t.sources()
    torch.testing.assert_close(read.steps.scores, t.steps.scores, atol=1e-12, rtol=0)
    assert read.verify(2) == t.verify(2)
    assert read.steps.key_tokens == t.steps.key_tokens


def test_an_aggregation_of_the_users_is_not_in_the_file(tmp_path):
    t = traced(method="attention", aggregation=lambda m: m.layer(0).replace(kind="input"))
    read = again(t, tmp_path, model_of())
    assert read.top(9) == t.top(9)
    assert read.verify(1) == t.verify(1)
    with pytest.raises(
        ValueError, match=r"trace: expected scores .* does not describe 'attention, function <lambda>'"
    ):
        read[1:3].top()


def test_a_function_is_not_replaced_by_the_aggregation_of_its_name(tmp_path):
    def rollout(layer_maps):
        return lm.layer_mean(layer_maps)

    read = again(traced(method="attention", aggregation=rollout), tmp_path, model_of())
    with pytest.raises(ValueError, match=r"does not describe 'attention, function rollout'"):
        read[1:3].top()


def test_another_model_is_refused(tmp_path):
    t = traced()
    t.save(tmp_path / "one.trace")
    with pytest.raises(ValueError, match="model: expected the model of the trace, got one whose log prob"):
        lm.Trace.load(tmp_path / "one.trace", reader(template=PLAIN, seed=5))


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("missing.trace", FileNotFoundError, "path: expected a file that exists"),
        ("", ValueError, "path: expected the path of a file"),
        (3, TypeError, "path: expected a path, got 3"),
        (None, TypeError, "path: expected a path"),
    ],
)
def test_wrong_paths(path, error, message):
    with pytest.raises(error, match=message):
        lm.Trace.load(path)


def test_other_files(tmp_path):
    path = tmp_path / "text"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"path: expected a trace that Trace\.save wrote, got"):
        lm.Trace.load(path)
    lm.run(model_of(), torch.tensor([30, 40]), "attention").save(path)
    with pytest.raises(ValueError, match=r"path: expected a trace .* got format 'lens_mix"):
        lm.Trace.load(path)
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"path: expected a trace .* got format None"):
        lm.Trace.load(path)
    for record in ("{}", "no json", "[]"):
        save_file({"a": torch.ones(2)}, path, metadata={"format": "lens_mix.Trace/1", "record": record})
        with pytest.raises(ValueError, match=r"path: expected a trace that Trace\.save wrote"):
            lm.Trace.load(path)
    for wrong in (tmp_path, tmp_path / "none" / "one.trace", 3, None, ""):
        with pytest.raises((TypeError, ValueError, FileNotFoundError), match="path: expected"):
            traced().save(wrong)


def test_nothing_is_written_if_it_cannot_be(tmp_path):
    t = traced()
    path = tmp_path / "one.trace"
    t.save(path)
    before = path.read_bytes()
    t.provenance["own"] = object()
    with pytest.raises(TypeError):
        t.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_file_is_an_error_when_it_is_opened(tmp_path):
    t = traced(answer="In Oslo.")
    assert t.spans[0].top(9)
    assert t.steps
    t.verify(1)
    path, bad = tmp_path / "one.trace", tmp_path / "bad.trace"
    t.save(path)
    tried = refused = 0

    def check(name):
        nonlocal tried, refused
        tried += 1
        try:
            read = lm.Trace.load(bad)
        except ValueError as problem:
            assert str(problem).startswith("path: expected a trace that Trace.save wrote"), name
            refused += 1
        else:
            require_equal(t, read)
            assert torch.equal(read.steps.scores, t.steps.scores), name

    for name, content in damage_bytes(path.read_bytes(), count=200):
        bad.write_bytes(content)
        check(name)
    for name in damage_tensors(path, bad):
        check(name)
    assert tried > 200
    assert refused > 0.95 * tried
