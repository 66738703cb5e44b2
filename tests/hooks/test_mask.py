"""Test hidden keys: the other keys get their weight, and a sink's weight is distinguished from rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix._passes.autograd_graph import Mixing
from lens_mix.hooks import (
    freeze_pattern,
    mask_attention,
    mask_keys,
    record,
    replace_pattern,
    scale_pattern,
    zero_values,
)
from lens_mix.hooks.gradient import _compute_pattern_gradient
from lens_mix.hooks.mixing import mix, sink
from lens_mix.methods.token_patching import hidden_effects
from tests.tiny_models import available, bridge, hooked_transformer, tokens

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def softmax(dtype: torch.dtype, *, to_no_key: float = 0.0) -> Float[Tensor, "1 head query key"]:
    """Return many rows over 9 keys, rounded as models round; an attention sink has the weight `to_no_key`."""
    scores = 2 * torch.randn(1, 4, 500, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (scores.softmax(-1) * (1 - to_no_key)).to(dtype)


def without_a_key(pattern: Float[Tensor, "1 head query key"], key: int) -> Float[Tensor, "1 head query key"]:
    function: Any = mask_keys(0, key)[1]
    return function.on_pattern(pattern, pattern.new_zeros(1, pattern.shape[3], 1, 1))


def epsilon(dtype: torch.dtype) -> float:
    return max(torch.finfo(dtype).eps, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_no_sink(dtype):
    pattern = softmax(dtype)
    assert sink(pattern).dtype == torch.promote_types(dtype, torch.float32)
    assert not bool(sink(pattern).any())
    # The same must be true of rows that were rescaled before.
    again = without_a_key(pattern, 3)
    assert not bool(sink(again).any())
    for _ in range(2):
        torch.testing.assert_close(
            again.double().sum(-1), torch.ones(1, 4, 500).double(), atol=epsilon(dtype), rtol=0
        )
        again = without_a_key(again, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_of_a_twentieth_keeps_its_share(dtype):
    pattern = softmax(dtype, to_no_key=0.05)
    assert bool((sink(pattern) - 0.05).abs().max() <= epsilon(dtype))
    weights = pattern.double()
    # By hand: a sink counts as one more key that is not hidden.
    expected = (weights / (1 - weights[..., 3:4])).index_fill(3, torch.tensor(3), 0)
    torch.testing.assert_close(
        without_a_key(pattern, 3).double(), expected, atol=4 * epsilon(dtype), rtol=2 * epsilon(dtype)
    )


@pytest.mark.parametrize(("dtype", "smallest"), [(torch.float32, 2e-4), (torch.float64, 2e-6)])
def test_small_sinks_of_wide_dtypes_count(dtype, smallest):
    found = sink(softmax(dtype, to_no_key=smallest))
    torch.testing.assert_close(found, torch.full_like(found, smallest), atol=5e-7, rtol=0)


def uses(pattern: Float[Tensor, "1 1 query key"]) -> list[Tensor]:
    """Return the results of every function that rescales rows, on random values and gradients."""
    generator = torch.Generator().manual_seed(1)
    values, gradient, given = torch.randn(3, 1, 3, 1, 3, generator=generator).bfloat16().to(pattern.dtype)
    hidden = hidden_effects(Mixing(pattern, values, mix(pattern, values), gradient).at(torch.arange(3)))
    back = _compute_pattern_gradient(2.0, 1.0, pattern, given[:, None, :, 0])
    function: Any = mask_attention(0, torch.tensor([[True, False, True]]).expand(3, 3))[1]
    return [hidden, back, function.on_pattern(pattern, values)]


@pytest.mark.parametrize("to_no_key", [0.0, 0.05])
def test_every_use_tells_a_sink_from_rounding(to_no_key):
    row = ((1 - to_no_key) * torch.tensor([0.20066, 0.04740, 0.75194])).to(torch.bfloat16)
    pattern = row.expand(1, 1, 3, 3)
    exact = pattern.double()
    if not to_no_key:
        assert 2e-3 < 1 - float(exact[0, 0, 0].sum()) < 4e-3
        exact = exact / exact.sum(-1, keepdim=True)
    for found, expected in zip(uses(pattern), uses(exact), strict=True):
        bound = 5e-3 * float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, atol=bound, rtol=0)


def models() -> list[Any]:
    return [
        factory(name, torch.float64)
        for factory, name in ((hooked_transformer, "grouped"), (bridge, "llama"), (bridge, "gpt2"))
        if available(factory, name)
    ]


def random_mask(*shape: int) -> Bool[Tensor, "*axes query key"]:
    """Return a random mask of the keys before each query, with the query itself always visible."""
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5
    return allowed | torch.eye(shape[-1], dtype=torch.bool)


@pytest.mark.parametrize("axes", [(), (4,), (2, 1), (1, 4), (2, 4)])
def test_masked_attention_by_hand(axes):
    for model in models():
        prompts = tokens(model)
        allowed, store, changed = random_mask(*axes, 7, 7), {}, {}
        assert (len(prompts), prompts.shape[1], model.cfg.n_heads) == (2, 7, 4)
        model.run_with_hooks(prompts, fwd_hooks=[record(store, "blocks.0.attn.hook_pattern")])
        pattern = store["blocks.0.attn.hook_pattern"]
        seen = (pattern * allowed) / (pattern * allowed).sum(-1, keepdim=True)
        hooks = [mask_attention(0, allowed), record(changed, "blocks.0.attn.hook_pattern")]
        logits = model.run_with_hooks(prompts, fwd_hooks=hooks)
        torch.testing.assert_close(changed["blocks.0.attn.hook_pattern"], seen, atol=1e-12, rtol=0)
        expected = model.run_with_hooks(prompts, fwd_hooks=[replace_pattern(0, seen)])
        torch.testing.assert_close(logits, expected, atol=1e-12, rtol=0)
        assert float((logits - model(prompts)).detach().abs().max()) > 1e-3


def test_a_key_is_masked_as_in_a_mask():
    for model in models():
        prompts = tokens(model)
        allowed = torch.ones(7, 7, dtype=torch.bool)
        allowed[3:, 2] = False
        allowed[2, 2] = False
        hidden = model.run_with_hooks(prompts, fwd_hooks=[mask_keys(0, 2)])
        masked = model.run_with_hooks(prompts, fwd_hooks=[mask_attention(0, allowed)])
        assert torch.equal(hidden, masked)


def test_a_query_needs_a_key():
    for model in models():
        allowed = torch.ones(7, 7, dtype=torch.bool)
        allowed[0, 0] = False  # the first query has no other key
        with pytest.raises(RuntimeError, match="have weight at a key that it is allowed; got none in 8 rows"):
            model.run_with_hooks(tokens(model), fwd_hooks=[mask_attention(0, allowed)])
        clean = model(tokens(model))
        assert torch.equal(
            model.run_with_hooks(tokens(model), fwd_hooks=[mask_keys(0, 0)])[:, 0], clean[:, 0]
        )


@pytest.mark.parametrize("shape", [(6, 7), (7, 6), (3, 7, 7), (3, 1, 7, 7)])
def test_masks_of_another_shape(shape):
    for model in models():
        with pytest.raises(
            ValueError, match=r"expected \[batch head query key\] = \[2, 4, 7, 7\].*got shape"
        ):
            model.run_with_hooks(
                tokens(model), fwd_hooks=[mask_attention(0, torch.ones(shape, dtype=torch.bool))]
            )


def test_order_of_hooks_on_one_layer():
    """Values, then the pattern, then z gives the result by hand; the reverse order raises an error."""
    for model in models():
        prompts, store = tokens(model), {}
        ordered = [zero_values(0, 1), mask_keys(0, 2), scale_pattern(0, 0.5)]
        kept = record(store, "blocks.0.attn.hook_pattern")
        logits = model.run_with_hooks(prompts, fwd_hooks=[*ordered, kept])
        (pattern,) = store.values()
        by_hand = [zero_values(0, 1), replace_pattern(0, 0.5 * pattern)]
        expected = model.run_with_hooks(prompts, fwd_hooks=by_hand)
        torch.testing.assert_close(logits, expected, atol=1e-12, rtol=0)
        with pytest.raises(RuntimeError, match="hook_z = pattern @ values"):
            model.run_with_hooks(prompts, fwd_hooks=ordered[::-1])


def test_a_hook_without_effect_is_an_error():
    """Another hook restores the model's own pattern."""
    for model in models():
        store = {}
        name = "blocks.0.attn.hook_pattern"
        model.run_with_hooks(tokens(model), fwd_hooks=[record(store, name)])
        hooks = [mask_keys(0, 1), (name, lambda tensor, hook, store=store: store[hook.name])]
        with pytest.raises(RuntimeError, match="position: expected hook_z = pattern @ values"):
            model.run_with_hooks(tokens(model), fwd_hooks=hooks)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_are_finite_where_a_row_has_no_other_key(name):
    if not available(bridge, name):
        pytest.skip("no TransformerBridge in this TransformerLens")
    model, store = bridge(name, torch.float64), {}
    pairs = [record(store, "blocks.0.hook_resid_pre", detach=False), mask_keys(1, 0)]
    logits = model.run_with_hooks(tokens(model, 1), fwd_hooks=pairs)
    (gradient,) = torch.autograd.grad(logits[0, -1].max(), list(store.values()))
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 0


def test_an_edit_in_place_leaves_the_recorded_pattern():
    recorded = torch.full((1, 2, 3, 3), 1 / 3)
    _, hook = freeze_pattern(0, recorded, edit=lambda pattern: pattern.mul_(0))
    values = torch.ones(1, 3, 2, 4)
    assert float(hook.on_mixed(torch.ones(1, 3, 2, 4), values, None).abs().max()) == 0
    assert float(recorded.min()) > 0.3
