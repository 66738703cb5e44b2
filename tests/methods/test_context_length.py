"""Test context length probing against cut prompts, and its errors."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix.hooks import zero_values
from lens_mix.methods.context_length import gains
from tests.matrix import build_or_skip, prompt_of
from tests.methods.test_occlusion import at_tokens, log_probabilities
from tests.tiny_models import bridge


@pytest.mark.parametrize("queries", [[4], [2, -1]])
def test_rows_hooks_and_memory(queries):
    """A user hook on a position acts on that position of each context."""
    model = build_or_skip(bridge, "gpt2", torch.float64)
    prompts = [prompt_of(model, length, length).flatten() for length in (9, 7)]
    hooks = [zero_values(0, 0)]
    with model.hooks(fwd_hooks=hooks):
        whole = [lm.run(model, prompt, "context_length", progress=None).scores for prompt in prompts]
        for max_memory in (None, 10**6, 3 * 10**5):
            options = {"queries": queries, "max_memory": max_memory, "progress": None}
            for found, expected in zip(
                lm.run_many(model, prompts, "context_length", **options), whole, strict=True
            ):
                torch.testing.assert_close(found.scores, expected[:, queries], atol=1e-10, rtol=0)


def test_contexts_end_at_the_last_row(count_tokens):
    model, tokens = build_or_skip(bridge, "gpt2"), torch.arange(3, 15)
    lm.run(model, tokens, "attention")
    count_tokens()
    lm.run(model, tokens, lm.methods.ContextLength(keep_first=False), queries=[3], progress=None)
    # The clean pass, its prediction, and four contexts of at most four tokens.
    assert count_tokens() <= 2 * 12 + 4 * 4


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
    m = lm.run(model, tokens, lm.methods.ContextLength(keep_first=bool(kept)))
    torch.testing.assert_close(m.scores[0], expected, atol=1e-6, rtol=0)
    rows = lm.run(
        model, tokens, lm.methods.ContextLength(keep_first=bool(kept)), queries=[-1], max_memory=10**6
    )
    torch.testing.assert_close(rows.scores[0, 0], expected[-1], atol=1e-6, rtol=0)


def test_a_row_sums_to_what_the_context_is_worth():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    tokens = prompt_of(model).flatten()
    row = lm.run(model, tokens, lm.methods.ContextLength(keep_first=False), queries=[-1]).scores[0, 0]
    whole = log_probabilities(model, tokens)[-1]
    alone = log_probabilities(model, tokens[-1:])[-1]
    answer = int(whole.argmax())
    torch.testing.assert_close(row.sum(), whole[answer] - alone[answer], atol=1e-6, rtol=0)


@pytest.mark.parametrize("query", [0, 1])
def test_rows_with_nothing_to_cut_before_them(query):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    row = lm.run(
        model, prompt_of(model).flatten(), lm.methods.ContextLength(keep_first=True), queries=[query]
    )
    assert not row.scores.any()


def test_encoders_are_refused():
    model = build_or_skip(bridge, "bert", torch.float64)
    with pytest.raises(lm.UnsupportedModelError, match="expected a causal model"):
        lm.run(model, prompt_of(model), "context_length")
    assert "expected a causal model" in lm.support(model)["context_length"]


def test_a_target_of_the_positions_that_are_cut_is_refused():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    method = lm.methods.ContextLength(target=lm.targets.loss())
    with pytest.raises(ValueError, match="expected a target that reads only the row's position"):
        lm.run(model, prompt_of(model).flatten(), method, queries=[-1])
    target = lm.targets.head(lambda resid: resid[:, -1, 0])
    found = lm.run(model, prompt_of(model).flatten(), lm.methods.ContextLength(target=target), queries=[-1])
    assert found.scores[0, 0, :-1].abs().min() > 0


def test_keep_first_is_yes_or_no():
    with pytest.raises(TypeError, match="keep_first"):
        lm.methods.ContextLength(keep_first="yes")
