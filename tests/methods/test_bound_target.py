"""A target that reads one position gets the logits of this position alone, with the same values."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import lens_mix as lm
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._passes.clean_pass import CleanPass
from lens_mix.methods import bound_target
from lens_mix.targets import Context
from tests.test_classifiers import classifier_of
from tests.tiny_models import available, bridge, gpt2_like, tokens

TARGETS = [
    lm.targets.predicted(position=2),
    lm.targets.token(5, position=-2, of="logit"),
    lm.targets.logit_difference(5, 6, position=1),
    lm.targets.next_token(position=3),
    lm.targets.loss(label=4, position=0),
]
UNPLACED = [dataclasses.replace(target, position=None) for target in TARGETS[:4]]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: type(target).__name__)
def test_the_logits_of_one_position_are_enough(target: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, dtype=torch.float64, generator=generator)
    context = Context(torch.arange(7), logits[:1])
    function, position = target.of_prompt(context), target.reads_position(context)
    assert torch.equal(function(logits[:, position, None]), function(logits))


@pytest.mark.parametrize("target", UNPLACED, ids=lambda target: type(target).__name__)
@pytest.mark.parametrize("queries", [[3], [-2]])
def test_a_single_row_reads_the_logits_of_the_clean_pass(
    monkeypatch: pytest.MonkeyPatch, target: Any, queries: list[int]
) -> None:
    model = gpt2_like(torch.float64)
    prompts, methods = (
        list(tokens(model, 2, 7)),
        [lm.methods.Gim(target), lm.methods.Occlusion(target=target)],
    )
    assert target.reads_row_alone

    def run_each() -> list[Any]:
        alone = [lm.run(model, prompts[0], methods, queries=queries, progress=None)]
        return alone + list(lm.run_many(model, prompts, methods, queries=queries, progress=None))

    made: list[str] = []
    original = bound_target.read_output
    monkeypatch.setattr(
        bound_target, "read_output", lambda *args, **options: made.append("") or original(*args, **options)
    )
    found = run_each()
    with_kept = len(made)
    monkeypatch.setattr(CleanPass, "logits_at", lambda clean, positions: None)
    for one, other in zip(found, run_each(), strict=True):
        for name, expected in other.items():
            torch.testing.assert_close(one[name].scores, expected.scores, rtol=0, atol=1e-10)
            (row,), (expected_row,) = one[name].explained, expected.explained
            assert (row.target, row.prediction) == (expected_row.target, expected_row.prediction)
            assert row.value == pytest.approx(expected_row.value, abs=1e-10)
    assert len(made) - with_kept > with_kept


def methods_with(target: Any) -> list[Any]:
    """Return every built-in method that has a target, with this one; by hidden tokens, if it removes any."""
    others = {"attention_attribution": {"n_steps": 2}, "occlusion": {"by": "mask"}}
    classes = [each for each in lm.METHODS.values() if issubclass(each, bound_target.TargetMethod)]
    return [each(target=target, **others.get(each.name, {})) for each in classes]


def require_own_position(
    model: Any, prompt: torch.Tensor, target: Any, position: int, value: float, expect_all: bool
) -> None:
    """Require that every method explains the target's position, or says that another row was asked."""
    for method in methods_with(target):
        try:
            (entry,) = lm.run(model, prompt, method, queries=[position], progress=None).explained
        except UnsupportedModelError:
            assert not expect_all
            continue
        assert entry.value == pytest.approx(value, abs=1e-6)
        assert entry.target is not None
        assert entry.target.endswith(f" at position {position}")
        try:
            entries = lm.run(model, prompt, method, queries=[1, 2], progress=None).explained
        except ValueError as problem:
            expected = rf"{position}.*\(queries=\[{position}\]\), got the rows of positions 1, 2"
            assert re.search(rf"explains position {expected}", str(problem)), problem
            assert isinstance(method, bound_target.RowTargetMethod)
        else:
            assert not isinstance(method, bound_target.RowTargetMethod)
            assert [entry.value for entry in entries] == pytest.approx([value] * 2, abs=1e-6)
            assert all(f"at position {position}" in entry.target for entry in entries)


@pytest.mark.parametrize("position", [3, -2])
def test_every_method_explains_the_position_of_a_token_target(position: int) -> None:
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 7)[0]
    with torch.no_grad():
        logits = model(prompt[None])[0, position]
    place, best = position % 7, float(logits.max())
    targets = lm.targets
    for target, value in (
        (targets.logit(5, position), float(logits[5])),
        (targets.predicted(position, "logit"), best),
        (targets.logit_difference(5, 6, position), float(logits[5] - logits[6])),
        (targets.loss(4, position), -float(logits.log_softmax(-1)[4])),
        (targets.next_token(position), float(logits.log_softmax(-1)[prompt[place + 1]])),
        (targets.masked_token(5, position, "logit"), float(logits[5])),
    ):
        # Token patching needs a Bridge.
        require_own_position(model, prompt, target, place, value, expect_all=available(bridge, "gpt2"))


