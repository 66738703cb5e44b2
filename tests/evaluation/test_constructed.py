"""The truth about the constructed models is what interventions show, cell by cell and token by token."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix.evaluation.constructed import ConstructedModel, constructed_models
from lens_mix.hooks import record, replace_pattern

MODELS = constructed_models()
SAME = 1e-4  # tracr's softmax leaves e^-25 to the rest
CHANGED = 0.02

every_model = pytest.mark.parametrize("built", MODELS.values(), ids=MODELS.keys())


def answer(model, prompt, at, hooks=()):
    """The logits at a position; under a norm without their scale, which all that is in the stream changes."""
    with torch.no_grad():
        logits = model.run_with_hooks(prompt[None], fwd_hooks=list(hooks))[0, at]
    return logits if model.cfg.normalization_type is None else torch.nn.functional.normalize(logits, dim=0)


def without_cell(model, prompt, cell):
    """Hooks with which one layer's attention brings nothing from key to query, by any head."""
    layer, query, key = cell
    store = {}
    name = f"blocks.{layer}.attn.hook_pattern"
    with torch.no_grad():
        model.run_with_hooks(prompt[None], fwd_hooks=[record(store, name)])
    pattern = store[name].clone()
    pattern[..., query, key] = 0
    return [replace_pattern(layer, pattern)]


@every_model
def test_zeroing_the_value_of_a_cell_changes_the_answer_where_the_truth_says_so(built: ConstructedModel):
    model = built.model()
    for prompt in built.prompts(seed=3, count=2):
        routes = built.routes(prompt)
        (at,) = routes.queries
        clean = answer(model, prompt, at)
        for cell in torch.ones_like(routes.layers).nonzero().tolist():
            change = (answer(model, prompt, at, without_cell(model, prompt, cell)) - clean).abs().max()
            if routes.layers[tuple(cell)]:
                assert change > CHANGED, (prompt, cell)
            else:
                assert change < SAME, (prompt, cell)


@every_model
def test_replacing_a_token_changes_the_answer_where_the_truth_says_so(built: ConstructedModel):
    model = built.model()
    for prompt in built.prompts(seed=4, count=3):
        routes = built.routes(prompt)
        (at,) = routes.queries
        clean = answer(model, prompt, at)
        for position in range(len(prompt)):
            changes = [
                (answer(model, replaced(prompt, position, token), at) - clean).abs().max()
                for token in built.replacements(prompt, position)
            ]
            if routes.inputs[at, position]:
                assert max(changes) > CHANGED, (prompt, position)
            else:
                assert max(changes, default=0) < SAME, (prompt, position)


def replaced(prompt, position, token):
    other = prompt.clone()
    other[position] = token
    return other


@every_model
def test_the_lens_proves_it(built: ConstructedModel):
    assert lm.check(built.model(), built.prompts(count=1)[0]).ok
