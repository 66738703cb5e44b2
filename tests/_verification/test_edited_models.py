"""Test models with user hooks: their maps include the hooks' effect, or the error names the hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lens_mix as lm
from lens_mix import experiments
from lens_mix._classes.model_classes import transformer_lens_version
from tests.tiny_models import available, bridge, hooked_transformer, tokens

LAYER = "blocks.1.attn"
# The first methods use pattern and values only; the others also read the weights.
METHODS = ("value_norm", "attn_res", "attn_res_ln", "atb_ff", "alti", "value_zeroing")


def named(function: str) -> str:
    """Return the name of a hook in errors: TransformerLens 2 does not store the functions that it wraps."""
    return "a hook" if transformer_lens_version()[0] < 3 else function


def a_model(name: str) -> Any:
    if name == "HookedTransformer":
        if not available(hooked_transformer, "LN"):
            pytest.skip("no HookedTransformer")
        return hooked_transformer("LN", torch.float64)
    if not available(bridge, name):
        pytest.skip("no such bridge")
    return bridge(name, torch.float64)


MODELS = pytest.mark.parametrize("name", ["gpt2", "llama", "HookedTransformer"])


def scaled(factor: float) -> Callable[..., Tensor]:
    """Return a hook that scales z of head 2."""

    def scale_head(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z.unflatten(-1, (4, -1))[..., 2, :].mul_(factor) if z.ndim == 3 else z[:, :, 2].mul_(factor)
        return z

    return scale_head


def output_matrix(model: Any) -> Tensor:
    """Return head 2's rows of the output matrix, as a view."""
    attention = model.blocks[1].attn
    if hasattr(attention, "o"):
        weight = attention.o.original_component.weight
        # GPT-2 stores its matrices transposed.
        heads = weight if type(attention.o.original_component).__name__ == "Conv1D" else weight.T
        return heads.unflatten(0, (4, -1))[2]
    return attention.W_O[2]


@MODELS
@pytest.mark.parametrize("factor", [0.0, 0.3, -2.0])
def test_a_scaled_head_is_one_with_a_scaled_output_matrix(name: str, factor: float) -> None:
    model = a_model(name)
    prompt = tokens(model, 1, 30, 1)[0]
    whole = lm.run(model, prompt, lm.methods.AttentionWeights(per_head=True))
    with model.hooks([(f"{LAYER}.hook_z", scaled(factor))]):
        found = lm.run(model, prompt, list(METHODS))
        attention = lm.run(model, prompt, lm.methods.AttentionWeights(per_head=True))
    for one in (attention, *found.values()):
        assert any("layer 1: a hook scales z" in note for note in one.notes), one.method
    expected = whole.scores.clone()
    expected[1, 2] *= factor
    torch.testing.assert_close(attention.scores[0], expected[0])
    torch.testing.assert_close(attention.scores[1], expected[1])
    with torch.no_grad():
        output_matrix(model).mul_(factor)
    for label, one in lm.run(model, prompt, list(METHODS)).items():
        assert not any("hook" in note for note in one.notes)
        torch.testing.assert_close(found[label].scores, one.scores, rtol=1e-6, atol=1e-9, msg=label)


@MODELS
def test_pruned_heads(name: str) -> None:
    model = a_model(name)
    prompt = tokens(model, 1, 12, 1)[0]
    with experiments.pruned(model, [(1, 0), (1, 3)]):
        model(prompt[None])
        found = lm.run(model, prompt, ["attn_res", "value_zeroing"])
        by_hooks = lm.run(model, prompt, "value_zeroing", engine="hooks")
    assert found["value_zeroing"].provenance["engine"] == "algebra"
    torch.testing.assert_close(found["value_zeroing"].scores, by_hooks.scores, rtol=1e-8, atol=1e-10)
    assert "[0.0, 1.0, 1.0, 0.0]" in found["attn_res"].notes[0]


@MODELS
def test_edited_values_are_taken_as_they_are(name: str) -> None:
    """Zero the values of a token: zeroing them again changes nothing, and their norm is 0."""
    model = a_model(name)
    prompt = tokens(model, 1, 12, 1)[0]

    def zero_token(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[:, 3] = 0
        return value

    with model.hooks([(f"{LAYER}.hook_v", zero_token)]):
        found = lm.run(model, prompt, ["value_norm", "value_zeroing"])
        by_hooks = lm.run(model, prompt, "value_zeroing", engine="hooks")
        with pytest.raises(lm.UnsupportedModelError, match=f"value is not verified.*{named('zero_token')}"):
            lm.run(model, prompt, "decompx")
    for one in found.values():
        assert float(one.scores[1, 4:, 3].abs().max()) < 1e-12
        assert float(one.scores[0, 4:, 3].abs().max()) > 1e-4
        assert any("layer 1: a hook or an adapter changes its values" in note for note in one.notes)
    torch.testing.assert_close(found["value_zeroing"].scores, by_hooks.scores, rtol=1e-8, atol=1e-10)


@MODELS
def test_an_edit_of_z_past_the_proofs_prompt_is_refused_with_its_name(name: str) -> None:
    model = a_model(name)
    prompt = tokens(model, 1, 30, 1)[0]

    def triple_later(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, 20:] *= 3
        return z

    with model.hooks([(f"{LAYER}.hook_z", triple_later)]):
        for method in ("attention", "attn_res"):
            with pytest.raises(lm.UnsupportedModelError, match=named("triple_later")):
                lm.run(model, prompt, method)
            assert lm.run(model, prompt[:15], method).scores.isfinite().all()


@MODELS
def test_a_pattern_cannot_be_put_into_scaled_heads(name: str) -> None:
    model = a_model(name)
    scaling = model.hooks([(f"{LAYER}.hook_z", scaled(0.5))])
    with (
        scaling,
        pytest.raises(
            lm.UnsupportedModelError,
            match=rf"a hook scales z of the heads in layers 1.*{named('scale_head')}",
        ),
    ):
        lm.run(model, tokens(model, 1, 9, 1)[0], "attention_attribution")
