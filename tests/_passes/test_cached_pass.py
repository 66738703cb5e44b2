"""Test maps that are computed from a cache, instead of a clean pass."""

from __future__ import annotations

import functools
import re

import pytest
import torch

import lens_mix as lm
from lens_mix._care.state import all_modules
from lens_mix._care.users_hooks import has_user_hooks
from tests.matrix import Case, build_or_skip, cases, model_of, prompt_of
from tests.shared_models import decoder
from tests.tiny_models import bridge, gpt2_like, tokens

pytestmark = pytest.mark.filterwarnings("ignore")

# Each reads a pass in its own way: its pattern; values; whole blocks, in closed form; all blocks together.
METHODS = ("attention", "value_norm", "attn_res_ln", "value_zeroing", "decompx_local", "decompx")


def cached(model, prompt, **options):
    """Return the cache of the user's own pass on a prompt of the tests, with eager attention."""
    inputs = prompt if isinstance(prompt, tuple) else (prompt,)
    if len(inputs) == 2 and type(model).__name__ == "TransformerBridge":
        inputs, options = inputs[:1], {**options, "decoder_input": inputs[1]}
    original = getattr(model, "original_model", None)
    before = None if original is None else original.config._attn_implementation
    if original is not None:
        original.set_attn_implementation("eager")
    try:
        return model.run_with_cache(*inputs, **options)[1]
    finally:
        if original is not None:
            original.set_attn_implementation(before)


@pytest.mark.parametrize("case", cases(cross=True, refused=False), ids=lambda case: case.label)
def test_maps_from_a_cache_are_those_of_a_clean_pass(case: Case):
    model = model_of(case, torch.float64)
    prompt = prompt_of(model)
    cache = cached(model, prompt)
    compared = 0
    for name in METHODS:
        try:
            expected = lm.run(model, prompt, name, part=case.part)
        except lm.UnsupportedModelError:
            continue
        if expected.provenance["engine"] == "hooks":
            with pytest.raises(ValueError, match="'hooks' alone, and so runs the blocks again"):
                lm.run(model, prompt, name, part=case.part, cache=cache)
            continue
        got = lm.run(model, prompt, name, part=case.part, cache=cache)
        torch.testing.assert_close(got.scores, expected.scores, atol=1e-10, rtol=0)
        assert got.tokens == expected.tokens
        assert got.causal == expected.causal
        assert any("computed from an ActivationCache" in note for note in got.notes)
        assert not any("in the cache, the block is not" in note for note in got.notes)
        compared += 1
    assert compared


def test_the_model_is_run_no_further_than_its_first_block():
    model = decoder()
    prompt = tokens(model, 1, 9)
    cache = cached(model, prompt)
    lm.run(model, prompt, ["attention", "decompx"])
    ran = []
    handles = [block.register_forward_hook(lambda *_: ran.append(1)) for block in model.blocks]
    try:
        # The hooks are new, so the model is verified again, on a short prompt.
        lm.run(model, prompt, ["attention", "decompx"])
        ran.clear()
        maps = lm.run(model, prompt, ["attention", "decompx"], cache=cache)
    finally:
        for handle in handles:
            handle.remove()
    assert ran == []
    assert list(maps) == ["attention", "decompx"]


def test_rows_layers_and_parts_are_selected_as_in_a_run():
    model = decoder()
    prompt = tokens(model, 1, 9)
    options = {"queries": [-1, 3], "layers": [1], "residual_shares": True}
    for name in ("attention", "value_zeroing", "decompx"):
        expected = lm.run(model, prompt, name, **options)
        got = lm.run(model, cache=cached(model, prompt), tokens=prompt, methods=name, **options)
        torch.testing.assert_close(got.scores, expected.scores, atol=1e-10, rtol=0)
        assert (got.layers, got.queries) == (expected.layers, expected.queries)


