"""A target that reads one position gets the logits of this position alone, with the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from lens_mix.lens.clean_pass import CleanPass
from lens_mix.methods import bound_target
from lens_mix.targets import Context
from tests.tiny_models import gpt2_like, tokens

TARGETS = [
    lm.targets.predicted(position=2),
    lm.targets.token(5, position=-2, of="logit"),
    lm.targets.logit_difference(5, 6, position=1),
    lm.targets.next_token(position=3),
    lm.targets.loss(label=4, position=0),
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: type(target).__name__)
def test_the_logits_of_one_position_are_enough(target: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, dtype=torch.float64, generator=generator)
    context = Context(torch.arange(7), logits[:1])
    function, position = target.of_prompt(context), target.reads_position(context)
    assert torch.equal(function(logits[:, position, None]), function(logits))


@pytest.mark.parametrize("target", TARGETS[:4], ids=lambda target: type(target).__name__)
@pytest.mark.parametrize("queries", [[3], [-2]])
def test_a_single_row_reads_the_logits_of_the_clean_pass(
    monkeypatch: pytest.MonkeyPatch, target: Any, queries: list[int]
) -> None:
    model = gpt2_like(torch.float64)
    prompts, methods = list(tokens(model, 2, 7)), [lm.Gim(target), lm.Occlusion(target=target)]
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


@pytest.mark.parametrize(
    "method",
    [
        lm.InputGradients(score="integrated", n_steps=3),
        lm.AttentionAttribution(n_steps=3),
        lm.Occlusion(by="mask"),
        lm.Gim(),
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
