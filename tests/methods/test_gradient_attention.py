"""Test attention weighted by its gradient against peers, and gradients of patterns in one ordinary pass."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix.hooks import record, replace_pattern
from lens_mix.methods import bound_target
from lens_mix.methods.gradient_attention import weighted_by_gradient
from tests import tiny_models
from tests.methods import attribution_reference as hao
from tests.tiny_models import (
    available,
    bridge,
    gpt2_like,
    hooked_encoder,
    hooked_encoder_decoder,
    llama_like,
    tokens,
    toy_tokenizer,
)

REWRITTEN = ["gpt2", "llama", "gemma2", "gpt_neox", "bloom", "mixtral", "gpt_oss", "falcon_mqa"]
DELEGATED = ["opt", "bert", "gpt_neo", "gptj"]


@pytest.fixture(params=hao.MODEL_CLASSES)
def explained(request):
    """Return the expected numbers, the map per head and the map, for the peers' classifier and prompt."""
    expected = hao.chefer()
    tokens, inputs = hao.prompt(expected)
    logits = hao.classifier()
    target = lm.targets.head(lambda resid: logits(resid)[:, expected["target"]])
    model = hao.body(request.param)
    methods = [
        lm.methods.GradientAttention(target=target),
        lm.methods.GradientAttention(target=target, per_head=True, rectify=False),
    ]
    merged, signed = lm.run(model, tokens, methods, **inputs).values()
    return expected, merged, signed


def test_the_released_rules(explained):
    expected, merged, signed = explained
    gradients = expected["grad_logit"] * expected["att"]
    assert (signed.scores - gradients[..., :8, :8]).abs().max() <= 1e-10
    assert (merged.scores - expected["cam"][:, :8, :8]).abs().max() <= 1e-10


def test_relevance(explained):
    expected, merged, _ = explained
    found = lm.gradient_rollout(merged)
    assert found.kind == "input"
    assert (found.scores[-1] - expected["generic_attention_R"][:8, :8]).abs().max() <= 1e-10


def test_rollout_of_gradient_weighted_attention(explained):
    expected, merged, _ = explained
    found = lm.gradient_rollout(merged, normalize=True)
    assert (found.scores[-1] - expected["gradattn_rollout"][0, :8, :8]).abs().max() <= 1e-10
    assert (found.scores.sum(-1) - 1).abs().max() <= 1e-12


def test_plain_rollout_of_the_same_model():
    expected = hao.chefer()
    tokens, inputs = hao.prompt(expected)
    for model_class in hao.MODEL_CLASSES:
        try:
            model = hao.body(model_class)
        except pytest.skip.Exception:
            continue
        found = lm.rollout(lm.run(model, tokens, "attention", **inputs))
        assert (found.scores[-1] - expected["attention_rollout"][0, :8, :8]).abs().max() <= 1e-10


@pytest.mark.parametrize("name", REWRITTEN + DELEGATED)
def test_gradients_of_the_untouched_model(name):
    """The patterns of one ordinary pass keep their autograd graph, so that it can be differentiated."""
    if not available(bridge, name):
        pytest.skip(f"no bridge for {name}")
    model = bridge(name, torch.float64)
    model.original_model.set_attn_implementation("eager")
    tokens = tiny_models.tokens(model, 1)[0]

    def function(logits):
        return logits[:, -1, 5] - logits[:, -1, 6]

    method = lm.methods.GradientAttention(target=function, per_head=True, rectify=False)
    signed = lm.run(model, tokens, method)
    kept: dict[str, torch.Tensor] = {}
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(2)]
    hooks = [record(kept, hook_name, detach=False) for hook_name in names]
    out = model.run_with_hooks(tokens[None], fwd_hooks=hooks)
    patterns = [kept[hook_name] for hook_name in names]
    for layer, gradient in enumerate(torch.autograd.grad(function(out).sum(), patterns)):
        expected = (gradient * patterns[layer])[0]
        # Modules of some of these models compute in float32 in any dtype.
        assert (signed.scores[layer] - expected).abs().max() <= 1e-6 * max(1, expected.abs().max())
        assert expected.abs().max() > 1e-4


def test_the_hooks_on_a_run_of_your_own():
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    methods = [lm.methods.GradientAttention(), lm.methods.GradientAttention(per_head=True, rectify=False)]
    merged, signed = lm.run(model, tokens, methods).values()
    pattern = lm.run(model, tokens, lm.methods.AttentionWeights(per_head=True)).scores
    leaves = torch.zeros(2, 1, *pattern.shape[1:], dtype=pattern.dtype).unbind()
    leaves = [leaf.clone().requires_grad_(True) for leaf in leaves]
    hooks = [pair for layer in (0, 1) for pair in methods[0].interventions(layer, leaves[layer])]
    logits = model.run_with_hooks(tokens[None], fwd_hooks=hooks)
    value = logits[0, -1].max()
    assert value.item() == pytest.approx(merged.provenance["details"]["target_value"][0], abs=1e-12)
    for layer, gradient in enumerate(torch.autograd.grad(value, leaves)):
        assert (signed.scores[layer] - gradient[0] * pattern[layer]).abs().max() <= 1e-12

        def logit(given, layer=layer):
            hooks = [replace_pattern(layer, given)]
            return model.run_with_hooks(tokens[None], fwd_hooks=hooks)[:, -1, int(logits[0, -1].argmax())]

        expected = weighted_by_gradient(logit, pattern[layer][None])[0]
        assert expected.abs().max() > 0
        assert (merged.scores[layer] - expected).abs().max() <= 1e-12


