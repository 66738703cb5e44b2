"""Test the routes of constructed models against interventions, cell by cell and token by token."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import lens_mix as lm
from lens_mix.experiments import constructed_models
from lens_mix.hooks import record, replace_pattern
from tests.shared_models import constructed

MODELS = constructed_models()
SAME = 1e-4  # Tracr's softmax leaves a weight of e^-25 for the other keys.
CHANGED = 0.02

every_model = pytest.mark.parametrize("built", MODELS.values(), ids=MODELS.keys())


def answers(model, prompts, at, hooks=()):
    """Return the logits at a position, without the scale of a norm, which depends on the whole stream."""
    with torch.no_grad():
        logits = model.run_with_hooks(prompts, fwd_hooks=list(hooks))[:, at]
    return logits if model.cfg.normalization_type is None else torch.nn.functional.normalize(logits, dim=-1)


def changes_without_cells(model, prompt, at, layer):
    """Return the change of the answer if the layer moves nothing from key to query, [query, key]."""
    length, name, store = len(prompt), f"blocks.{layer}.attn.hook_pattern", {}
    clean = answers(model, prompt[None], at, [record(store, name)])
    patterns = store[name].repeat(length * length, 1, 1, 1)
    for cell, pattern in enumerate(patterns):
        pattern[:, cell // length, cell % length] = 0
    edited = answers(model, prompt.expand(length * length, -1), at, [replace_pattern(layer, patterns)])
    return (edited - clean).abs().amax(-1).view(length, length)


@every_model
def test_zeroing_the_value_of_a_cell_changes_the_answer_where_the_truth_says_so(built):
    model = constructed(built)
    for prompt in built.prompts(seed=3, count=2):
        routes = built.routes(prompt)
        (at,) = routes.queries
        for layer, truth in enumerate(routes.layers):
            changes = changes_without_cells(model, prompt, at, layer)
            assert (changes[truth] > CHANGED).all(), (prompt, layer)
            assert (changes[~truth] < SAME).all(), (prompt, layer)


@every_model
def test_replacing_a_token_changes_the_answer_where_the_truth_says_so(built):
    model = constructed(built)
    for prompt in built.prompts(seed=4, count=3):
        routes = built.routes(prompt)
        (at,) = routes.queries
        clean = answers(model, prompt[None], at)
        for position, true in enumerate(routes.inputs[at]):
            tokens = built.replacements(prompt, position)
            others = prompt.repeat(len(tokens), 1)
            others[:, position] = torch.tensor(tokens, dtype=torch.long)
            # Keys that no other token may replace are not true inputs.
            changes = (answers(model, others, at) - clean).abs().amax() if tokens else 0
            assert changes > CHANGED if true else changes < SAME, (prompt, position)


@every_model
def test_every_prompt_can_be_replaced_somewhere_and_has_something_false(built):
    for prompt in built.prompts(seed=5, count=20):
        routes = built.routes(prompt)
        rows = routes.rows()
        assert any(built.replacements(prompt, position) for position in range(len(prompt)))
        assert routes.layers.any()
        assert not (routes.layers & ~rows[:, :, None]).any()  # Every true cell is in a row on the way.
        assert 0 < routes.inputs.sum() < len(prompt)
        assert all(int(prompt[at]) not in built.replacements(prompt, at) for at in range(len(prompt)))


@every_model
def test_the_lens_proves_it(built):
    assert lm.check(constructed(built), built.prompts(count=1)[0]).ok


@every_model
def test_it_says_what_it_describes(built):
    """Compute the prediction at the answer from the tokens alone."""
    model = constructed(built)
    for prompt in built.prompts(seed=6, count=4):
        (at,) = built.routes(prompt).queries
        with torch.no_grad():
            logits = model(prompt[None])[0, at]
        tokens = prompt.tolist()
        if built.name == "rasp_fraction":
            assert logits[0] == pytest.approx(tokens[1 : at + 1].count(1) / at, abs=1e-5)
        else:
            assert int(logits.argmax()) == expected(built.name, tokens)


def expected(name: str, tokens: list[int]) -> int:
    """Return the expected answer. Programs number answers from 0, without the first token."""
    if name == "rasp_reverse":
        return tokens[1] - 1
    if name == "rasp_histogram":
        return tokens.count(tokens[-1])
    if name == "rasp_sort":
        return max(tokens) - 1
    if name == "broadcast_sink":
        return tokens[0]
    if name == "planted_key":
        return next(token for token in tokens if token in range(1, 5))
    return tokens[tokens.index(tokens[-1]) + 1] if name.startswith("induction") else tokens[-4]


def test_prompts_come_from_their_seed():
    for built in MODELS.values():
        first, again, other = (built.prompts(seed, 5) for seed in (1, 1, 2))
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
        assert not all(len(a) == len(b) and torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_wrong_arguments():
    built = MODELS["copy"]
    with pytest.raises(ValueError, match="count: expected a whole number, 1 or more, got 0"):
        built.prompts(count=0)
    with pytest.raises(TypeError, match="seed: expected a whole number, got 'one'"):
        built.prompts(seed="one")
    with pytest.raises(ValueError, match="position: expected a whole number from 0 to"):
        built.replacements(built.prompts(count=1)[0], 99)
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.name = "other"
