"""Compare zero_values with sums computed by hand, and test that zero_queries makes patterns token-free."""

from __future__ import annotations

import re
import weakref
from typing import Any

import pytest
import torch

from lens_mix.hooks import must_fire, prune_heads, record, scale_pattern, zero_queries, zero_values
from tests.hooks.cases import (
    CASES,
    DELEGATED,
    GROUPED,
    LAYER,
    Case,
    clean,
    mixed_by_hand,
    observe,
    one_case,
    output_by_hand,
    run,
)
from tests.tiny_models import (
    available,
    bridge,
    hooked_encoder_decoder,
    hooked_transformer,
    inputs,
    llama_like,
    tokens,
    toy_tokenizer,
)

EXACT = {"rtol": 0.0, "atol": 1e-12}
# With zeroed queries, the scores of these models still contain a position bias or an attention sink.
BIASED = ("bloom", "mpt", "falcon_alibi", "alibi", "t5", "t5_gated", "gpt_oss")
UNBIASED = [case for case in CASES if case.name not in BIASED and case.build is not hooked_encoder_decoder]


def zero_mask(case: Case, zeroed: dict[int, list[int]], heads: list[int] | None = None) -> torch.Tensor:
    """Return [batch key head], True at the positions given per example, in the given heads."""
    before = clean(case)
    batch, n_heads, _, keys = before.pattern.shape
    mask = torch.zeros(batch, keys, n_heads, dtype=torch.bool)
    for example, positions in zeroed.items():
        for position in positions:
            mask[example, position, heads if heads is not None else slice(None)] = True
    return mask


