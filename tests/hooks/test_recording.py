"""Test record, watch_pattern and must_fire: only the given names, and an error if a hook had no effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lens_mix.hooks import (
    must_fire,
    prune_heads,
    record,
    record_all,
    record_mixing,
    scale_pattern,
    watch_pattern,
    zero_values,
)
from tests.hooks.cases import CASES, DELEGATED, LAYER, Case, clean, one_case, run
from tests.tiny_models import available, bridge, hooked_transformer, tokens

ANY = one_case("gpt2", "LN")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exactly_the_named_tensors_under_the_names_asked_for(case: Case) -> None:
    names = [
        f"{case.prefix}.hook_v",
        f"{case.prefix}.hook_pattern",
        f"{case.prefix}.hook_z",
        case.output_name,
    ]
    store: dict[str, torch.Tensor] = {}
    pairs = record_all(store, names)
    with torch.no_grad():
        run(case, pairs)
    assert set(store) == set(names)
    assert [pair[1].calls for pair in pairs] == [1, 1, 1, 1]
    before = clean(case)
    assert torch.equal(store[names[1]], before.pattern)
    assert torch.equal(store[names[2]].flatten(2), before.mixed.flatten(2))
    assert torch.equal(store[names[3]], before.output)
    assert case.hooks_left() == 0


def test_the_cache_of_the_model_holds_the_same() -> None:
    model = ANY.model()
    _, cache = model.run_with_cache(tokens(model))
    names = ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_post", "blocks.1.ln1.hook_scale", "hook_embed"]
    store: dict[str, torch.Tensor] = {}
    model.run_with_hooks(tokens(model), fwd_hooks=record_all(store, names))
    assert set(store) == set(names)
    for name in names:
        assert torch.equal(store[name], cache[name])


@pytest.mark.skipif(not available(bridge, "gpt2"), reason="no TransformerBridge in this TransformerLens")
def test_an_alias_and_the_bridges_own_name_are_both_kept_as_asked() -> None:
    model = bridge("gpt2")
    store: dict[str, torch.Tensor] = {}
    names = [
        "blocks.0.hook_resid_pre",
        "blocks.0.hook_in",
        "blocks.0.attn.hook_v",
        "blocks.0.attn.v.hook_out",
    ]
    model.run_with_hooks(tokens(model), fwd_hooks=record_all(store, names))
    assert set(store) == set(names)
    assert torch.equal(store[names[0]], store[names[1]])
    assert torch.equal(store[names[2]], store[names[3]])


def test_each_pass_overwrites_the_last() -> None:
    model = ANY.model()
    store: dict[str, torch.Tensor] = {}
    pair = record(store, "blocks.0.hook_resid_pre")
    model.run_with_hooks(tokens(model), fwd_hooks=[pair])
    first = store["blocks.0.hook_resid_pre"]
    model.run_with_hooks(tokens(model, seed=9), fwd_hooks=[pair])
    assert pair[1].calls == 2
    assert not torch.equal(first, store["blocks.0.hook_resid_pre"])


@pytest.mark.parametrize("point", ["hook_v", "hook_z", "hook_pattern"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_come_only_when_asked_for(case: Case, point: str) -> None:
    name = f"{case.prefix}.{point}"
    store: dict[str, torch.Tensor] = {}
    plain = run(case, [record(store, name)])
    assert not store[name].requires_grad
    logits = run(case, [record(store, name, detach=False)])
    torch.testing.assert_close(logits, plain, rtol=0.0, atol=1e-12)
    (gradient,) = torch.autograd.grad(logits.square().sum(), store[name])
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_part_is_kept_and_the_memory_of_the_rest_is_not(case: Case) -> None:
    name = f"{case.prefix}.hook_pattern"
    store: dict[str, torch.Tensor] = {}
    run(case, [record(store, name, select=lambda pattern: pattern[:, :, -1])])
    expected = clean(case).pattern[:, :, -1]
    assert torch.equal(store[name], expected)
    assert not store[name].requires_grad
    assert store[name].untyped_storage().nbytes() == expected.numel() * expected.element_size()


def test_a_part_has_the_gradient_by_what_it_was_computed_from() -> None:
    model, name = ANY.model(), "blocks.0.attn.hook_v"
    weights = list(model.parameters())
    gradients = []
    for select in (None, lambda values: values[:, -1]):
        store: dict[str, torch.Tensor] = {}
        model.run_with_hooks(tokens(model), fwd_hooks=[record(store, name, detach=False, select=select)])
        part = store[name][:, -1] if select is None else store[name]
        gradients.append(torch.autograd.grad(part.sum(), weights, allow_unused=True))
    assert [one is None for one in gradients[0]] == [one is None for one in gradients[1]]
    pairs = [pair for pair in zip(*gradients, strict=True) if pair[0] is not None]
    assert pairs
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pattern_is_seen_as_it_passes_and_nothing_changes(case: Case) -> None:
    before = clean(case)
    seen: list[torch.Tensor] = []
    with must_fire(watch_pattern(LAYER, seen.append, attention=case.attention)) as hooks:
        logits = run(case, hooks)
    assert torch.equal(logits, before.logits)
    assert len(seen) == 1
    assert torch.equal(seen[0], before.pattern)
    assert not seen[0].requires_grad
    assert case.hooks_left() == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_mixed_is_kept_in_one_layout_and_in_the_graph(case: Case) -> None:
    store: dict[str, torch.Tensor] = {}
    pair = record_mixing(LAYER, store, attention=case.attention)
    logits = run(case, [pair])
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    if case.name in DELEGATED:
        assert (store, pair[1].calls) == ({}, 0)
        return
    before, names = clean(case), [f"{case.prefix}.{name}" for name in ("hook_pattern", "hook_v", "hook_z")]
    pattern, values, mixed = (store[name] for name in names)
    for found, expected in ((pattern, before.pattern), (values, before.values), (mixed, before.mixed)):
        assert torch.equal(found, expected)
    gradient, by_values = torch.autograd.grad(logits.sum(), [mixed, values])
    group = pattern.shape[1] // values.shape[2]
    sent = torch.einsum("bhqk,bqhd->bkhd", pattern, gradient).unflatten(2, (-1, group)).sum(3)
    torch.testing.assert_close(by_values, sent, atol=1e-9, rtol=1e-9)
    assert gradient.shape == mixed.shape
    # The derivative with respect to a factor of z is the sum of gradient times z.
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    scaled = run(case, [scale_pattern(LAYER, factor, attention=case.attention)])
    (expected,) = torch.autograd.grad(
        (scaled if isinstance(scaled, torch.Tensor) else scaled.logits).sum(), factor
    )
    torch.testing.assert_close((gradient * mixed).sum(), expected, atol=1e-9, rtol=1e-9)
    assert case.hooks_left() == 0


def test_must_fire_passes_what_fired() -> None:
    model = ANY.model()
    store: dict[str, torch.Tensor] = {}
    with must_fire(zero_values(LAYER, 1), record(store, "blocks.0.hook_resid_pre")) as hooks:
        model.run_with_hooks(tokens(model), fwd_hooks=hooks)
    assert len(store) == 1


@pytest.mark.parametrize(
    "pair", [prune_heads(7, 0), scale_pattern(7, torch.ones(4)), zero_values(7, 1, heads=0)], ids=repr
)
def test_must_fire_names_the_hook_that_did_nothing(pair: Any) -> None:
    model = ANY.model()
    assert pair[1].calls == 0
    with (
        pytest.raises(RuntimeError, match=r"expected every hook to fire; got no call of .*blocks\.7\.attn"),
        must_fire(zero_values(0, 1), pair) as hooks,
    ):
        model.run_with_hooks(tokens(model), fwd_hooks=hooks)


@pytest.mark.skipif(not available(bridge, "opt"), reason="no TransformerBridge in this TransformerLens")
def test_must_fire_sees_a_pattern_that_is_never_computed() -> None:
    model = bridge("opt")
    store: dict[str, torch.Tensor] = {}
    pattern = record(store, "blocks.0.attn.hook_pattern")
    with pytest.raises(RuntimeError, match="hook_pattern"), must_fire(pattern) as hooks:
        model.run_with_hooks(tokens(model), fwd_hooks=hooks)
    assert store == {}


def test_must_fire_leaves_other_errors_alone() -> None:
    with pytest.raises(KeyboardInterrupt), must_fire(zero_values(0, 1)):
        raise KeyboardInterrupt


@pytest.mark.skipif(not available(hooked_transformer), reason="no HookedTransformer in this TransformerLens")
def test_an_unknown_name_is_transformerlens_error() -> None:
    model = hooked_transformer()
    with pytest.raises(KeyError):
        model.run_with_hooks(tokens(model), fwd_hooks=[record({}, "blocks.0.hook_nothing")])
    with pytest.raises(KeyError):
        model.run_with_hooks(tokens(model), fwd_hooks=[zero_values(9, 0)])


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="store: expected a dict to fill; got list"):
        record([], "blocks.0.hook_resid_pre")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name: expected the name of one hook point; got 3"):
        record({}, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"names: expected several names .*, got 'blocks"):
        record_all({}, "blocks.0.hook_resid_pre")
    with pytest.raises(TypeError, match="watch: expected a function of the pattern, got "):
        watch_pattern(0, torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected select to return a tensor; got float"):
        record({}, "anything", select=lambda one: one.sum().item())[1](torch.ones(1), hook=None)
    with pytest.raises(TypeError, match="expected a tensor to record; got tuple"):
        record({}, "anything")[1]((1, 2), hook=None)  # type: ignore[arg-type]
