"""Test what the error about outputs that are not finite names as the cause."""

import pytest
import torch

import lens_mix as lm
from tests.tiny_models import gpt2_like, tokens


def test_a_weight_that_is_not_finite_is_named():
    model = gpt2_like()
    name, weight = next((name, each) for name, each in model.named_parameters() if each.ndim == 2)
    prompt = tokens(model, 1, 6)
    with torch.no_grad():
        weight[prompt[0, 2]] = float("nan")
    with pytest.raises(ValueError, match=r"expected finite outputs, got .*; the weight .* has NaN") as raised:
        lm.run(model, prompt, "attention")
    assert repr(name) in str(raised.value)


def test_activations_that_overflow_are_told_from_such_a_weight():
    model = gpt2_like()
    overflow = [("blocks.0.hook_resid_pre", lambda tensor, hook: tensor * float("inf"))]
    with (
        model.hooks(fwd_hooks=overflow),
        pytest.raises(ValueError, match="all weights are finite, so the activations overflow"),
    ):
        lm.run(model, tokens(model, 1, 6), "attention")
