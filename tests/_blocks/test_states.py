"""The states of a block: what the model computes, once for all methods of a run, and norms held at them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import lens_mix as lm
from lens_mix._blocks import states
from lens_mix._blocks.states import states_of
from lens_mix._model.anatomy import FeedForward, LinearNorm, Norm
from lens_mix.experiments.passes import run_prompt
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import bridge, gpt2_like, tokens

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = pytest.mark.parametrize("kind", ["layer", "rms"])


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["gpt2", "bert", "gptj", "llama", "gemma3", "olmo2", "granite"])
def test_the_states_lead_to_what_the_model_computed(name):
    model = build_or_skip(bridge, name, torch.float64)
    for block in run_prompt(model, prompt_of(model), lm.methods.AtbFf()).blocks:
        found = states_of(block)
        norm = found.feed_forward_residual
        output = found.feed_forward_sum if norm.norm is None else norm.norm(found.feed_forward_sum)
        # Norms of Hugging Face's compute in float32 in some models.
        torch.testing.assert_close(output, block.resid_post, rtol=1e-5, atol=1e-5)
        for linear in (found.attention_residual, found.feed_forward_input, norm):
            if linear.norm is not None:
                bias = 0 if linear.bias is None else linear.bias
                torch.testing.assert_close(linear(linear.state) + bias, linear.norm(linear.state))


def test_the_methods_of_a_run_share_them_unless_memory_is_bound(monkeypatch):
    model, prompt, counts = gpt2_like(torch.float64), tokens(gpt2_like(), 1), {"mix": 0, "pre": 0}
    mix, pre = states.mix, FeedForward.pre_activations

    def counted(name, function):
        def call(*arguments):
            counts[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(states, "mix", counted("mix", mix))
    monkeypatch.setattr(FeedForward, "pre_activations", counted("pre", pre))
    together = ["attn_res_ln", "alti", "atb_ff", "decompx_local", "information_flow_routes", "value_zeroing"]
    lm.run(model, prompt, ["attn_res_ln"])
    counts.update(mix=0, pre=0)
    lm.run(model, prompt, ["attn_res_ln"])
    assert counts["pre"] == 0, "the check computes a feed-forward that no method computes"
    counts.update(mix=0, pre=0)
    lm.run(model, prompt, together)
    assert counts == {"mix": 2, "pre": 2 + 2}, "expected one of the check and one of the methods per block"
    counts.update(mix=0)
    lm.run(model, prompt, together, max_memory=10**9)
    assert counts["mix"] > 2


def test_they_are_freed_with_the_block():
    model = gpt2_like(torch.float64)
    blocks = run_prompt(model, tokens(model, 1), lm.methods.AtbFf()).blocks
    gc.collect()
    gc.disable()
    try:
        left = weakref.ref(states_of(blocks[0]))
        assert states_of(blocks[0]) is left()
        assert left().pre_activations
        blocks[0].cache.clear()
        assert left() is None
    finally:
        gc.enable()


def test_other_dtypes_prompts_and_rows_are_states_of_their_own():
    model = gpt2_like()
    block = run_prompt(model, tokens(model, 1), lm.methods.AtbFf(), queries=[-1, 0]).blocks[0]
    narrow, wide = states_of(block), states_of(block, dtype=torch.float64)
    attention = states_of(block, attention_dtype=torch.float64)
    assert narrow is states_of(block)
    assert narrow is not wide
    assert (narrow.mid.dtype, wide.mid.dtype) == (torch.float32, torch.float64)
    assert (attention.attention_out.dtype, attention.mid.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(narrow.mid, wide.mid.float())
    assert narrow.mid.shape[1] == 2
    assert narrow.attention_input.state.shape[1] == block.real.shape[1]
    assert states_of(block, prompts=slice(0, 0)).mid.shape[0] == 0


@KINDS
def test_a_norm_held_at_a_state_is_its_share_there(kind):
    weight, bias, state, vectors = drawn(8, seed=1), drawn(8, seed=2), drawn(2, 5, 8), drawn(2, 5, 3, 8)
    vectors[:, :, 0] = state - vectors[:, :, 1:].sum(2)
    linear = Norm(kind, weight, bias, 1e-5).linear_at(state)
    torch.testing.assert_close(linear(vectors).sum(2) + linear.bias, linear.norm(state))
    torch.testing.assert_close(linear(vectors[:, 1:3], slice(1, 3)), linear(vectors)[:, 1:3])
    assert linear(vectors).data_ptr() != vectors.data_ptr()
    unchanged = vectors.clone()
    Norm("rms", None, None, 1e-5).linear_at(state)(vectors)
    torch.testing.assert_close(vectors, unchanged)


@KINDS
@pytest.mark.parametrize("weight", [None, drawn(8, seed=1)])
def test_the_transposed_norm_gives_the_same_products(kind, weight):
    state, directions = drawn(5, 8), drawn(5, 8, seed=3)
    linear = Norm(kind, weight, None, 1e-5).linear_at(state)
    expected = (linear(state) * directions).sum(-1)
    torch.testing.assert_close((state * linear.transposed(directions)).sum(-1), expected)


def test_the_identity_has_a_scale_of_one_and_no_bias():
    state = drawn(2, 5, 8)
    linear = LinearNorm(None, state)
    assert linear(state) is state
    assert linear.transposed(state) is state
    assert linear.bias is None
    assert linear.scale.equal(torch.ones(2, 5, 1, dtype=torch.float64))


def test_what_is_made_in_inference_mode_can_be_differentiated_later():
    model = gpt2_like(torch.float64)
    block = run_prompt(model, tokens(model, 1), lm.methods.AtbFf()).blocks[0]
    with torch.inference_mode():
        linear = states_of(block).feed_forward_input
        _ = linear.scale, states_of(block).pre_activations
    vectors = torch.ones_like(linear.state).requires_grad_(True)
    weighted = linear(vectors).sum() + (vectors[..., :1] * states_of(block).pre_activations[0]).sum()
    assert not bool((torch.autograd.grad(weighted, vectors)[0] == 0).all())