@pytest.mark.skipif(not available(bridge, "bert"), reason="no BERT in a Bridge here")
@pytest.mark.parametrize("position", [3, -2])
@pytest.mark.parametrize("kind", ["TokenClassification", "QuestionAnswering"])
def test_every_method_explains_the_position_of_a_classifiers_target(kind: str, position: int) -> None:
    classifier = classifier_of("bert", f"BertFor{kind}", labels=2 if kind == "QuestionAnswering" else 5)
    model, prompt = bridge("bert", torch.float64), torch.tensor([5, 9, 12, 7, 30, 21])
    with torch.no_grad():
        output = classifier(prompt[None])
    if kind == "QuestionAnswering":
        target = lm.targets.hf_classifier(classifier, "end", "logit", position)
        pairs = [(target, output.end_logits[0, position], "'end' (class 1)")]
    else:
        logits = output.logits[0, position]
        named = lm.targets.hf_classifier(classifier, 2, "logit", position)
        difference = lm.targets.class_difference(2, 1, classifier, position)
        pairs = [(named, logits[2], "'LABEL_2' (class 2)")]
        pairs += [(difference, logits[2] - logits[1], "(class 2) minus that of 'LABEL_1' (class 1)")]
    for target, value, label in pairs:
        require_own_position(model, prompt, target, position % 6, float(value), expect_all=False)
        found = lm.run(model, prompt, lm.methods.Gim(target=target), queries=[position], progress=None)
        assert f"{label} at position {position % 6}" in found.explained[0].target


@pytest.mark.skipif(not available(bridge, "bert"), reason="no BERT in a Bridge here")
def test_an_encoders_error_recommends_the_row_of_an_encoder() -> None:
    classifier = classifier_of("bert", "BertForSequenceClassification")
    target, prompt = lm.targets.hf_classifier(classifier, 1), torch.tensor([5, 9, 12, 7, 30, 21])
    for method in (
        lm.methods.Occlusion(target=target, by="mask"),
        lm.methods.InputGradients(target),
        lm.methods.Gim(target),
    ):
        with pytest.raises(ValueError, match=r"expected one row \(queries=\[0\]\), got 6 rows"):
            lm.run(bridge("bert", torch.float64), prompt, method, progress=None)


@pytest.mark.skipif(not available(bridge, "bert"), reason="no BERT in a Bridge here")
def test_without_a_position_an_answer_is_explained_where_the_classifier_finds_it() -> None:
    classifier = classifier_of("bert", "BertForQuestionAnswering", labels=2)
    model, prompt = bridge("bert", torch.float64), torch.tensor([5, 9, 12, 7, 30, 21])
    with torch.no_grad():
        logits = classifier(prompt[None]).start_logits[0]
    target, best = lm.targets.hf_classifier(classifier, "start", "logit"), int(logits.argmax())
    (entry,) = lm.run(model, prompt, lm.methods.InputGradients(target), queries=[(best + 1) % 6]).explained
    assert entry.value == pytest.approx(float(logits.max()), abs=1e-6)
    assert entry.target == f"logit of 'start' (class 0) at position {best}"
    stated = lm.targets.hf_classifier(classifier, "start", "logit", position=2)
    with pytest.raises(ValueError, match=r"position 2; expected .*, got the row of position 0$"):
        lm.run(model, prompt, lm.methods.InputGradients(stated), queries=[0])


@pytest.mark.parametrize(
    "method",
    [
        lm.methods.InputGradients(score="integrated", n_steps=3),
        lm.methods.AttentionAttribution(n_steps=3),
        lm.methods.Occlusion(by="mask"),
        lm.methods.Gim(),
    ],
    ids=lambda method: method.name,
)
def test_passes_compute_the_logits_of_one_position(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    model, shapes = gpt2_like(torch.float64), []
    prompt, evaluate = tokens(model, 1, 7)[0], bound_target.evaluate

    def watch(function: Any, output: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        shapes.append(output.shape[1])
        return evaluate(function, output, *others)

    narrow = lm.run(model, prompt, method, queries=[-1], progress=None)
    with monkeypatch.context() as patch:
        patch.setattr(bound_target, "evaluate", watch)
        lm.run(model, prompt, method, queries=[-1], progress=None)
    # The clean pass has computed all positions, and the passes of the method only one of them.
    assert 1 in shapes[1:]
    assert set(shapes[1:]) == {1}

    def reads_all(block: Any, target: Any, *args: Any, positions: Any = None, **options: Any) -> torch.Tensor:
        logits = original(block, target, *args, **options)
        return logits if positions is None else bound_target.row_at(logits, positions)

    original = bound_target.read_output
    monkeypatch.setattr(bound_target, "read_output", reads_all)
    whole = lm.run(model, prompt, method, queries=[-1], progress=None)
    torch.testing.assert_close(narrow.scores, whole.scores, rtol=0, atol=1e-10)
