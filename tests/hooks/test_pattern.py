"""Compare the pattern hooks with z = pattern @ values computed by hand, and with each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lens_mix.hooks import (
    AttentionHook,
    add_to_pattern,
    freeze_pattern,
    must_fire,
    prune_heads,
    record,
    replace_pattern,
    scale_pattern,
    zero_values,
)
from tests.hooks.cases import (
    CASES,
    DELEGATED,
    LAYER,
    Case,
    clean,
    mixed_by_hand,
    observe,
    one_case,
    output_by_hand,
    run,
)
from tests.tiny_models import available, bridge, inputs, llama_like, tokens

EXACT = {"rtol": 0.0, "atol": 1e-12}
# These bridges compute nothing in float32 after the last pattern, so a difference quotient is accurate.
FLOAT64_THROUGHOUT = ("gpt2", "opt", "bert", "gpt_neox", "vit")


def assert_mixed(case: Case, hooks: list[Any], mixed: torch.Tensor) -> None:
    with must_fire(*hooks):
        after = observe(case, hooks)
    torch.testing.assert_close(after.mixed, mixed, **EXACT)
    torch.testing.assert_close(after.output, output_by_hand(case, mixed), **EXACT)
    assert case.hooks_left() == 0


def uniform(case: Case) -> torch.Tensor:
    """Return a pattern with the same weight for all keys, which no model's mask allows."""
    return torch.full_like(clean(case).pattern, 1 / clean(case).pattern.shape[3])


