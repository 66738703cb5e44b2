"""Test the hooks that change gradients: the new gradients, and that the logits stay the same."""

from __future__ import annotations

import functools

import pytest
import torch

from lens_mix._model.anatomy import ACTIVATIONS
from lens_mix.hooks import (
    freeze_scale,
    hold_activation_ratio,
    mixing,
    must_fire,
    record,
    scale_gradient,
    scale_pattern_gradient,
)
from lens_mix.hooks.gradient import _compute_activation_ratio, _compute_pattern_gradient
from tests.matrix import build_or_skip
from tests.tiny_models import available, bridge, gpt2_like, hooked_encoder, hooked_transformer, tokens

pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = {"rtol": 0.0, "atol": 1e-12}
MODELS = {
    "hooked LN": functools.partial(hooked_transformer, "LN"),
    "hooked grouped": functools.partial(hooked_transformer, "grouped"),
    "hooked gated": functools.partial(hooked_transformer, "gated"),
    "hooked encoder": hooked_encoder,
    "bridge gpt2": functools.partial(bridge, "gpt2"),
    "bridge llama": functools.partial(bridge, "llama"),
    "bridge opt": functools.partial(bridge, "opt"),
}
models = pytest.mark.parametrize("name", MODELS)


def model_of(name):
    model = build_or_skip(MODELS[name], dtype=torch.float64)
    if name == "bridge opt":
        model.original_model.set_attn_implementation("eager")
    return model


def gradients(model, hooks, names):
    """Return the gradients of a logit with respect to activations, in a pass in which all hooks must fire."""
    store = {}
    ids = tokens(model, 1)
    recorders = [record(store, name, detach=False) for name in names]
    with must_fire(*hooks), model.hooks(fwd_hooks=[*hooks, *recorders]):
        logits = model(ids)
        found = torch.autograd.grad(logits[0, -1].max(), [store[name] for name in names])
    torch.testing.assert_close(logits, model(ids), **EXACT)
    return found


@models
def test_a_gradient_is_scaled_where_it_passes(name):
    """The gradient is affine in the factor; with the factor 0 the activation is a constant."""
    model, point, below = model_of(name), "blocks.1.attn.hook_v", ["blocks.1.hook_resid_pre"]
    stopped, whole, tripled = (
        gradients(model, [scale_gradient(point, factor)], below)[0] for factor in (0, 1, 3)
    )
    torch.testing.assert_close(whole, gradients(model, [], below)[0], **EXACT)
    torch.testing.assert_close(tripled - stopped, 3 * (whole - stopped), **EXACT)
    assert float((whole - stopped).abs().max()) > 1e-6
    with model.hooks(fwd_hooks=[(point, lambda values, hook: values.detach())]):
        torch.testing.assert_close(stopped, gradients(model, [], below)[0], **EXACT)


@models
def test_a_frozen_pattern_passes_no_gradient_on(name):
    model, below = model_of(name), ["blocks.1.attn.hook_q", "blocks.1.attn.hook_v"]
    clean = gradients(model, [], below)
    quarter = gradients(model, [scale_pattern_gradient(1, 0.25)], below)
    frozen = gradients(model, [scale_pattern_gradient(1, 0, temperature=2)], below)
    torch.testing.assert_close(quarter[0], clean[0] / 4, **EXACT)
    assert float(clean[0].abs().max()) > 1e-6
    assert float(frozen[0].abs().max()) == 0
    for other in (quarter, frozen):
        torch.testing.assert_close(other[1], clean[1], **EXACT)


def score_gradients(scores, hidden, sink, temperature, factor):
    """Return two gradients with respect to the scores: by torch's softmax from ours, and by the formula."""
    generator = torch.Generator().manual_seed(3)
    given = torch.randn(scores.shape, generator=generator, dtype=scores.dtype)
    leaf = scores.clone().requires_grad_(True)
    masked = leaf.masked_fill(hidden, -torch.inf)
    if sink:
        masked = torch.cat([masked, torch.full_like(masked[..., :1], 0.4)], dim=-1)
    whole = masked.softmax(-1)
    pattern = whole[..., : scores.shape[-1]]
    pattern.register_hook(lambda g: _compute_pattern_gradient(temperature, factor, pattern.detach(), g))
    pattern.backward(given)
    tempered = (masked.detach() / temperature).softmax(-1)[..., : scores.shape[-1]]
    return leaf.grad, factor * tempered * (given - (tempered * given).sum(-1, keepdim=True))


@pytest.mark.parametrize(("temperature", "factor"), [(2.0, 0.25), (1.0, 0.5), (0.7, 1.0), (2.0, 0.0)])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("most_weights", [1, 144, 1 << 20])
def test_the_softmax_goes_back_at_another_temperature(monkeypatch, temperature, factor, sink, most_weights):
    monkeypatch.setattr(mixing, "_MOST_WEIGHTS", most_weights)
    generator = torch.Generator().manual_seed(1)
    scores = 3 * torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    found, wanted = score_gradients(scores, hidden, sink, temperature, factor)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10)
    assert bool((wanted.abs().max() > 0.01) == (factor > 0))