def test_first_layer_differs_from_frozen_patterns_above():
    """The derivative is total: it also passes through the patterns of the layers above."""
    model = gpt2_like(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    signed = lm.run(model, tokens, lm.methods.GradientAttention(per_head=True, rectify=False))
    attribution = lm.run(
        model,
        tokens,
        lm.methods.AttentionAttribution(
            target=lm.targets.predicted(of="logit"), method="riemann_right", n_steps=1, per_head=True
        ),
    )
    # One step at α = 1 gives A ∂F/∂A, computed in another way.
    assert (signed.scores - attribution.scores).abs().max() <= 1e-12


def test_encoder_decoder_stacks():
    if available(bridge, "bart"):
        model = bridge("bart", torch.float64)
    else:
        if transformer_lens_version()[0] < 3:
            pytest.skip("its decoder is not causal on TransformerLens 2.x: refused, see tests/test_runner.py")
        model = hooked_encoder_decoder(torch.float64)
    pair = (tiny_models.tokens(model, 1)[0], tiny_models.tokens(model, 1, 5, 2)[0])
    encoder = lm.run(model, pair, lm.methods.GradientAttention())
    assert encoder.scores.shape == (2, 7, 7)
    assert encoder.scores.abs().max() > 0
    if not available(bridge, "bart"):
        return  # The decoder of TransformerLens 2 is not supported.
    decoder = lm.run(model, pair, lm.methods.GradientAttention(), part="decoder")
    assert decoder.scores.shape == (2, 5, 5)
    assert decoder.causal
    # The target uses the decoder's positions.
    with pytest.raises(ValueError, match="position: expected a position from -5 to 4"):
        lm.run(model, pair, lm.methods.GradientAttention(target=lm.targets.predicted(5)))


@pytest.mark.skipif(not available(hooked_encoder), reason="no HookedEncoder here")
def test_hooked_encoder():
    model = hooked_encoder(torch.float64)
    tokens = tiny_models.tokens(model, 1)[0]
    found = lm.run(model, tokens, lm.methods.GradientAttention(target=lm.targets.masked_token(7, position=3)))
    assert found.scores.shape == (2, 7, 7)
    assert found.scores[1, 3].abs().sum() > 0


def test_gradient_rollout_refuses():
    scores = torch.rand(2, 3, 3)
    with pytest.raises(ValueError, match="0 or more"):
        lm.gradient_rollout(lm.MixingMap(scores=-scores, tokens=["a", "b", "c"]))
    with pytest.raises(TypeError, match="expected a MixingMap"):
        lm.gradient_rollout(scores)
    rolled = lm.gradient_rollout(lm.MixingMap(scores=scores, tokens=["a", "b", "c"]))
    with pytest.raises(ValueError, match="layer maps"):
        lm.gradient_rollout(rolled)


def test_gradient_rollout_keeps_the_reach_of_a_window():
    window = torch.eye(5, dtype=torch.bool) | torch.eye(5, dtype=torch.bool).roll(1, 0).tril()
    scores = torch.rand(3, 5, 5) * window
    found = lm.gradient_rollout(lm.MixingMap(scores=scores, tokens=list("abcde"), causal=True, mask=window))
    assert found.visible()[2, 4].tolist() == [False, True, True, True, True]
    assert found.scores[2, 4, 0] == 0
    assert found.scores[2, 4, 1] > 0


@pytest.mark.parametrize("target", [None, "w5"])
def test_the_logits_of_the_last_row_are_those_of_the_clean_pass(monkeypatch, target):
    model = llama_like(tokenizer=toy_tokenizer())
    prompt, made = tokens(model, 1)[0], []
    method = lm.methods.GradientAttention() if target is None else lm.methods.GradientAttention(target=target)
    expected = lm.run(model, prompt, method, queries=[-1, -2])
    own = bound_target.read_output
    monkeypatch.setattr(bound_target, "read_output", lambda *a, **b: (made.append(b), own(*a, **b))[1])
    found = lm.run(model, prompt, method, queries=[-1])
    assert found.explained[0].target == expected.explained[0].target
    assert found.explained[0].value == pytest.approx(expected.explained[0].value, rel=1e-5)
    torch.testing.assert_close(found.scores[:, 0], expected.scores[:, 0], rtol=1e-4, atol=1e-7)
    # No pass computes the logits of all positions.
    assert [options for options in made if options.get("positions") is None] == []