def test_a_cache_in_other_forms_is_the_same():
    model = decoder()
    prompt = tokens(model, 3, 8)
    batch = cached(model, prompt)
    expected = lm.run(model, prompt[1], "value_zeroing").scores
    dictionary = model.run_with_cache(prompt[1:2], return_cache_object=False)[1]
    forms = [batch.apply_slice_to_batch_dim(1), batch.apply_slice_to_batch_dim([1]), dictionary]
    forms.append(cached(model, prompt[1:2]).remove_batch_dim())
    for cache in forms:
        got = lm.run(model, prompt[1], "value_zeroing", cache=cache).scores
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
    with pytest.raises(ValueError, match=r"one prompt, got those of 3; write cache=cache.apply_slice"):
        lm.run(model, prompt[1], "attention", cache=batch)


def test_a_cache_that_was_cast_to_save_memory_is_read():
    model = decoder()
    prompt = tokens(model, 1, 8)
    small = {name: tensor.float() for name, tensor in cached(model, prompt).items()}
    expected = lm.run(model, prompt, "attention").scores
    got = lm.run(model, prompt, "attention", cache=small).scores
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["attn_res_ln", "value_zeroing"])
def test_a_cache_in_half_precision_is_too_rough_for_blocks_that_are_computed(method):
    model = gpt2_like(torch.float32)
    prompt = tokens(model, 1, 8)
    small = {name: tensor.bfloat16() for name, tensor in cached(model, prompt).items()}
    assert lm.run(model, prompt, "attention", cache=small).scores.any()
    with pytest.raises(ValueError, match=r"were rounded when they were cast from torch\.float32"):
        lm.run(model, prompt, method, cache=small)


def test_a_cache_of_other_tokens_or_weights_is_an_error():
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 8)
    other = prompt.clone()
    other[0, 3] = 3 + (other[0, 3] - 2) % 40
    cache = cached(model, prompt)
    with pytest.raises(ValueError, match=r"other vectors at 1 of 8 positions, the first of them 3"):
        lm.run(model, other, "attention", cache=cache)
    with pytest.raises(ValueError, match=r"of shape \[1, 7, .*\] for this model and prompt, got \[1, 8, "):
        lm.run(model, prompt[:, :7], "attention", cache=cache)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    with pytest.raises(ValueError, match="the model with the weights, that the cache was recorded on"):
        lm.run(model, prompt, "attention", cache=cache)


def test_a_block_that_a_hook_changed_is_not_computed_in_closed_form():
    model = decoder()
    prompt = tokens(model, 1, 8)
    name = "blocks.1.attn.hook_z"
    with model.hooks(fwd_hooks=[(name, lambda z, hook: torch.zeros_like(z))]):
        cache = cached(model, prompt)
    m = lm.run(model, prompt, "attention", cache=cache)
    torch.testing.assert_close(m.scores[1], cache["pattern", 1][0].mean(0), atol=1e-12, rtol=0)
    assert next(note for note in m.notes if "in the cache, the block is not" in note).startswith("layer 1: ")
    assert not any(note.startswith("layer 0: ") for note in m.notes)
    with pytest.raises(ValueError, match=r"cache: block 1: expected its components .* a hook changed the"):
        lm.run(model, prompt, "value_zeroing", cache=cache)
    # Below the hook, the pass is the model's own.
    expected = lm.run(model, prompt, "value_zeroing", layers=[0]).scores
    got = lm.run(model, prompt, "value_zeroing", layers=[0], cache=cache).scores
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("point", ["hook_attn_out", "attn.hook_z", "hook_resid_post"])
def test_a_hook_on_one_position_is_found(point):
    model = decoder()
    prompt = tokens(model, 1, 12)
    for position in (1, 6, 11):
        with model.hooks(fwd_hooks=[(f"blocks.0.{point}", functools.partial(zero_at, position))]):
            cache = cached(model, prompt)
        with pytest.raises(ValueError, match=r"cache: block 0: expected its components"):
            lm.run(model, prompt, "attn_res_ln", cache=cache)


def zero_at(position, activation, hook):
    activation = activation.clone()
    activation[:, position] = 0
    return activation


def test_other_weights_of_a_block_are_in_the_notes():
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 8)
    cache = cached(model, prompt)
    weights = (weight for name, weight in model.named_parameters() if "mlp" in name and weight.ndim == 2)
    with torch.no_grad():
        next(weights).mul_(1.1)
    notes = lm.run(model, prompt, "attention", cache=cache).notes
    assert [note[:8] for note in notes if "or the weights were others" in note] == ["layer 0:"]
    with pytest.raises(ValueError, match=r"cache: block 0: .* or the model had other weights"):
        lm.run(model, prompt, "decompx", cache=cache)


