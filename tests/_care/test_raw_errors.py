"""Test that errors of torch, transformers and TransformerLens during a run are raised with their place."""

import functools

import pytest
import torch

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from tests.tiny_models import available, bridge, inputs, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens"),
]

METHODS = (
    "attention",
    "value_zeroing",
    "attn_res_ln",
    "alti",
    "gim",
    "input_gradients",
    "occlusion",
    "token_patching",
    "decompx",
    "information_flow_routes",
    "gradient_attention",
)
new_adapters = pytest.mark.skipif(transformer_lens_version()[0] < 4, reason="adapters of TransformerLens 4")


def built(name):
    if not available(bridge, name):
        pytest.skip("no bridge for it here")
    return bridge(name)


@new_adapters
@pytest.mark.parametrize("method", METHODS)
def test_heads_of_two_sizes_are_refused_for_what_is_done_to_values(method):
    model = built("gemma4_two_sizes")
    with pytest.raises(lm.UnsupportedModelError, match=r"the values are normalized \(v_norm\)"):
        lm.run(model, tokens(model, 1, 7), method)
    assert "v_norm" in lm.support(model)[method]


@new_adapters
def test_norms_over_pictures_are_no_hindrance():
    model = built("emu3")
    prompt = tokens(model, 1, 7)
    for method in ("gim", "token_patching", "frozen_gradients"):
        assert bool(lm.run(model, prompt, method, queries=[-1]).scores.isfinite().all())
    assert lm.input_map(model, prompt).method == "token_patching"


@new_adapters
def test_an_attention_over_source_and_target_is_named():
    model = built("t5gemma2")
    (source,), _ = inputs(model, 1)
    pair = source[0], source[0, :5]
    assert bool(lm.run(model, pair, "value_zeroing", part="encoder").scores.isfinite().all())
    with pytest.raises(lm.UnsupportedModelError, match="reads the source and the target in one softmax"):
        lm.run(model, pair, "attention", part="decoder")
    for part in ("cross", "joint"):
        with pytest.raises(ValueError, match="its decoder has no separate cross-attention"):
            lm.run(model, pair, "attention", part=part)
    # The model has no start token, so source and target are tokens.
    assert lm.support(model, part="encoder")["attention"].startswith("ok")
    assert "one softmax" in lm.support(model, part="decoder")["attention"]
    assert "encoder" not in str(lm.check(model, part="encoder").verification.algebra_failure or "")


@new_adapters
def test_a_model_that_fails_by_itself_is_said_to():
    model = built("granite_without_positions")
    prompt = tokens(model, 1, 7)
    with pytest.raises(RuntimeError):
        model(prompt)
    words = "the model's own forward pass fails: RuntimeError: Original component not set"
    with pytest.raises(lm.UnsupportedModelError, match=words):
        lm.run(model, prompt, "attention")
    assert "own forward pass fails" in lm.support(model)["attention"]


def test_an_error_of_a_library_names_model_module_and_cause(monkeypatch):
    """Use a method that calls a module of the model with a wrong input."""
    model = bridge("llama")
    prompt = tokens(model, 1, 7)
    monkeypatch.setattr(lm.methods.InputGradients, "of_blocks", model.blocks[1].mlp)
    words = r"external: expected a model that can be mapped, got \w+ in [\w.]*layers\.1\.mlp|blocks\.1\.mlp"
    with pytest.raises(lm.UnsupportedModelError, match=words) as refusal:
        lm.run(model, prompt, "input_gradients", queries=[-1])
    assert refusal.value.__cause__ is not None
    assert not isinstance(refusal.value.__cause__, lm.UnsupportedModelError)
    assert "lens_mix.support(model)" in str(refusal.value)


def test_an_error_of_torch_outside_any_module_names_the_function(monkeypatch):
    model = bridge("llama")
    monkeypatch.setattr(lm.methods.InputGradients, "of_blocks", functools.partial(torch.cat, dim=5))
    with pytest.raises(lm.UnsupportedModelError, match="got TypeError in _map_stack: ") as refusal:
        lm.run(model, tokens(model, 1, 7), "input_gradients", queries=[-1])
    assert isinstance(refusal.value.__cause__, TypeError)


@pytest.mark.parametrize("problem", [MemoryError("out"), KeyboardInterrupt(), UserWarning("a warning")])
def test_what_is_no_fault_of_the_model_stays(monkeypatch, problem):
    def raises():
        raise problem
        yield

    model = bridge("llama")
    # A generator raises its errors in the code that iterates over it.
    monkeypatch.setattr(lm.methods.InputGradients, "of_blocks", lambda self, blocks: next(raises()))
    with pytest.raises(type(problem)):
        lm.run(model, tokens(model, 1, 7), "input_gradients", queries=[-1])


class Mine(Exception):
    """An error of the user's code."""


@pytest.mark.parametrize(
    "problem", [Mine("mine"), RuntimeError("mine"), ValueError("mine"), KeyError("mine")]
)
@pytest.mark.parametrize("name", ["blocks.1.hook_resid_post", "blocks.0.attn.hook_pattern"])
def test_errors_of_the_users_hooks_stay(name, problem):
    def fail(tensor, hook):
        raise problem

    model = bridge("llama")
    model.add_hook(name, fail)
    for method in ("attention", "value_zeroing", "gim"):
        with pytest.raises(type(problem), match="mine"):
            lm.run(model, tokens(model, 1, 7), method)


def test_errors_of_the_users_target_and_interrupts_stay():
    model = bridge("llama")

    def target(logits):
        return torch.ones(3) @ torch.ones(4)

    def interrupted(logits):
        raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="size"):
        lm.run(model, tokens(model, 1, 7), lm.methods.InputGradients(target), queries=[-1])
    with pytest.raises(KeyboardInterrupt):
        lm.run(model, tokens(model, 1, 7), lm.methods.InputGradients(interrupted), queries=[-1])