def assert_zeroed(case: Case, hook: Any, mask: torch.Tensor) -> None:
    before = clean(case)
    with must_fire(hook):
        after = observe(case, [hook])
    mixed = mixed_by_hand(before.pattern, before.values, mask)
    torch.testing.assert_close(after.mixed, mixed, **EXACT)
    torch.testing.assert_close(after.output, output_by_hand(case, mixed), **EXACT)
    # Queries and keys, and so the pattern, are those of the clean pass.
    torch.testing.assert_close(after.pattern, before.pattern, **EXACT)
    assert not torch.allclose(after.output, before.output, atol=1e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_hand_made_output_is_the_models(case: Case) -> None:
    before = clean(case)
    torch.testing.assert_close(mixed_by_hand(before.pattern, before.values), before.mixed, **EXACT)
    torch.testing.assert_close(output_by_hand(case, before.mixed), before.output, **EXACT)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("position", [2, -2], ids=["from the start", "from the end"])
def test_one_position_in_all_rows(case: Case, position: int) -> None:
    hook = zero_values(LAYER, position, attention=case.attention)
    assert_zeroed(case, hook, zero_mask(case, {0: [position], 1: [position]}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_another_position_in_each_row_is_what_each_row_gets_alone(case: Case) -> None:
    together = run(case, [zero_values(LAYER, torch.tensor([1, -2]), attention=case.attention)])
    first = run(case, [zero_values(LAYER, 1, attention=case.attention)], slice(0, 1))
    second = run(case, [zero_values(LAYER, -2, attention=case.attention)], slice(1, 2))
    # Mixtures of experts group the tokens of a batch, and some of them compute in float32.
    torch.testing.assert_close(together, torch.cat([first, second]), rtol=0.0, atol=2e-6)
    hook = zero_values(LAYER, torch.tensor([1, -2]), attention=case.attention)
    assert_zeroed(case, hook, zero_mask(case, {0: [1], 1: [-2]}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_span_is_zeroed_as_one(case: Case) -> None:
    mask = zero_mask(case, {0: [1, 2], 1: [1, 2]})
    assert_zeroed(case, zero_values(LAYER, slice(1, 3), attention=case.attention), mask)
    assert_zeroed(case, zero_values(LAYER, [2, 1], attention=case.attention), mask)
    assert_zeroed(case, zero_values(LAYER, mask[0, :, 0], attention=case.attention), mask)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_another_span_in_each_row(case: Case) -> None:
    mask = zero_mask(case, {0: [0, 1], 1: [2]})
    assert_zeroed(case, zero_values(LAYER, mask[:, :, 0], attention=case.attention), mask)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("heads", [[0], [1, 2]], ids=["one head", "two heads"])
def test_chosen_heads_leave_the_others_of_their_group(case: Case, heads: list[int]) -> None:
    hook = zero_values(LAYER, 1, heads=heads, attention=case.attention)
    assert_zeroed(case, hook, zero_mask(case, {0: [1], 1: [1]}, heads))
    others = [head for head in range(clean(case).pattern.shape[1]) if head not in heads]
    after = observe(case, [zero_values(LAYER, 1, heads=heads, attention=case.attention)])
    torch.testing.assert_close(after.mixed[:, :, others], clean(case).mixed[:, :, others], **EXACT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen_heads_at_another_position_in_each_row(case: Case) -> None:
    hook = zero_values(LAYER, torch.tensor([2, 0]), heads=1, attention=case.attention)
    assert_zeroed(case, hook, zero_mask(case, {0: [2], 1: [0]}, [1]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_heads_chosen_is_all_heads(case: Case) -> None:
    heads = range(clean(case).pattern.shape[1])
    chosen = run(case, [zero_values(LAYER, 1, heads=heads, attention=case.attention)])
    torch.testing.assert_close(
        chosen, run(case, [zero_values(LAYER, 1, attention=case.attention)]), rtol=0.0, atol=2e-6
    )


@pytest.mark.parametrize("name", sorted(set(DELEGATED) & {case.name for case in CASES}) or [None])
@pytest.mark.parametrize("heads", [None, [0, 2]], ids=["all heads", "chosen heads"])
def test_the_kernel_that_shows_no_pattern_gives_the_same(name: str | None, heads: list[int] | None) -> None:
    if name is None:
        pytest.skip("no TransformerBridge in this TransformerLens")
    case = one_case(name)
    model = bridge(name, torch.float64)
    args, kwargs = inputs(model)
    hook = zero_values(LAYER, 1, heads=heads, attention=case.attention)
    with must_fire(hook) as hooks:
        logits = model.run_with_hooks(*args, **kwargs, fwd_hooks=hooks)
    expected = run(case, [zero_values(LAYER, 1, heads=heads, attention=case.attention)])
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-5)
    assert not torch.allclose(logits, run(case), atol=1e-3)


def test_there_are_cases_of_every_kind() -> None:
    built = {case.build.__name__ for case in CASES}
    assert built >= {"bridge"} or built >= {"hooked_transformer", "hooked_encoder", "hooked_encoder_decoder"}
    if "bridge" in built:
        assert {case.name for case in CASES} >= {*GROUPED, "gpt2", "opt", "bert", "bart"}


@pytest.mark.parametrize("name", sorted({*GROUPED, "grouped"} & {case.name for case in CASES}))
def test_hooks_of_different_heads_combine_and_of_the_same_head_are_refused(name: str) -> None:
    case = one_case(name)
    apart = [zero_values(LAYER, 1, heads=0), zero_values(LAYER, 2, heads=1)]
    mask = zero_mask(case, {0: [1], 1: [1]}, [0]) | zero_mask(case, {0: [2], 1: [2]}, [1])
    mixed = mixed_by_hand(clean(case).pattern, clean(case).values, mask)
    torch.testing.assert_close(observe(case, apart).mixed, mixed, **EXACT)
    with pytest.raises(RuntimeError, match="pattern @ values"):
        run(case, [zero_values(LAYER, 1, heads=0), zero_values(LAYER, 2, heads=0)])
    with pytest.raises(RuntimeError, match="pattern @ values"):
        run(case, [scale_pattern(LAYER, 0.5), zero_values(LAYER, 2, heads=0)])
    with pytest.raises(RuntimeError, match="pattern @ values"):
        run(case, [zero_values(LAYER, 2, heads=0), zero_values(LAYER, 1)])
    assert case.hooks_left() == 0


def test_one_hook_serves_many_passes_and_keeps_none_of_their_tensors() -> None:
    case = one_case("llama", "grouped")
    hook = zero_values(LAYER, 1, heads=[1])
    seen: list[weakref.ref[torch.Tensor]] = []

    def look(tensor: torch.Tensor, hook: Any) -> None:
        seen.append(weakref.ref(tensor))

    names = [f"{case.prefix}.{name}" for name in ("hook_v", "hook_pattern", "hook_z")]
    with torch.no_grad():
        first = run(case, [*((name, look) for name in names), hook])
        alone = run(case, [hook], slice(0, 1))
        second = run(case, [hook])
    assert hook[1].calls == 3
    torch.testing.assert_close(first, second, **EXACT)
    torch.testing.assert_close(first[:1], alone, **EXACT)
    assert len(seen) == 3
    assert all(reference() is None for reference in seen)


def test_a_pass_cut_short_does_not_reach_into_the_next() -> None:
    case = one_case("llama", "grouped")
    hook = zero_values(LAYER, 1, heads=[1])

    def stop(tensor: torch.Tensor, hook: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(case, [hook, (f"{case.prefix}.hook_pattern", stop)])
    assert case.hooks_left() == 0
    assert hook[1].calls == 0
    torch.testing.assert_close(run(case, [hook]), run(case, [zero_values(LAYER, 1, heads=[1])]), **EXACT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_stays_on_the_model(case: Case) -> None:
    before = run(case)
    assert case.hooks_left() == 0
    hooks = [zero_values(LAYER, 1, attention=case.attention), prune_heads(LAYER, 0, attention=case.attention)]
    run(case, hooks)
    with pytest.raises(ValueError, match="position"):
        run(case, [*hooks, zero_values(LAYER, 99, attention=case.attention)])
    assert case.hooks_left() == 0
    assert torch.equal(run(case), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [None, [1]], ids=["all heads", "chosen heads"])
def test_the_dtype_stays(dtype: torch.dtype, heads: list[int] | None) -> None:
    model = llama_like(dtype)
    store: dict[str, torch.Tensor] = {}
    hooks = [zero_values(0, 1, heads=heads), record(store, "blocks.0.attn.hook_z")]
    logits = model.run_with_hooks(tokens(model), fwd_hooks=hooks)
    assert store["blocks.0.attn.hook_z"].dtype == dtype
    assert logits.isfinite().all()
    exact = llama_like(torch.float64)
    expected = exact.run_with_hooks(tokens(model), fwd_hooks=[zero_values(0, 1, heads=heads)])
    bound = 1e-4 if dtype == torch.float32 else 0.5
    torch.testing.assert_close(logits.double(), expected, rtol=0.0, atol=bound)


def test_gradients_pass_the_zeroed_values() -> None:
    case = one_case("gpt2", "LN")
    store: dict[str, torch.Tensor] = {}
    value = f"{case.prefix}.hook_v"
    logits = run(case, [record(store, value, detach=False), zero_values(LAYER, 2)])
    (gradient,) = torch.autograd.grad(logits.sum(), store[value])
    assert (gradient[:, 2] == 0).all()
    assert (gradient[:, 1] != 0).any()


@pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens")
def test_compatibility_mode_fires_once() -> None:
    model = bridge("llama", torch.float64)
    model.enable_compatibility_mode(no_processing=True, disable_warnings=True)
    case = one_case("llama")
    for heads in (None, [1]):
        hook = zero_values(LAYER, 1, heads=heads)
        logits = model.run_with_hooks(tokens(model), fwd_hooks=[hook])
        assert hook[1].calls == 1
        torch.testing.assert_close(
            logits, run(case, [zero_values(LAYER, 1, heads=heads)]), rtol=0.0, atol=1e-5
        )


@pytest.mark.skipif(
    not available(bridge, "deepseek_v3") or available(bridge, "roberta"),
    reason="only the TransformerBridge of TransformerLens 3 hides how latent attention lays its values",
)
def test_latent_attention_that_does_not_tell_its_layout_is_refused() -> None:
    model = bridge("deepseek_v3")
    with pytest.raises(ValueError, match="latent attention"):
        model.run_with_hooks(tokens(model), fwd_hooks=[zero_values(LAYER, 1)])


@pytest.mark.skipif(not available(hooked_transformer, "grouped"), reason="no HookedTransformer here")
def test_heads_that_share_values_are_refused_with_cached_keys() -> None:
    import transformer_lens

    names = ("TransformerLensKeyValueCache", "HookedTransformerKeyValueCache")
    cache_class = next(getattr(transformer_lens, name) for name in names if hasattr(transformer_lens, name))
    model = hooked_transformer("grouped", tokenizer=toy_tokenizer())
    cache = cache_class.init_cache(model.cfg, "cpu", 1)
    model(tokens(model, batch=1), past_kv_cache=cache)
    with pytest.raises(RuntimeError, match="cached keys"):
        model.run_with_hooks(
            tokens(model, batch=1, seq=1), past_kv_cache=cache, fwd_hooks=[zero_values(0, 0, heads=1)]
        )


BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"position": " Italy"}, TypeError, "write position=m.positions(' Italy') with a map of the prompt"),
    ({"position": True}, TypeError, "position: expected an integer, got True"),
    ({"position": 1.0}, TypeError, "position: expected an integer, got 1.0"),
    ({"position": torch.tensor([1.0])}, TypeError, "got torch.float32 of shape (1,)"),
    ({"position": torch.tensor([[1]])}, TypeError, "got torch.int64 of shape (1, 1)"),
    ({"position": []}, ValueError, "position: expected at least one (an int, a list of them, a slice or a"),
    ({"position": [1, "2"]}, TypeError, "position: expected an integer, got '2'"),
    ({"position": 1, "heads": []}, ValueError, "heads: expected at least one (query heads as integers)"),
    (
        {"position": 1, "heads": [-1]},
        ValueError,
        "heads: expected query heads as integers, 0 or more",
    ),
    ({"position": 1, "heads": "0"}, TypeError, "heads: expected query heads as integers"),
    (
        {"position": 1, "heads": [0.5]},
        TypeError,
        "heads: expected query heads as integers, 0 or more",
    ),
    ({"position": 1, "layer": -1}, ValueError, "layer: expected an integer, 0 or more, got -1"),
    ({"position": 1, "layer": "0"}, TypeError, "layer: expected an integer, 0 or more, got '0'"),
    ({"position": 1, "attention": 3}, TypeError, "attention: expected the name of a module"),
    ({"position": 1, "attention": "blocks.{block}.attn"}, ValueError, "whose only placeholder is {layer}"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        zero_values(**{"layer": 0, **arguments})


BAD_IN_THE_PASS: list[tuple[dict[str, Any], str]] = [
    ({"position": 7}, "position: expected a position from -7 to 6, as there are 7; got 7"),
    ({"position": -8}, "got -8"),
    ({"position": [1, 9]}, "position: expected a position from -7 to 6"),
    ({"position": slice(7, 9)}, "position: expected a slice of 7 positions"),
    (
        {"position": torch.tensor([1, 2, 3])},
        "position: expected one position for each of 2 examples; got 3",
    ),
    ({"position": torch.tensor([1, 7])}, "got 7"),
    (
        {"position": torch.ones(2, 6, dtype=torch.bool)},
        "expected a bool tensor [2, 7] or [7]; got shape (2, 6)",
    ),
    ({"position": torch.ones(1, 7, dtype=torch.bool)}, "got shape (1, 7)"),
    ({"position": 1, "heads": [4]}, "heads: expected query heads from 0 to 3; got 4"),
]


@pytest.mark.parametrize("names", [("llama", "grouped"), ("gpt2", "LN")], ids=["grouped", "ungrouped"])
@pytest.mark.parametrize("chosen", [None, [0]], ids=["all heads", "chosen heads"])
@pytest.mark.parametrize(("arguments", "message"), BAD_IN_THE_PASS)
def test_what_the_model_does_not_have_is_an_error_in_the_pass(
    names: tuple[str, str], chosen: list[int] | None, arguments: dict[str, Any], message: str
) -> None:
    case = one_case(*names)
    hook = zero_values(LAYER, **{"heads": chosen, **arguments})
    with pytest.raises(ValueError, match=re.escape(message)):
        run(case, [hook])
    assert hook[1].calls == 0
    assert case.hooks_left() == 0


def test_a_batch_dimension_taken_away_is_refused() -> None:
    _, function = zero_values(0, 1)

    class Point:
        name = "blocks.0.attn.hook_v"

    with pytest.raises(ValueError, match="remove_batch_dim"):
        function(torch.zeros(7, 4, 6), hook=Point())
    Point.name = "blocks.1.attn.hook_v"
    with pytest.raises(ValueError, match=re.escape("hook: expected one of blocks.0.attn.hook_v")):
        function(torch.zeros(1, 7, 4, 6), hook=Point())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_pattern_depends_on_no_token(case: Case) -> None:
    model, name = case.model(), f"{case.prefix}.hook_pattern"
    patterns = []
    for seed in (0, 21):
        store: dict[str, torch.Tensor] = {}
        args, kwargs = inputs(model, seed=seed)
        with must_fire(zero_queries(LAYER, attention=case.attention)) as hooks, torch.no_grad():
            model.run_with_hooks(*args, **kwargs, fwd_hooks=[*hooks, record(store, name)])
        patterns.append(store[name])
    assert torch.equal(patterns[0], patterns[1])
    assert case.hooks_left() == 0


@pytest.mark.parametrize("case", UNBIASED, ids=str)
def test_every_key_that_was_seen_gets_the_same_weight(case: Case) -> None:
    pattern = observe(case, [zero_queries(LAYER, attention=case.attention)]).pattern
    seen = (clean(case).pattern != 0).to(pattern.dtype)
    torch.testing.assert_close(pattern, seen / seen.sum(dim=-1, keepdim=True), rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("case", UNBIASED, ids=str)
def test_positions_is_another_name_for_a_list(case: Case) -> None:
    named, plain = (
        observe(case, [zero_values(LAYER, attention=case.attention, **given)]).mixed
        for given in ({"positions": [2, 0]}, {"position": [2, 0]})
    )
    assert torch.equal(named, plain)
    assert not torch.equal(named, clean(case).mixed)


def test_either_position_or_positions_is_given() -> None:
    for given, said in (({}, "neither"), ({"position": 1, "positions": [1]}, "both")):
        with pytest.raises(TypeError, match=f"expected position or positions; got {said}"):
            zero_values(1, **given)
