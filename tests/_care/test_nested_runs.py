"""Test a run inside a user hook of another run, and models that were made in inference mode."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import lens_mix as lm
from lens_mix.experiments import pruned
from lens_mix.registry import all_methods
from tests._care.test_state import assert_same, state_of
from tests.matrix import case_of, prompt_of, slow

pytestmark = pytest.mark.filterwarnings("ignore")
LABELS = ["bridge gpt2", slow("bridge llama"), "HookedTransformer LN", "HookedEncoder"]


def build(label):
    case = case_of(label)
    model = case.build()
    if case.refusal is not None:
        pytest.skip(case.refusal)
    return model


def hook_once(model, function):
    """Add a hook to the first block that calls a function once in each pass, except in passes inside it."""
    names = ("blocks.0.hook_in", "blocks.0.hook_resid_pre")
    name = next(name for name in names if name in model.hook_dict)
    busy = []

    def hook(tensor, hook):
        if not busy:
            busy.append(True)
            try:
                function()
            finally:
                busy.clear()
        return tensor

    model.add_hook(name, hook)


# ------------------------------------------------------------------ runs within a run


@pytest.mark.parametrize("outer", ["attention", "value_zeroing"])
@pytest.mark.parametrize("label", LABELS)
def test_a_run_within_a_pass_of_another_says_so(label, outer):
    model = build(label)
    prompt = prompt_of(model)
    lm.run(model, prompt, outer)
    hook_once(model, lambda: lm.run(model, prompt, "attention"))
    before = state_of(model)
    with pytest.raises(RuntimeError, match=r"a run is already open .* nested run; run before or after"):
        lm.run(model, prompt, outer)
    assert_same(before, state_of(model))


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, prompt: lm.check(model, prompt),
        lambda model, prompt: lm.input_map(model, prompt),
        lambda model, prompt: pruned(model, [(0, 0)]).__enter__(),
        lambda model, prompt: list(lm.run_many(model, [prompt], "value_zeroing")),
    ],
)
def test_whatever_opens_the_model_says_so(ask):
    model = build("bridge gpt2")
    prompt = prompt_of(model)
    hook_once(model, lambda: ask(model, prompt))
    with pytest.raises(RuntimeError, match="a run is already open"):
        lm.run(model, prompt, "attention")


def test_a_hook_that_asks_for_a_run_in_each_pass_does_not_recurse():
    model = build("bridge gpt2")
    prompt = prompt_of(model)
    model.add_hook("blocks.0.hook_in", lambda tensor, hook: lm.run(model, prompt, "attention") and tensor)
    with pytest.raises(RuntimeError, match="a run is already open"):
        model(prompt)


def test_runs_within_a_plain_pass_or_on_another_model_are_as_ever():
    model, prompt = build("bridge gpt2"), prompt_of(build("bridge gpt2"))
    other, found = copy.deepcopy(model), []
    expected = lm.run(model, prompt, "value_zeroing").scores
    hook_once(model, lambda: found.append(lm.run(model, prompt, "value_zeroing").scores))
    model(prompt)
    with pruned(model, [(1, 0)]):
        model(prompt)
    model.reset_hooks()
    hook_once(model, lambda: found.append(lm.run(other, prompt, "value_zeroing").scores))
    assert torch.equal(lm.run(model, prompt, "value_zeroing").scores, expected)
    assert len(found) >= 3
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[-1], expected)


def test_another_thread_waits_and_does_not_fail():
    model = build("bridge gpt2")
    prompt, found = prompt_of(model), []
    lm.run(model, prompt, "attention")
    other = threading.Thread(target=lambda: found.append(lm.run(model, prompt, "attention")))
    hook_once(model, lambda: other.ident is None and other.start())
    lm.run(model, prompt, "attention")
    other.join()
    assert len(found) == 1


# ------------------------------------------------------------------ models made in inference mode

GRADIENTS = {name for name, method in all_methods().items() if "gradients" in method.needs}


def inference_model(label):
    with torch.inference_mode():
        return build(label)


def test_which_methods_need_gradients():
    expected = {"attention_attribution", "gradient_attention", "input_gradients", "gim", "frozen_gradients"}
    assert expected | {"token_patching"} == GRADIENTS


@pytest.mark.parametrize("label", LABELS)
def test_methods_on_a_model_made_in_inference_mode(label):
    model, usual = inference_model(label), build(label)
    prompt = prompt_of(usual)
    # TransformerLens's Bridge adds its own hooks to norms in the first forward pass.
    lm.run(model, prompt, "attention")
    before = state_of(model)
    for name in all_methods():
        try:
            expected = lm.run(usual, prompt, name).scores
        except lm.UnsupportedModelError:
            continue
        if name in GRADIENTS:
            with pytest.raises(lm.UnsupportedModelError, match=r"made inside torch\.inference_mode"):
                lm.run(model, prompt, name)
        else:
            torch.testing.assert_close(lm.run(model, prompt, name).scores, expected)
    assert_same(before, state_of(model))
    assert lm.check(model, prompt).ok == lm.check(usual, prompt).ok
    table = lm.support(model)
    for name in GRADIENTS:
        assert "inference_mode" in table[name] or "can't run" in table[name]


@pytest.mark.parametrize("label", LABELS)
def test_a_copy_made_outside_has_gradients(label):
    model, usual = inference_model(label), build(label)
    if any(tensor.is_inference() for tensor in model.parameters()):
        model = copy.deepcopy(model)
    expected = lm.run(usual, prompt_of(usual), "input_gradients").scores
    torch.testing.assert_close(lm.run(model, prompt_of(usual), "input_gradients").scores, expected)


def test_a_model_that_was_cast_in_inference_mode():
    model = build("bridge gpt2")
    prompt = prompt_of(model)
    with torch.inference_mode():
        model.to(torch.float64)
    with pytest.raises(lm.UnsupportedModelError, match=r"made inside torch\.inference_mode"):
        lm.run(model, prompt, "gim")
    with pytest.raises(lm.UnsupportedModelError, match=r"input_map: .*made inside torch\.inference_mode"):
        lm.input_map(model, prompt)
    lm.run(model, prompt, "value_zeroing")