def test_weights_that_underflow_and_empty_rows_are_finite():
    scores = torch.tensor([[[[0.0, -50.0, -200.0, -1000.0]]]])
    hidden = torch.zeros(1, 4, dtype=torch.bool)
    found, wanted = score_gradients(scores, hidden, False, 2.0, 1.0)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)
    empty = _compute_pattern_gradient(2.0, 1.0, torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    assert float(empty.abs().max()) == 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_ratio_is_that_of_act_and_z(activation):
    act = ACTIVATIONS[activation]
    z = torch.tensor([-30.0, -2.0, -0.3, 1e-7, 0.8, 25.0], dtype=torch.float64)
    torch.testing.assert_close(_compute_activation_ratio(act, z) * z, act(z), atol=1e-14, rtol=1e-12)
    assert bool(torch.isfinite(_compute_activation_ratio(act, torch.zeros(2, dtype=torch.float64))).all())


@models
def test_with_its_scale_frozen_a_norm_is_linear(name):
    """Gradient times input equals gradient times output without the bias."""
    model, norm = model_of(name), "blocks.1.ln2"
    where = model.blocks[1].ln2
    ids = tokens(model, 1)
    frozen = freeze_scale(norm)
    inner = []
    handle = where.register_forward_hook(lambda module, args, output: inner.append((args[0], output)))
    with must_fire(frozen), model.hooks(fwd_hooks=[frozen]):
        value = model(ids)[0, -1].max()
        ((x, out),) = inner
        by_out = torch.autograd.grad(value, out, retain_graph=True)[0]
        (by_x,) = torch.autograd.grad(out, x, by_out)
    handle.remove()
    bias = getattr(where, "b", None)
    linear = out if bias is None else out - bias
    torch.testing.assert_close((by_x * x).sum(-1), (by_out * linear).sum(-1), **EXACT)
    assert float(by_x.abs().max()) > 1e-6


def test_an_activation_goes_back_by_its_ratio():
    # TransformerLens 2 has no bridge; the tiny HookedTransformer used there has the exact GELU.
    act = ACTIVATIONS["gelu_tanh" if available(bridge, "gpt2") else "gelu"]
    model = gpt2_like(torch.float64)
    names = ["blocks.1.mlp.hook_pre", "blocks.1.mlp.hook_post"]
    store = {}
    with torch.no_grad():
        model.run_with_hooks(tokens(model, 1), fwd_hooks=[record(store, name) for name in names])
    by_pre, by_post = gradients(model, hold_activation_ratio("blocks.1.mlp", act), names)
    torch.testing.assert_close(by_pre * store[names[0]], by_post * store[names[1]], **EXACT)
    with pytest.raises(ValueError, match=r"act: expected what blocks.1.mlp.hook_post shows within 1e-06"):
        gradients(model, hold_activation_ratio("blocks.1.mlp", torch.relu), names)


@pytest.mark.parametrize("name", ["hooked gated", "bridge llama"])
def test_each_factor_of_a_gate_gets_half(name):
    model, act = model_of(name), torch.nn.functional.silu
    names = [f"blocks.1.mlp.hook_{point}" for point in ("pre", "pre_linear", "post")]
    store: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        model.run_with_hooks(tokens(model, 1), fwd_hooks=[record(store, name) for name in names])
    # HookedTransformer adds a bias to the product of the two factors.
    bias = model.blocks[1].mlp.b_in if name.startswith("hooked") else None
    held = hold_activation_ratio("blocks.1.mlp", act, gated=True, bias=bias)
    by_gate, by_up, by_post = gradients(model, held, names)
    gate, up, post = (store[point] for point in names)
    half = by_post * (post if bias is None else post - bias) / 2
    torch.testing.assert_close(by_gate * gate, half, **EXACT)
    torch.testing.assert_close(by_up * up, half, **EXACT)


def test_without_gradients_nothing_happens():
    model = gpt2_like()
    ids = tokens(model, 1)
    hooks = [
        scale_gradient("blocks.0.attn.hook_v", 0.5),
        scale_pattern_gradient(0, 0.5, temperature=2),
        freeze_scale("blocks.0.ln1"),
        *hold_activation_ratio("blocks.0.mlp", ACTIVATIONS["gelu_tanh"]),
    ]
    with torch.no_grad():
        assert torch.equal(model.run_with_hooks(ids, fwd_hooks=hooks), model(ids))
    assert not any(function.calls for _, function in hooks)
    idle = r"got no call of ScaleGradient\(blocks.0.attn.hook_v\)"
    with pytest.raises(RuntimeError, match=idle), must_fire(*hooks):
        pass


@pytest.mark.parametrize(
    ("make", "problem", "message"),
    [
        (lambda: scale_gradient(0, 0.5), TypeError, "name: expected the name of one hook point, got 0"),
        (lambda: scale_gradient("a", float("inf")), ValueError, "factor: expected a finite number, got inf"),
        (lambda: scale_pattern_gradient(0, "a"), TypeError, "factor: expected a finite number, got 'a'"),
        (lambda: scale_pattern_gradient(0, 1, temperature=0), ValueError, "temperature: expected .*above 0"),
        (lambda: freeze_scale(None), TypeError, "norm: expected the name of one norm, got None"),
        (lambda: hold_activation_ratio("m", "gelu"), TypeError, "act: expected an activation function"),
        (lambda: hold_activation_ratio("m", torch.relu, gated=1), TypeError, "gated: expected True or False"),
    ],
)
def test_bad_arguments(make, problem, message):
    with pytest.raises(problem, match=message):
        make()
