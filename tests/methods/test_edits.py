"""Test what methods put on a replay: hooks for a run of one's own, or a reason why there are none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import lens_mix as lm
from lens_mix.hooks import must_fire
from lens_mix.method import Method
from lens_mix.methods import METHODS
from tests.tiny_models import available, bridge, hooked_transformer, tokens

PATTERN = torch.full((1, 4, 7, 7), 1 / 7)
# Every method that intervenes by hooks in the blocks, with the arguments of one layer's interventions.
INTERVENING: dict[str, tuple[Method, Any]] = {
    "value_zeroing": (lm.ValueZeroing(), 2),
    "occlusion": (lm.Occlusion(by="mask"), 2),
    "attribution_patching": (lm.AttributionPatching(), torch.ones(7, 7, dtype=torch.bool)),
    "attention_attribution": (lm.AttentionAttribution(), PATTERN),
    "gradient_attention": (lm.GradientAttention(), PATTERN),
}
# The other methods that run the model again, and what they change instead.
ELSEWHERE = {
    "input_gradients": "what enters the first block is a leaf",
    "context_length": "the tokens are cut",
}
# The interventions of these change gradients and count them, so tests/methods/test_changed_gradients.py runs
# them.
GOING_BACK = {"gim", "frozen_gradients"}


def test_every_method_that_runs_the_model_again_is_known():
    again = {name for name, method in METHODS.items() if "hooks" in method.engines}
    assert again == {*INTERVENING, *GOING_BACK, *ELSEWHERE}
    overriding = {
        name for name, method in METHODS.items() if method.interventions is not Method.interventions
    }
    assert overriding == {*INTERVENING, *GOING_BACK}


@pytest.mark.parametrize("name", INTERVENING)
@pytest.mark.parametrize(("factory", "architecture"), [(hooked_transformer, "LN"), (bridge, "gpt2")])
def test_edits_act_on_a_run_of_ones_own(name, factory, architecture):
    if not available(factory, architecture):
        pytest.skip(f"no {factory.__name__} in this TransformerLens")
    model, (method, given) = factory(architecture), INTERVENING[name]
    with (
        torch.no_grad(),
        must_fire(*method.interventions(0, given), *method.interventions(1, given)) as hooks,
    ):
        assert hooks
        model.run_with_hooks(tokens(model), fwd_hooks=hooks)


@pytest.mark.parametrize("name", sorted(set(METHODS) - {*INTERVENING, *GOING_BACK}))
def test_the_others_edit_nothing(name):
    assert METHODS[name]().interventions(0) == []


def test_a_method_of_ones_own_needs_none():
    @dataclasses.dataclass(frozen=True)
    class Largest(Method):
        pass

    assert Largest().interventions(3) == []
