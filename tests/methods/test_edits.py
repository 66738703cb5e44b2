"""Test what methods put on a replay: hooks for a run of one's own, or a reason why there are none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import lens_mix as lm
from lens_mix.hooks import must_fire
from lens_mix.method import Method
from lens_mix.methods import METHODS
from tests.tiny_models import available, bridge, hooked_transformer, tokens

PATTERN = torch.full((1, 4, 7, 7), 1 / 7)
# Methods that intervene by hooks in the blocks, with the arguments of one layer's interventions.
INTERVENING: dict[str, tuple[Method, Any]] = {
    "value_zeroing": (lm.methods.ValueZeroing(), 2),
    "occlusion": (lm.methods.Occlusion(by="mask"), 2),
    "token_patching": (lm.methods.TokenPatching(), torch.ones(7, 7, dtype=torch.bool)),
    "attention_attribution": (lm.methods.AttentionAttribution(), PATTERN),
    "gradient_attention": (lm.methods.GradientAttention(), PATTERN),
}
# The interventions of these change gradients and count them, so tests/methods/test_changed_gradients.py runs
# them.
GOING_BACK = {"gim", "frozen_gradients"}


OVERRIDING = {name for name, method in METHODS.items() if method.interventions is not Method.interventions}


def test_every_method_that_intervenes_is_tested_here_or_in_its_own_file():
    known = {*INTERVENING, *GOING_BACK}
    assert known <= OVERRIDING
    for name in OVERRIDING - known:
        file = f"test_{METHODS[name].__module__.rpartition('.')[2]}.py"
        assert ".interventions(" in Path(__file__).with_name(file).read_text(encoding="utf-8"), name


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


def test_a_method_of_ones_own_needs_none():
    @dataclasses.dataclass(frozen=True)
    class Largest(Method):
        pass

    assert Largest().interventions(3) == []
