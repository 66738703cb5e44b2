"""Test context length probing against cut prompts, and its errors."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix.hooks import zero_values
from lens_mix.methods import context_length
from lens_mix.methods.context_length import gains
from lens_mix.methods.side_by_side import run_rows
from tests.matrix import build_or_skip, cases, prompt_of
from tests.methods.passes import SHARED
from tests.methods.test_occlusion import at_tokens, log_probabilities
from tests.tiny_models import bridge


def run_alone(monkeypatch, *args, **options):
    """Return the map for which each context is a prompt of its own, which is the definition."""
    with monkeypatch.context() as patched:
        patched.setattr(context_length, "rows_beside_copies", lambda bound: [])
        return lm.run(*args, progress=None, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("case", cases(refused=False), ids=lambda case: case.label)
def test_contexts_in_rows_equal_prompts_of_their_own(case, kept, monkeypatch):
    model, method = case.build(torch.float64), lm.ContextLength(keep_first=kept)
    prompt = prompt_of(model)
    try:
        found = lm.run(model, prompt, method, part=case.part, progress=None).scores
    except lm.UnsupportedModelError:
        return
    expected = run_alone(monkeypatch, model, prompt, method, part=case.part).scores
    # Hugging Face's RMSNorms and softmaxes are float32 in any dtype.
    torch.testing.assert_close(found, expected, atol=1e-10 if "gpt2" in case.label else 1e-6, rtol=0)


@pytest.mark.parametrize("name", SHARED)
def test_rows_have_few_places_left(name, count_tokens, monkeypatch):
    model, tokens = build_or_skip(bridge, name), torch.arange(3, 15)
    lm.run(model, tokens, "attention")
    count_tokens()
    found = lm.run(model, tokens, lm.ContextLength(keep_first=False), progress=None).scores
    # The clean pass, its logits, contexts of 1 to 11 tokens, and the two tokens of the control.
    needed = 2 * 12 + 11 * 12 / 2 + 2
    assert needed <= count_tokens() < needed + 13
    expected = run_alone(monkeypatch, model, tokens, lm.ContextLength(keep_first=False)).scores
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("queries", [None, [4], [2, -1]])
@pytest.mark.parametrize("hooked", [False, True])
def test_rows_hooks_and_memory(queries, hooked, monkeypatch):
    """A user hook on a position would act on other tokens of a row."""
    model = build_or_skip(bridge, "gpt2", torch.float64)
    prompts = [prompt_of(model, length, length).flatten() for length in (9, 7)]
    hooks = [zero_values(0, 0)] if hooked else []
    with model.hooks(fwd_hooks=hooks):
        for max_memory in (None, 10**6, 3 * 10**5):
            options = {"queries": queries, "max_memory": max_memory, "progress": None}
            found = list(lm.run_many(model, prompts, "context_length", **options))
            with monkeypatch.context() as patched:
                patched.setattr(context_length, "rows_beside_copies", lambda bound: [])
                expected = list(lm.run_many(model, prompts, "context_length", **options))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.scores, other.scores, atol=1e-10, rtol=0)


def test_contexts_that_see_more_than_they_may_run_alone(monkeypatch):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    tokens = prompt_of(model).flatten()
    expected = lm.run(model, tokens, "context_length").scores

    def leaking(first, tokens, positions, allowed, *args):
        return run_rows(first, tokens, positions, torch.ones_like(allowed), *args)

    monkeypatch.setattr(context_length, "run_rows", leaking)
    torch.testing.assert_close(lm.run(model, tokens, "context_length").scores, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bloom"])
@pytest.mark.parametrize("kept", [0, 1])
def test_against_the_wrapped_model(name, kept):
    model = build_or_skip(bridge, name, torch.float64)
    tokens = prompt_of(model).flatten()
    count = len(tokens)
    clean = log_probabilities(model, tokens)
    predicted = clean.argmax(-1)
    values = torch.zeros(count, count, dtype=torch.float64)  # The axes are [query, start].
    for start in range(kept, count):
        cut = log_probabilities(model, torch.cat([tokens[:kept], tokens[start:]]))[kept:]
        values[start:, start] = at_tokens(cut, predicted[start:])
    expected = torch.zeros(count, count, dtype=torch.float64)
    expected[:, kept:-1] = gains(values)[:, kept:]
    expected = expected.tril(-1)
    assert expected[-1, 2] == values[-1, 2] - values[-1, 3]
    m = lm.run(model, tokens, lm.ContextLength(keep_first=bool(kept)))
    torch.testing.assert_close(m.scores[0], expected, atol=1e-6, rtol=0)
    rows = lm.run(model, tokens, lm.ContextLength(keep_first=bool(kept)), queries=[-1], max_memory=10**6)
    torch.testing.assert_close(rows.scores[0, 0], expected[-1], atol=1e-6, rtol=0)


def test_a_row_sums_to_what_the_context_is_worth():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    tokens = prompt_of(model).flatten()
    row = lm.run(model, tokens, lm.ContextLength(keep_first=False), queries=[-1]).scores[0, 0]
    whole = log_probabilities(model, tokens)[-1]
    alone = log_probabilities(model, tokens[-1:])[-1]
    answer = int(whole.argmax())
    torch.testing.assert_close(row.sum(), whole[answer] - alone[answer], atol=1e-6, rtol=0)


@pytest.mark.parametrize("query", [0, 1])
def test_rows_with_nothing_to_cut_before_them(query):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    row = lm.run(model, prompt_of(model).flatten(), lm.ContextLength(keep_first=True), queries=[query])
    assert not row.scores.any()


def test_encoders_are_refused():
    model = build_or_skip(bridge, "bert", torch.float64)
    with pytest.raises(lm.UnsupportedModelError, match="expected a causal model"):
        lm.run(model, prompt_of(model), "context_length")
    assert "expected a causal model" in lm.support(model)["context_length"]


def test_batches():
    model = build_or_skip(bridge, "llama", torch.float64)
    prompts = [prompt_of(model, length, seed) for length, seed in ((7, 1), (4, 2), (1, 3))]
    for prompt, together in zip(prompts, lm.run_many(model, prompts, "context_length"), strict=True):
        alone = lm.run(model, prompt, "context_length")
        torch.testing.assert_close(together.scores, alone.scores, atol=1e-6, rtol=0)


def test_a_target_of_the_positions_that_are_cut_is_refused():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    method = lm.ContextLength(target=lm.targets.loss())
    with pytest.raises(ValueError, match="expected a target that reads only the row's position"):
        lm.run(model, prompt_of(model).flatten(), method, queries=[-1])
    target = lm.targets.head(lambda resid: resid[:, -1, 0])
    found = lm.run(model, prompt_of(model).flatten(), lm.ContextLength(target=target), queries=[-1])
    assert found.scores[0, 0, :-1].abs().min() > 0


def test_keep_first_is_yes_or_no():
    with pytest.raises(TypeError, match="keep_first"):
        lm.ContextLength(keep_first="yes")