def random_pattern(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(clean(case).pattern.shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("factor", [0.5, 0, torch.tensor(-2.0)], ids=["half", "nothing", "a tensor"])
def test_scaling_scales_the_mixed_values(case: Case, factor: float | torch.Tensor) -> None:
    hook = scale_pattern(LAYER, factor, attention=case.attention)
    assert_mixed(case, [hook], clean(case).mixed * float(factor))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_twice_is_a_quarter(case: Case) -> None:
    halves = [scale_pattern(LAYER, 0.5, attention=case.attention) for _ in range(2)]
    quarter = scale_pattern(LAYER, 0.25, attention=case.attention)
    assert torch.equal(run(case, halves), run(case, [quarter]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scaling_per_head_with_its_gradient(case: Case) -> None:
    before = clean(case)
    factor = torch.linspace(0.5, 2.0, before.mixed.shape[2], dtype=torch.float64, requires_grad=True)
    hook = scale_pattern(LAYER, factor, attention=case.attention)
    assert_mixed(case, [hook], before.mixed * factor.detach()[:, None])
    store: dict[str, torch.Tensor] = {}
    kept = record(store, case.output_name, detach=False)
    run(case, [scale_pattern(LAYER, factor, attention=case.attention), kept])
    weights = torch.linspace(-1, 1, store[case.output_name].numel(), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((store[case.output_name].flatten() * weights).sum(), factor)
    if case.name == "sandwich":
        assert (gradient != 0).all()
        return
    for head in range(len(factor)):
        alone = torch.zeros_like(before.mixed)
        alone[:, :, head] = before.mixed[:, :, head]
        share = output_by_hand(case, alone) - output_by_hand(case, torch.zeros_like(alone))
        torch.testing.assert_close(gradient[head], (share.flatten() * weights).sum(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pruned_heads_leave_only_the_bias(case: Case) -> None:
    mixed = clean(case).mixed.clone()
    mixed[:, :, [0, 2]] = 0
    assert_mixed(case, [prune_heads(LAYER, [2, 0], attention=case.attention)], mixed)
    heads = range(mixed.shape[2])
    everything = prune_heads(LAYER, heads, attention=case.attention)
    assert_mixed(case, [everything], torch.zeros_like(mixed))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pruning_is_scaling_by_zero(case: Case) -> None:
    factor = torch.ones(clean(case).mixed.shape[2])
    factor[1] = 0
    pruned = run(case, [prune_heads(LAYER, 1, attention=case.attention)])
    assert torch.equal(pruned, run(case, [scale_pattern(LAYER, factor, attention=case.attention)]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_models_own_pattern_changes_nothing(case: Case) -> None:
    hook = replace_pattern(LAYER, clean(case).pattern, attention=case.attention)
    assert_mixed(case, [hook], clean(case).mixed)
    # Some norms compute in float32, which limits the agreement to about 1e-7.
    torch.testing.assert_close(observe(case, [hook]).logits, clean(case).logits, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_another_pattern_mixes_the_values_as_it_says(case: Case) -> None:
    values = clean(case).values
    for pattern in (uniform(case), random_pattern(case)):
        hook = replace_pattern(LAYER, pattern, attention=case.attention)
        assert_mixed(case, [hook], mixed_by_hand(pattern, values))
        hook = replace_pattern(LAYER, pattern[1], attention=case.attention)
        assert_mixed(case, [hook], mixed_by_hand(pattern[1:].expand_as(pattern), values))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_addition_mixes_the_values_beside_the_models_own_pattern(case: Case) -> None:
    before = clean(case)
    for addition in (random_pattern(case), -0.5 * before.pattern):
        hook = add_to_pattern(LAYER, addition, attention=case.attention)
        assert_mixed(case, [hook], before.mixed + mixed_by_hand(addition, before.values))
    hook = add_to_pattern(LAYER, addition[1], attention=case.attention)
    added = mixed_by_hand(addition[1:].expand_as(addition), before.values)
    assert_mixed(case, [hook], before.mixed + added)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_leaves_of_zeros_have_the_gradient_by_the_pattern(case: Case) -> None:
    pattern = clean(case).pattern
    zeros = torch.zeros_like(pattern, requires_grad=True)
    with must_fire(add_to_pattern(LAYER, zeros, attention=case.attention)) as hooks:
        logits = run(case, hooks)
    (gradient,) = torch.autograd.grad(score(logits), zeros)
    leaf = pattern.clone().requires_grad_()
    replaced = run(case, [replace_pattern(LAYER, leaf, attention=case.attention)])
    (expected,) = torch.autograd.grad(score(replaced), leaf)
    assert expected.abs().max() > 0
    torch.testing.assert_close(gradient, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_edits_of_the_values_come_first(case: Case) -> None:
    pattern = random_pattern(case)
    batch, heads, _, keys = pattern.shape
    zero = torch.zeros(batch, keys, heads, dtype=torch.bool)
    zero[:, 1] = True
    hooks = [
        zero_values(LAYER, 1, attention=case.attention),
        replace_pattern(LAYER, pattern, attention=case.attention),
        scale_pattern(LAYER, 0.5, attention=case.attention),
    ]
    assert_mixed(case, hooks, 0.5 * mixed_by_hand(pattern, clean(case).values, zero))


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in DELEGATED], ids=str)
def test_another_order_is_refused_where_the_pattern_shows_it(case: Case) -> None:
    pattern, again = (replace_pattern(LAYER, uniform(case), attention=case.attention) for _ in range(2))
    for hooks in (
        [pattern, zero_values(LAYER, 1, attention=case.attention)],
        [scale_pattern(LAYER, 0.5, attention=case.attention), pattern],
        [pattern, again],
    ):
        with pytest.raises(RuntimeError, match=re.escape("hook_z = pattern @ values")):
            run(case, hooks)
    with pytest.raises(RuntimeError, match="the same pair twice"):
        run(case, [pattern, pattern])
    assert case.hooks_left() == 0


def test_a_gate_before_the_output_is_refused() -> None:
    case = one_case("llama", "grouped")

    def gate(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        return tensor * 0.9

    for edit in (replace_pattern, add_to_pattern):
        with pytest.raises(RuntimeError, match="a gate"):
            run(case, [(f"{case.prefix}.hook_z", gate), edit(LAYER, clean(case).pattern)])


def score(logits: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).reshape(logits.shape)
    return (logits * weights).sum()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_of_the_pattern_is_the_difference_quotient(case: Case) -> None:
    leaf = random_pattern(case).requires_grad_()
    logits = run(case, [replace_pattern(LAYER, leaf, attention=case.attention)])
    (gradient,) = torch.autograd.grad(score(logits), leaf)
    direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    exact = case.name in FLOAT64_THROUGHOUT or (not case.is_bridge and case.name != "mixture")
    step = 1e-5 if exact else 1e-3
    with torch.no_grad():
        ends = [
            score(
                run(case, [replace_pattern(LAYER, leaf + sign * step * direction, attention=case.attention)])
            )
            for sign in (1, -1)
        ]
    quotient = (ends[0] - ends[1]) / (2 * step)
    scale = (gradient * direction).abs().sum()
    assert scale > 0
    assert abs(quotient - (gradient * direction).sum()) < (1e-8 if exact else 1e-3) * scale


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_passes_to_the_values_too(case: Case) -> None:
    name = f"{case.prefix}.hook_v"
    stores: list[dict[str, torch.Tensor]] = [{}, {}]
    replacement = replace_pattern(LAYER, clean(case).pattern, attention=case.attention)
    plain = run(case, [record(stores[0], name, detach=False)])
    replaced = run(case, [record(stores[1], name, detach=False), replacement])
    gradients = [
        torch.autograd.grad(score(logits), store[name])[0]
        for logits, store in zip((plain, replaced), stores, strict=True)
    ]
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frozen_patterns_stay_while_the_input_changes(case: Case) -> None:
    model = case.model()
    store: dict[str, torch.Tensor] = {}
    run(case, [record(store, f"{case.prefix}.hook_pattern")])
    args, kwargs = inputs(model, seed=21)
    seen: dict[str, torch.Tensor] = {}
    looks = [record(seen, f"{case.prefix}.{name}") for name in ("hook_v", "hook_z")]
    with must_fire(freeze_pattern(LAYER, store, attention=case.attention)) as hooks, torch.no_grad():
        model.run_with_hooks(*args, **kwargs, fwd_hooks=[*hooks, *looks])
    values = seen[f"{case.prefix}.hook_v"]
    values = values.transpose(1, 2) if case.name == "deepseek_v3" else values
    expected = mixed_by_hand(store[f"{case.prefix}.hook_pattern"], values)
    torch.testing.assert_close(seen[f"{case.prefix}.hook_z"].flatten(2), expected.flatten(2), **EXACT)


def test_freezing_takes_a_cache_a_dict_or_a_tensor() -> None:
    case = one_case("gpt2", "LN")
    model = case.model()
    _, cache = model.run_with_cache(tokens(model))
    name = f"{case.prefix}.hook_pattern"
    other = tokens(model, seed=8)
    frozen = [
        model.run_with_hooks(other, fwd_hooks=[freeze_pattern(LAYER, source)])
        for source in (cache, {name: cache[name]}, cache[name])
    ]
    assert torch.equal(frozen[0], frozen[1])
    assert torch.equal(frozen[0], frozen[2])
    assert not torch.allclose(frozen[0], model(other), atol=1e-3)


def test_a_frozen_pattern_is_a_constant_and_a_replaced_one_is_not() -> None:
    case = one_case("gpt2", "LN")
    leaf = clean(case).pattern.clone().requires_grad_()
    logits = run(case, [freeze_pattern(LAYER, leaf)])
    assert torch.autograd.grad(score(logits), leaf, allow_unused=True) == (None,)
    assert torch.equal(logits, run(case, [replace_pattern(LAYER, leaf)]))


class Uniform(AttentionHook):
    """Give all keys the same weight."""

    points = ("values", "pattern", "mixed")

    def on_pattern(self, pattern: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        assert values.shape[:2] == (len(pattern), pattern.shape[3])
        return torch.full_like(pattern, 1 / pattern.shape[3])

    def on_mixed(self, mixed: Any, values: Any, pattern: torch.Tensor | None) -> None:
        assert pattern is not None
        self.seen = pattern.clone()
        self.calls += 1


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in DELEGATED], ids=str)
def test_a_hook_of_ones_own_edits_the_pattern(case: Case) -> None:
    hook = Uniform(LAYER, case.attention)
    assert all(map(hook.matches, hook.names))
    assert_mixed(case, [(hook.matches, hook)], mixed_by_hand(uniform(case), clean(case).values))
    torch.testing.assert_close(hook.seen, clean(case).pattern, **EXACT)


@pytest.mark.parametrize("name", sorted(set(DELEGATED) & {case.name for case in CASES}) or [None])
def test_the_kernel_that_shows_no_pattern_is_edited_alike(name: str | None) -> None:
    if name is None:
        pytest.skip("no TransformerBridge in this TransformerLens")
    case = one_case(name)
    model = bridge(name, torch.float64)
    args, kwargs = inputs(model)
    for make in (
        lambda: replace_pattern(LAYER, uniform(case), attention=case.attention),
        lambda: prune_heads(LAYER, 1, attention=case.attention),
        lambda: scale_pattern(LAYER, 0.5, attention=case.attention),
    ):
        with must_fire(make()) as hooks:
            logits = model.run_with_hooks(*args, **kwargs, fwd_hooks=hooks)
        torch.testing.assert_close(logits, run(case, [make()]), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    model = llama_like(dtype)
    pattern = torch.full((4, 7, 7), 1 / 7, dtype=torch.float64)
    for hook in (
        replace_pattern(0, pattern),
        add_to_pattern(0, pattern),
        scale_pattern(0, torch.full((4,), 0.3, dtype=torch.float64)),
        scale_pattern(0, torch.tensor(0.3, dtype=torch.float64)),
        prune_heads(0, 1),
    ):
        store: dict[str, torch.Tensor] = {}
        logits = model.run_with_hooks(tokens(model), fwd_hooks=[hook, record(store, "blocks.0.attn.hook_z")])
        assert store["blocks.0.attn.hook_z"].dtype == dtype
        assert logits.isfinite().all()


@pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens")
def test_compatibility_mode_acts_once() -> None:
    model = bridge("llama", torch.float64)
    model.enable_compatibility_mode(no_processing=True, disable_warnings=True)
    case = one_case("llama")
    for make in (
        lambda: scale_pattern(LAYER, 0.5),
        lambda: scale_pattern(LAYER, torch.full((4,), 0.5)),
        lambda: replace_pattern(LAYER, uniform(case)),
    ):
        hook = make()
        logits = model.run_with_hooks(tokens(model), fwd_hooks=[hook])
        assert hook[1].calls == 1
        torch.testing.assert_close(logits, run(case, [make()]), rtol=0.0, atol=1e-5)


BAD_ARGUMENTS: list[tuple[Any, type[Exception], str]] = [
    (lambda: scale_pattern(0, "half"), TypeError, "factor: expected a number or a tensor [head]; got 'half'"),
    (lambda: scale_pattern(0, True), TypeError, "factor: expected a number"),
    (lambda: scale_pattern(0, float("nan")), ValueError, "factor: expected a finite number; got nan"),
    (lambda: scale_pattern(0, torch.ones(4, 7, 7)), ValueError, "use replace_pattern"),
    (lambda: scale_pattern(0, torch.ones(4, dtype=torch.bool)), TypeError, "got a tensor of torch.bool"),
    (lambda: replace_pattern(0, [[1.0]]), TypeError, "pattern: expected a tensor of real numbers; got list"),
    (
        lambda: replace_pattern(0, torch.ones(4, 7, 7, dtype=torch.long)),
        TypeError,
        "got a tensor of torch.int64",
    ),
    (lambda: replace_pattern(0, torch.ones(7, 7)), ValueError, "expected [head query key]"),
    (lambda: add_to_pattern(0, [[1.0]]), TypeError, "addition: expected a tensor of real numbers; got list"),
    (lambda: add_to_pattern(0, torch.ones(7, 7)), ValueError, "addition: expected [head query key]"),
    (lambda: freeze_pattern(0, torch.ones(7, 7)), ValueError, "source: expected [head query key]"),
    (lambda: freeze_pattern(0, 3), TypeError, "source: expected a tensor, a dict filled by record"),
    (
        lambda: freeze_pattern(2, {"blocks.0.attn.hook_pattern": torch.ones(4, 7, 7)}),
        ValueError,
        "source: expected it to contain blocks.2.attn.hook_pattern; got blocks.0.attn.hook_pattern",
    ),
    (lambda: freeze_pattern(0, {}), ValueError, "got nothing"),
    (
        lambda: prune_heads(0, []),
        ValueError,
        "heads: expected at least one (query heads as integers)",
    ),
    (lambda: prune_heads(0, [-2]), ValueError, "heads: expected query heads as integers, 0 or more, got -2"),
    (lambda: prune_heads(0, None), TypeError, "heads: expected query heads as integers, 0 or more, got None"),
    (lambda: prune_heads(-1, 0), ValueError, "layer: expected an integer, 0 or more, got -1"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


BAD_IN_THE_PASS: list[tuple[Any, str]] = [
    (scale_pattern(LAYER, torch.ones(3)), "factor: expected one number for each of 4 query heads; got 3"),
    (prune_heads(LAYER, [1, 4]), "heads: expected query heads from 0 to 3; got 4"),
    (
        replace_pattern(LAYER, torch.ones(3, 7, 7)),
        "[4, 7, 7], alone or for a batch of 2; got shape [1, 3, 7, 7]",
    ),
    (replace_pattern(LAYER, torch.ones(2, 7, 7)), "got shape [1, 2, 7, 7]"),
    (add_to_pattern(LAYER, torch.ones(2, 7, 7)), "addition: expected [head query key] = [4, 7, 7]"),
    (replace_pattern(LAYER, torch.ones(4, 7, 6)), "got shape [1, 4, 7, 6]"),
    (replace_pattern(LAYER, torch.ones(4, 1, 7)), "got shape [1, 4, 1, 7]"),
    (replace_pattern(LAYER, torch.ones(3, 4, 7, 7)), "got shape [3, 4, 7, 7]"),
]


@pytest.mark.parametrize("names", [("llama", "grouped"), ("opt", "LN")], ids=["grouped", "ungrouped"])
@pytest.mark.parametrize(("hook", "message"), BAD_IN_THE_PASS)
def test_what_does_not_fit_the_model_is_an_error_in_the_pass(
    names: tuple[str, str], hook: Any, message: str
) -> None:
    case = one_case(*names)
    before = hook[1].calls
    with pytest.raises(ValueError, match=re.escape(message)):
        run(case, [hook])
    assert hook[1].calls == before
    assert case.hooks_left() == 0


def test_without_values_nothing_can_be_mixed() -> None:
    class Point:
        name = "blocks.0.attn.hook_z"

    ones = torch.ones(4, 7, 7)
    for _, function in (prune_heads(0, 1), replace_pattern(0, ones), add_to_pattern(0, ones)):
        with pytest.raises(RuntimeError, match=r"hook_v before blocks\.0\.attn\.hook_z"):
            function(torch.zeros(1, 7, 4, 6), hook=Point())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_edited_frozen_pattern_is_that_pattern(case: Case) -> None:
    pattern, seen = clean(case).pattern, []

    def half(frozen: torch.Tensor) -> torch.Tensor:
        seen.append(frozen)
        return frozen[:1] * 0.5

    hook = freeze_pattern(LAYER, pattern, edit=half, attention=case.attention)
    assert not seen
    expected = mixed_by_hand((0.5 * pattern[:1]).expand_as(pattern), clean(case).values)
    assert_mixed(case, [hook], expected)
    assert torch.equal(seen[0], pattern)


def test_edits_of_a_frozen_pattern_that_are_none() -> None:
    case = one_case("gpt2", "LN")
    pattern = clean(case).pattern
    for edit, error, words in (
        (lambda frozen: None, TypeError, "edit: expected a tensor of real numbers; got NoneType"),
        (lambda frozen: frozen[..., 1:], ValueError, "edit: expected [head query key]"),
        (lambda frozen: frozen / 0, ValueError, "edit: expected finite numbers"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            run(case, [freeze_pattern(LAYER, pattern, edit=edit, attention=case.attention)])
