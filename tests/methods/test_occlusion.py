from __future__ import annotations

import inspect

import pytest
import torch

import lens_mix as lm
from lens_mix.hooks import zero_values
from tests import tiny_models
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import bridge, hooked_encoder, hooked_transformer

NAMES = ("gpt2", "llama", "gemma2", "opt", "bert", "bloom", "gpt_neox")


def log_probabilities(model, tokens, **inputs):
    """The wrapped model of transformers on its own."""
    wrapped = model.original_model
    wrapped.set_attn_implementation("eager")
    with torch.no_grad():
        return wrapped(tokens[None], **inputs).logits[0].log_softmax(-1)


def at_tokens(log_p, tokens):
    return log_p.gather(-1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("name", NAMES)
def test_replaced_tokens_against_the_wrapped_model(name):
    model = build_or_skip(bridge, name, torch.float64)
    tokens = prompt_of(model).flatten()
    tokens[2] = 3  # one replacement is the token itself: the next number serves
    clean = log_probabilities(model, tokens)
    predicted = clean.argmax(-1)
    expected, divergence = torch.zeros(2, len(tokens), len(tokens), dtype=torch.float64)
    for position in range(len(tokens)):
        for token in (3, 5):
            other = tokens.clone()
            other[position] = token + 1 if tokens[position] == token else token
            changed = log_probabilities(model, other)
            expected[:, position] += (at_tokens(clean, predicted) - at_tokens(changed, predicted)).abs() / 2
            divergence[:, position] += (clean.exp() * (clean - changed)).sum(-1) / 2
    found = lm.run(model, tokens, lm.Occlusion(replacements=[3, 5], measure="absolute"))
    torch.testing.assert_close(found.scores[0], expected, atol=1e-6, rtol=0)
    found = lm.run(model, tokens, lm.Occlusion(replacements=[3, 5], measure="kl"))
    torch.testing.assert_close(found.scores[0], divergence, atol=1e-6, rtol=0)


# Not BLOOM: it counts positions by its mask.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "bloom"])
def test_hidden_tokens_against_the_wrapped_models_mask(name):
    # Its rows that see nothing are NaN in float64.
    model = build_or_skip(bridge, name)
    tokens = prompt_of(model).flatten()
    positions = torch.arange(len(tokens))[None]
    parameters = inspect.signature(type(model.original_model).forward).parameters
    inputs = {"position_ids": positions} if "position_ids" in parameters else {}
    clean = log_probabilities(model, tokens)
    predicted, columns = clean.argmax(-1), []
    for position in range(len(tokens)):
        mask = (positions != position).long()
        changed = log_probabilities(model, tokens, attention_mask=mask, **inputs)
        columns.append(at_tokens(clean, predicted) - at_tokens(changed, predicted))
    expected = torch.stack(columns, -1)
    if name != "bert":
        expected[0, 0] = 0  # nothing else is left to see
    found = lm.run(model, tokens, lm.Occlusion(by="mask")).scores[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("build", [hooked_encoder, lambda dtype: hooked_transformer("LN", dtype)])
def test_value_zeroing_through_the_whole_stack(build):
    try:
        model = build(torch.float64)
    except tiny_models.Unavailable as problem:
        pytest.skip(str(problem))
    tokens = prompt_of(model).flatten()
    m = lm.run(model, tokens, lm.Occlusion(by="values"))
    with torch.no_grad():
        clean = model(tokens[None])[0].log_softmax(-1)
        predicted = clean.argmax(-1)
        for position in range(len(tokens)):
            hooks = [zero_values(layer, position) for layer in range(model.cfg.n_layers)]
            changed = model.run_with_hooks(tokens[None], fwd_hooks=hooks)[0].log_softmax(-1)
            expected = at_tokens(clean, predicted) - at_tokens(changed, predicted)
            torch.testing.assert_close(m.scores[0, :, position], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("method", [lm.Occlusion(by=by) for by in ("replace", "mask", "values")])
def test_rows_and_batches(method):
    model = build_or_skip(bridge, "llama", torch.float64)
    prompts = [prompt_of(model, length, seed) for length, seed in ((7, 1), (4, 2), (6, 3))]
    alone = [lm.run(model, prompt, method) for prompt in prompts]
    for prompt, whole in zip(prompts, alone, strict=True):
        cut = lm.run(model, prompt, method, queries=[-1, 1], max_memory=10**6)
        assert cut.layers == [model.cfg.n_layers - 1]
        torch.testing.assert_close(cut.scores[0], whole.scores[0, [-1, 1]], atol=1e-10, rtol=0)
    for together, one in zip(lm.run_many(model, prompts, method), alone, strict=True):
        torch.testing.assert_close(together.scores, one.scores, atol=1e-6, rtol=0)


def test_drawn_replacements_are_seeded():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    tokens = prompt_of(model)
    first, again = (lm.run(model, tokens, lm.Occlusion(seed=1)).scores for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, lm.run(model, tokens, lm.Occlusion(seed=2)).scores)


def test_a_target_of_the_users_explains_one_row():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    tokens = prompt_of(model)

    def second_token(logits):
        return logits[:, -1, 2]

    with pytest.raises(ValueError, match="expected one row"):
        lm.run(model, tokens, lm.Occlusion(target=second_token))
    found = lm.run(model, tokens, lm.Occlusion(target=second_token, replacements=[4]), queries=[-1])
    named = lm.Occlusion(target=lm.targets.logit(2), replacements=[4])
    torch.testing.assert_close(found.scores, lm.run(model, tokens, named, queries=[-1]).scores)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"by": "drop"}, "by: expected 'replace'"),
        ({"measure": "squared"}, "measure: expected 'difference'"),
        ({"replacements": [1], "by": "mask"}, "for by='replace' only"),
        ({"replacements": []}, "replacements"),
        ({"n_samples": 0}, "n_samples"),
        ({"measure": "kl", "target": lm.targets.head(lambda resid: resid[:, 0, 0])}, "'kl' compares"),
    ],
)
def test_bad_options(options, error):
    with pytest.raises(ValueError, match=error):
        lm.Occlusion(**options)


def test_replacements_that_the_model_does_not_know():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    with pytest.raises(ValueError, match="replacements: expected"):
        lm.run(model, prompt_of(model), lm.Occlusion(replacements=[10**6]))


def test_one_token():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    tokens = prompt_of(model, 1)
    assert lm.run(model, tokens, lm.Occlusion(by="mask")).scores.tolist() == [[[0.0]]]
    assert float(lm.run(model, tokens, lm.Occlusion(measure="absolute")).scores) > 0