def test_hooks_that_are_on_the_model_and_in_the_cache_are_in_the_map():
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 8)
    clean = cached(model, prompt)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", _halve_first_head)]):
        cache = cached(model, prompt)
        expected = lm.run(model, prompt, "attention")
        got = lm.run(model, prompt, "attention", cache=cache)
        with pytest.raises(ValueError, match="cache: block 0: expected z to be pattern @ values"):
            lm.run(model, prompt, "attention", cache=clean)
    torch.testing.assert_close(got.scores, expected.scores, atol=1e-10, rtol=0)


def _halve_first_head(z, hook):
    z = z.clone()
    z[:, :, 0] *= 0.5
    return z


def test_what_a_cache_lacks_is_named():
    model = decoder()
    prompt = tokens(model, 1, 8)
    patterns = cached(model, prompt, names_filter=lambda name: name.endswith("pattern"))
    with pytest.raises(ValueError, match=r"got none of blocks.0.hook_resid_pre; record them: .*names_filter"):
        lm.run(model, prompt, "attention", cache=patterns)
    ends = ("hook_pattern", "hook_resid_pre")
    cache = cached(model, prompt, names_filter=lambda name: name.endswith(ends))
    expected = lm.run(model, prompt, "attention").scores
    got = lm.run(model, prompt, "attention", cache=cache).scores
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
    with pytest.raises(ValueError, match=r"blocks.0.attn.hook_v, blocks.1.attn.hook_v"):
        lm.run(model, prompt, "value_norm", cache=cache)


@pytest.mark.parametrize("name", ["input_gradients", "occlusion", "attention_attribution", "alti_logit"])
def test_a_method_that_runs_the_model_says_so(name):
    model = decoder()
    prompt = tokens(model, 1, 5)
    with pytest.raises(ValueError, match=f"got {name}, which runs the model itself"):
        lm.run(model, prompt, ["attention", name], cache=cached(model, prompt))


def test_wrong_arguments_are_named():
    model = decoder()
    prompt = tokens(model, 1, 5)
    cache = cached(model, prompt)
    with pytest.raises(TypeError, match=r"cache: expected the ActivationCache of model.run_with_cache"):
        lm.run(model, prompt, "attention", cache=torch.ones(3))
    for arguments, reason in (
        ({"cache": cache, "methods": "attention"}, "prompt: expected that of the cache"),
        (
            {"prompt": prompt, "tokens": prompt, "methods": "attention", "cache": cache},
            "tokens: expected the",
        ),
        ({"tokens": prompt, "methods": "attention"}, "tokens: expected beside cache= only"),
        ({"prompt": prompt}, "methods: expected a name"),
        ({"methods": "attention"}, "prompt"),
    ):
        with pytest.raises(TypeError, match=re.escape(reason)):
            lm.run(model, **arguments)


def test_many_prompts_have_no_cache():
    model = decoder()
    prompt = tokens(model, 1, 5)
    with pytest.raises(TypeError, match="cache: run_many has no argument of this name; run has it"):
        lm.run_many(model, [prompt], "attention", cache=cached(model, prompt))


def test_all_parts_are_read_from_one_cache():
    model = build_or_skip(bridge, "bart", torch.float64)
    prompt = prompt_of(model)
    expected = lm.run(model, prompt, "attention", part="all")
    got = lm.run(model, prompt, "attention", part="all", cache=cached(model, prompt))
    for part in ("encoder", "decoder", "cross"):
        torch.testing.assert_close(got[part].scores, expected[part].scores, atol=1e-10, rtol=0)


def test_the_model_is_as_before():
    model = gpt2_like()
    prompt = tokens(model, 1, 5)
    cache = cached(model, prompt)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.train()
    lm.run(model, prompt, "attention", cache=cache)
    with pytest.raises(ValueError, match="cache"):
        lm.run(model, prompt[:, :3], "attention", cache=cache)
    assert model.training
    assert not has_user_hooks(all_modules(model))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
