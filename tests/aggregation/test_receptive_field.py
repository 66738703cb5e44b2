"""Test the normalization by the receptive field: its reference, its properties and its arithmetic."""

import math
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from benchmarks import rollout_and_flow
from lens_mix.aggregation import receptive_field, rollout
from lens_mix.maps import MixingMap

REFERENCE = Path(__file__).parents[1] / "reference" / "rfn_candidates.npz"
WEIGHTS = [0.0, 0.3, 0.5, 0.9, 1.0]


def triangle(size):
    return torch.ones(size, size, dtype=torch.bool).tril()


def window(size, width):
    return triangle(size) & ~triangle(size).tril(-width)


def prefix(size, length):
    mask = triangle(size)
    mask[:length, :length] = True
    return mask


def padding(size, real):
    return (torch.arange(size) < real).expand(size, size)


def first_key(size):
    return (torch.arange(size) == 0).expand(size, size)


def attention(mask, layers=4, heads=None, seed=0, spread=1.5):
    """Return random attention over the keys that `mask` allows."""
    size = mask.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, size, size) if heads is None else (layers, heads, size, size)
    logits = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = mask[:, None] if heads is not None and mask.ndim == 3 else mask
    return logits.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0)


def make(scores, mask=None, causal=False):
    tokens = [f" t{position}" for position in range(scores.shape[-1])]
    return MixingMap(scores, tokens, "attention", causal=causal, mask=mask)


def normalized(mixing_map, residual=0.5, **options):
    return rollout(mixing_map, residual=residual, receptive_field=True, **options).scores


MASKS = {
    "causal": triangle(7),
    "bidirectional": torch.ones(7, 7, dtype=torch.bool),
    "window": window(7, 3),
    "windows by layer": torch.stack([window(7, 2), triangle(7), window(7, 3), window(7, 4)]),
    "prefix": prefix(7, 3),
    "padding": padding(7, 5),
    "causal, left padding": triangle(7) & (torch.arange(7) >= 2),
    "causal without itself": triangle(7).tril(-1),
    "first key, then all": torch.stack([first_key(7), triangle(7), triangle(7), triangle(7)]),
    "all, then first key": torch.stack([triangle(7), first_key(7), first_key(7), first_key(7)]),
}


# ---------------------------------------------------------------------- the reference


@pytest.mark.parametrize("stack", ["L3n6", "L12n16"])
def test_equals_the_candidate_with_residual(stack):
    with np.load(REFERENCE) as file:
        maps, expected, target = (file[f"{stack}_{name}"] for name in ("att", "null_ratio_res", "B0"))
        plain, null = file[f"{stack}_plain"], file[f"{stack}_null"]
    layers, size = maps.shape[:2]
    mixing_map = make(maps, causal=True)
    assert np.abs(rollout(mixing_map).scores[-1].numpy() - plain).max() < 1e-12
    assert np.abs(normalized(mixing_map)[-1].numpy() - expected).max() < 1e-10
    even = receptive_field._make_uniform(triangle(size)).expand(layers, size, size)
    assert np.abs(rollout(make(even, causal=True)).scores[-1].numpy() - null).max() < 1e-12
    assert np.abs(normalized(make(even, causal=True))[-1].numpy() - target).max() < 1e-12
    # The candidate without residual differs, which shows that the comparison can fail.
    with np.load(REFERENCE) as file:
        assert np.abs(file[f"{stack}_null_ratio"] - expected).max() > 1e-4


def by_fractions(maps, masks, weight):
    """Return the last layer's rows by the definition, in exact fractions."""
    size, weight = len(maps[0]), Fraction(weight)
    every = range(size)
    identity = [[Fraction(int(i == j)) for j in every] for i in every]

    def mixed(rows):
        return [
            [(1 - weight) * rows[i][j] + weight * identity[i][j] for j in range(size)] for i in range(size)
        ]

    def product(left, right):
        return [
            [sum(left[i][k] * right[k][j] for k in range(size)) for j in range(size)] for i in range(size)
        ]

    def even(mask):
        return [[Fraction(int(seen), sum(row)) for seen in row] for row in mask]

    plain = null = reached = identity
    for rows, mask in zip(maps, masks, strict=True):
        plain, null = product(mixed(rows), plain), product(mixed(even(mask)), null)
        reached = product([[Fraction(int(seen)) for seen in row] for row in mask], reached)
    share = weight ** len(maps)
    target = even([[entry > 0 for entry in row] for row in reached])
    wanted = [[share * identity[i][j] + (1 - share) * target[i][j] for j in every] for i in every]
    result = []
    for i in every:
        row = [plain[i][j] * wanted[i][j] / null[i][j] if null[i][j] else Fraction(0) for j in every]
        result.append([float(entry / sum(row)) for entry in row])
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("name", ["causal", "window", "windows by layer", "prefix", "padding"])
@pytest.mark.parametrize("arithmetic", ["float64", "log"])
def test_equals_the_definition_in_fractions(name, weight, arithmetic):
    masks = MASKS[name].expand(4, 7, 7)
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(1, 50, (4, 7, 7), generator=generator) * masks
    exact = [[[Fraction(int(x), int(row.sum())) for x in row] for row in layer] for layer in counts]
    scores = counts.double() / counts.sum(-1, keepdim=True)
    maps = receptive_field.add_residual(scores.clone(), weight)
    result = receptive_field.normalize_rollout(maps, masks, weight, arithmetic=arithmetic)[-1]
    expected = by_fractions(exact, masks.int().tolist(), weight)
    assert torch.allclose(result, expected, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------- what it must do


@pytest.mark.parametrize("weight", WEIGHTS)
def test_bidirectional_maps_are_unchanged(weight):
    for mask in (MASKS["bidirectional"], MASKS["padding"]):
        for heads in (None, 2):
            mixing_map = make(attention(mask, heads=heads), mask=mask)
            plain = rollout(mixing_map, residual=weight).scores
            assert torch.allclose(normalized(mixing_map, weight), plain, rtol=0, atol=1e-14)


def test_bidirectional_maps_with_an_empty_row_are_unchanged():
    scores = attention(MASKS["bidirectional"])
    scores[1, 2] = 0
    mixing_map = make(scores)
    plain = rollout(mixing_map, residual=0).scores
    assert plain[-1].sum() < 6.99
    assert torch.allclose(normalized(mixing_map, 0.0), plain, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", MASKS)
def test_even_attention_without_residual_comes_out_even(name):
    masks = MASKS[name].expand(4, 7, 7)
    result = normalized(make(receptive_field._make_uniform(masks), mask=masks), 0.0)
    for place in range(4):
        reached = masks[0].double()
        for mask in masks[1 : place + 1]:
            reached = mask.double() @ reached
        even = receptive_field._make_uniform(reached > 0)
        # A row sums to less than 1 if some path from its position ends at one that sees nothing.
        mass = result[place].sum(-1, keepdim=True)
        assert torch.allclose(result[place], even * mass, rtol=0, atol=1e-14)


def test_even_attention_with_residual_is_even_but_for_the_diagonal():
    result = normalized(make(receptive_field._make_uniform(triangle(8).expand(12, 8, 8)), causal=True))
    for place, rows in enumerate(result):
        share = 0.5 ** (place + 1)
        for query, row in enumerate(rows):
            even = (1 - share) / (query + 1)
            assert row[:query].tolist() == pytest.approx([even] * query)
            assert row[query].item() == pytest.approx(even + share)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(MASKS)),
    st.sampled_from([None, 2]),
    st.sampled_from(WEIGHTS),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
def test_rows_keep_their_mass_and_their_support(name, heads, weight, layers, seed):
    mask = MASKS[name]
    mask = mask[:layers] if mask.ndim == 3 else mask
    mixing_map = make(attention(mask, layers, heads, seed), mask=mask)
    plain = rollout(mixing_map, residual=weight, per_head=heads is not None).scores
    result = normalized(mixing_map, weight, per_head=heads is not None)
    assert torch.isfinite(result).all()
    assert torch.equal(result > 0, plain > 0)
    assert torch.allclose(result.sum(-1), plain.sum(-1), rtol=0, atol=1e-13)
    if name not in ("causal, left padding", "causal without itself"):
        assert torch.allclose(result.sum(-1), torch.ones_like(result.sum(-1)), rtol=0, atol=1e-13)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", ["causal", "window", "windows by layer", "prefix"])
def test_later_tokens_change_nothing(name, weight):
    """Check that the rows of the first tokens equal those of the map of the first tokens alone."""
    mask = MASKS[name]
    mixing_map = make(attention(mask), mask=mask)
    shorter = mixing_map.drop([5, 6])
    assert torch.equal(shorter.scores, mixing_map.scores[:, :5, :5])
    whole = normalized(mixing_map, weight)
    assert torch.allclose(normalized(shorter, weight), whole[:, :5, :5], rtol=0, atol=1e-15)
    assert whole[:, :5, 5:].abs().sum() == 0


@pytest.mark.parametrize("weight", WEIGHTS)
def test_padding_changes_nothing(weight):
    """Check that with right padding, the real rows equal those of the prompt alone."""
    for mask in (padding(7, 5), triangle(7) & padding(7, 5)):
        mixing_map = make(attention(mask), mask=mask)
        alone = make(mixing_map.scores[:, :5, :5], mask=mask[:5, :5])
        padded = normalized(mixing_map, weight)[:, :5, :5]
        assert torch.allclose(padded, normalized(alone, weight), rtol=0, atol=1e-14)


def test_left_padding_changes_nothing():
    mask = MASKS["causal, left padding"]
    for weight in (0.0, 0.5):
        mixing_map = make(attention(mask), mask=mask)
        alone = make(mixing_map.scores[:, 2:, 2:], causal=True)
        padded = normalized(mixing_map, weight)
        assert torch.allclose(padded[:, 2:, 2:], normalized(alone, weight), rtol=0, atol=1e-14)


@pytest.mark.parametrize("layers", [4, 300, 500])
def test_a_position_that_sees_nothing_keeps_itself_at_every_depth(layers):
    mask = MASKS["causal, left padding"]
    result = normalized(make(attention(mask, layers), mask=mask), 0.01)[-1]
    assert torch.allclose(result[:2], torch.eye(7, dtype=torch.float64)[:2])


def test_a_flag_and_a_mask_are_the_same():
    scores = attention(triangle(7))
    flag = normalized(make(scores, causal=True))
    assert torch.equal(flag, normalized(make(scores, mask=triangle(7))))
    assert torch.equal(flag, normalized(make(scores, mask=triangle(7).expand(4, 7, 7), causal=True)))
    with pytest.warns(UserWarning, match="causal=True"):
        without = rollout(make(scores), receptive_field=True)
    assert torch.allclose(without.scores, rollout(make(scores)).scores)
    assert "causal=True" in without.notes[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rollout(make(attention(torch.ones(7, 7, dtype=torch.bool))), receptive_field=True)


def test_every_depth_is_normalized_at_its_own_depth():
    scores = attention(triangle(7), layers=5)
    whole = normalized(make(scores, causal=True))
    for depth in range(1, 6):
        assert torch.allclose(whole[depth - 1], normalized(make(scores[:depth], causal=True))[-1], atol=1e-15)
    upper = normalized(make(scores, causal=True), from_layer=2)
    assert torch.allclose(upper, normalized(make(scores[2:], causal=True)), rtol=0, atol=1e-15)


def test_one_layer_without_residual_is_unchanged():
    scores = attention(triangle(7), layers=1)
    assert torch.allclose(normalized(make(scores, causal=True), 0.0), scores, rtol=0, atol=1e-15)


def test_drop_bos_comes_first():
    scores = attention(triangle(7))
    dropped = scores[:, 1:, 1:].clone()
    dropped[:, 0, 0] = 1
    expected = normalized(make(dropped / dropped.sum(-1, keepdim=True), causal=True))
    result = normalized(make(scores, causal=True), drop_bos=True)
    assert torch.allclose(result, expected, rtol=0, atol=1e-14)


def test_per_head():
    mixing_map = make(attention(triangle(7), heads=3), causal=True)
    result = normalized(mixing_map, per_head=True)
    plain = rollout(mixing_map, per_head=True).scores
    merged, merged_plain = normalized(mixing_map), rollout(mixing_map).scores
    # Each head has the same factors as the merged heads, except for the scale of each row.
    factor = torch.where(plain > 0, result / plain, 0.0)
    expected = torch.where(merged_plain > 0, merged / merged_plain, 0.0)[:, None]
    scale = factor[..., :1] / expected[..., :1]
    assert torch.allclose(factor, expected * scale, rtol=1e-10)
    assert torch.allclose(result.sum(-1), torch.ones(4, 3, 7, dtype=torch.float64))


# ---------------------------------------------------------------------- a planted key


@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_it_finds_a_planted_key(weight):
    """Check that a key that each of 12 layers prefers (by e^1.5) has the largest share of the last row."""
    layers, size, trials = 12, 32, 20
    found, slopes = {False: 0, True: 0}, {False: [], True: []}
    generator = torch.Generator().manual_seed(0)
    for _ in range(trials):
        key = int(torch.randint(1, size - 1, (1,), generator=generator))
        logits = 0.5 * torch.randn(layers, size, size, generator=generator, dtype=torch.float64)
        logits[:, :, key] += 1.5
        mixing_map = make(logits.masked_fill(~triangle(size), -torch.inf).softmax(-1), causal=True)
        others = [position for position in range(size - 1) if position != key]
        for choice in (False, True):
            row = rollout(mixing_map, residual=weight, receptive_field=choice).scores[-1, -1]
            found[choice] += int(row.argmax()) == key
            slopes[choice].append(spearmanr(others, row[others]).statistic)
    assert found[False] <= 0.06 * trials
    assert found[True] == trials
    assert np.mean(slopes[False]) < -0.99
    assert abs(np.mean(slopes[True])) < 0.15


# ---------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_both_ways_agree_at_depth_48_and_96_tokens(weight):
    masks = triangle(96).expand(48, 96, 96)
    maps = receptive_field.add_residual(attention(triangle(96), layers=48), weight)
    assert receptive_field._float64_suffices(receptive_field.null_maps(masks, weight), weight)
    numbers = receptive_field.normalize_rollout(maps, masks, weight, arithmetic="float64")
    logs = receptive_field.normalize_rollout(maps, masks, weight, arithmetic="log")
    assert torch.equal(receptive_field.normalize_rollout(maps, masks, weight), numbers)
    assert torch.allclose(logs, numbers, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("heads", [None, 2])
def test_both_ways_agree_on_every_mask(name, weight, heads):
    mask = MASKS[name]
    scores = attention(mask, heads=heads)
    masks = mask.expand(4, 7, 7)
    maps = receptive_field.add_residual(scores.clone() if heads is None else scores.mean(1), weight)
    separate = None if heads is None else receptive_field.add_residual(scores.clone(), weight)
    numbers = receptive_field.normalize_rollout(maps, masks, weight, separate, arithmetic="float64")
    logs = receptive_field.normalize_rollout(maps, masks, weight, separate, arithmetic="log")
    assert torch.allclose(logs, numbers, rtol=1e-12, atol=1e-14)


def test_logarithms_where_float64_fails():
    """Check 400 layers of uniform attention, where the plain rollout of the last of 64 keys is 64^−400."""
    masks = triangle(64).expand(400, 64, 64)
    null = receptive_field.null_maps(masks, 0.0)
    assert not receptive_field._float64_suffices(null, 0.0)
    broken = receptive_field.normalize_rollout(null, masks, 0.0, arithmetic="float64")[-1]
    assert not torch.allclose(broken, receptive_field._make_uniform(triangle(64)))
    result = receptive_field.normalize_rollout(null, masks, 0.0)[-1]
    assert torch.allclose(result, receptive_field._make_uniform(triangle(64)), rtol=1e-9, atol=0)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(MASKS)), st.integers(1, 400), st.sampled_from([0.0, 1e-9, 0.5, 1 - 1e-9, 1.0]))
def test_the_bound_holds(name, layers, weight):
    """Check that no entry of the null model's rollout underflows if `_float64_suffices` is True."""
    mask = MASKS[name]
    masks = mask[torch.arange(layers) % len(mask)] if mask.ndim == 3 else mask.expand(layers, 7, 7)
    null = receptive_field.null_maps(masks, weight)
    smallest = math.exp(-700)
    if receptive_field._float64_suffices(null, weight):
        rolled = receptive_field.cumulative(null)
        positive = [null[0] > 0]
        for layer in null[1:]:
            positive.append(receptive_field.compose(layer > 0, positive[-1]))
        assert (rolled[torch.stack(positive)] > smallest).all()


@pytest.mark.parametrize("weight", [1e-12, 1 - 1e-12])
def test_extreme_residuals_stay_finite(weight):
    for name in MASKS:
        result = normalized(make(attention(MASKS[name]), mask=MASKS[name]), weight)
        assert torch.isfinite(result).all()
        assert torch.allclose(result.sum(-1), torch.ones(4, 7, dtype=torch.float64))


def test_unknown_arithmetic_is_refused():
    masks = triangle(3).expand(1, 3, 3)
    with pytest.raises(ValueError, match="arithmetic: expected 'auto', 'float64' or 'log', got 'float32'"):
        receptive_field.normalize_rollout(masks.double(), masks, 0.5, arithmetic="float32")


def test_reachable():
    masks = torch.stack([window(4, 2), window(4, 2), torch.eye(4, dtype=torch.bool)])
    reached = receptive_field.reachable(masks, 0.0)
    assert torch.equal(reached[0], window(4, 2))
    assert torch.equal(reached[1], window(4, 3))
    assert torch.equal(reached[2], window(4, 3))
    narrowing = torch.stack([triangle(4), first_key(4)])
    assert torch.equal(receptive_field.reachable(narrowing, 0.5)[1], triangle(4))
    assert torch.equal(receptive_field.reachable(narrowing, 0.0)[1], first_key(4))
    assert torch.equal(receptive_field.reachable(narrowing.flip(0), 0.5)[1], triangle(4))
    itself = triangle(4).tril(-1).expand(2, 4, 4)
    assert torch.equal(receptive_field.reachable(itself, 0.0)[1], triangle(4).tril(-2))
    assert torch.equal(receptive_field.reachable(itself, 0.5)[1], triangle(4).tril(-1))


# ---------------------------------------------------------------------- the recorded results


@pytest.mark.slow
@pytest.mark.parametrize("heading", [name for name in rollout_and_flow.SECTIONS if "SmolLM2" not in name])
def test_the_recorded_results_are_measured_again(heading):
    """Check what docs/evidence/aggregation.md quotes, apart from what needs a trained model."""
    assert rollout_and_flow.section(heading) in rollout_and_flow.OUT.read_text(encoding="utf-8")


# ---------------------------------------------------------------------- maps that hold the residual


def holding(scores, weights, mask=None):
    """Return attention maps with the residual mixed in, with one of `weights` per layer and `residual=0`."""
    weights = torch.as_tensor(weights, dtype=torch.float64)[:, None, None]
    identity = torch.eye(scores.shape[-1], dtype=torch.float64)
    mixed = (1 - weights) * scores + weights * identity
    return make(mixed, mask=mask, causal=mask is None).replace(method="attn_res", residual=0.0)


WEIGHTS_BY_LAYER = [0.3, 0.9, 0.5, 0.0]


def test_even_attention_that_holds_the_residual_comes_out_even():
    """Compare with the rollout that mixes in the same weights."""
    even = receptive_field._make_uniform(triangle(7)).expand(4, 7, 7)
    result = rollout(holding(even, WEIGHTS_BY_LAYER), receptive_field=True).scores
    share = 1.0
    for weight, rows in zip(WEIGHTS_BY_LAYER, result, strict=True):
        share *= weight
        expected = share * torch.eye(7, dtype=torch.float64) + (1 - share) * even[0]
        assert torch.allclose(rows, expected, rtol=0, atol=1e-14)


def test_bidirectional_maps_that_hold_the_residual_are_unchanged():
    mask = MASKS["bidirectional"]
    mixing_map = holding(attention(mask), WEIGHTS_BY_LAYER, mask)
    plain = rollout(mixing_map).scores
    assert torch.allclose(rollout(mixing_map, receptive_field=True).scores, plain, rtol=0, atol=1e-14)


def test_what_is_mixed_in_counts_too():
    """Mix in a weight on top of the map's own residual; no layer can have a smaller one."""
    even = receptive_field._make_uniform(triangle(7)).expand(4, 7, 7)
    held = receptive_field.estimate_residual(
        receptive_field.add_residual(holding(even, WEIGHTS_BY_LAYER).scores.clone(), 0.2),
        triangle(7).expand(4, 7, 7),
        0.2,
    )
    assert held[:, 0].tolist() == pytest.approx([1 - 0.8 * (1 - weight) for weight in WEIGHTS_BY_LAYER])
    less = torch.zeros(1, 7, 7, dtype=torch.float64)
    less[:, :, 0] = 1
    assert receptive_field.estimate_residual(less, triangle(7)[None], 0.25).unique().tolist() == [0.25]


def test_a_deep_map_that_holds_the_residual_is_not_the_position():
    """Find a planted key in 30 layers with residual 0.95, which needs a null model with the same residual."""
    generator = torch.Generator().manual_seed(0)
    found = {"held": 0, "moving": 0}
    ordered = 0
    for _ in range(20):
        key = int(torch.randint(2, 31, (1,), generator=generator))
        logits = 0.5 * torch.randn(30, 32, 32, generator=generator, dtype=torch.float64)
        logits[:, :, key] += 1.5
        scores = logits.masked_fill(~triangle(32), -torch.inf).softmax(-1)
        mixing_map = holding(scores, [0.95] * 30)
        row = rollout(mixing_map, receptive_field=True).scores[-1, -1, :-1]
        moving = receptive_field.normalize_rollout(
            mixing_map.scores.clone(), triangle(32).expand(30, 32, 32), 0.0
        )[-1, -1, :-1]
        ordered += int(bool((moving.diff() > 0).all()))
        found["held"] += int(row.argmax()) == key
        found["moving"] += int(moving.argmax()) == key
    assert found == {"held": 20, "moving": 0}
    assert ordered == 20


# ---------------------------------------------------------------------- measured shares


def test_measured_shares_that_are_all_alike_are_a_residual():
    mixing_map = make(attention(triangle(7), heads=2), causal=True)
    measured = mixing_map.replace(residual_shares=torch.full((4, 7), 0.3, dtype=torch.float64))
    for options in ({}, {"receptive_field": True}, {"per_head": True}, {"from_layer": 1, "drop_bos": True}):
        expected = rollout(mixing_map, residual=0.3, **options).scores
        result = rollout(measured, residual="measured", **options).scores
        assert torch.allclose(result, expected, rtol=0, atol=1e-14)


def test_even_attention_with_measured_shares_comes_out_even_but_for_the_diagonal():
    shares = torch.rand(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    even = receptive_field._make_uniform(triangle(7)).expand(5, 7, 7)
    measured = make(even, causal=True).replace(residual_shares=shares)
    result = rollout(measured, residual="measured", receptive_field=True).scores
    stayed = shares.cumprod(0)
    expected = torch.diag_embed(stayed) + (1 - stayed)[..., None] * even
    assert torch.allclose(result, expected, rtol=0, atol=1e-13)


def test_measured_shares_in_logarithms_agree():
    masks = triangle(7).expand(5, 7, 7)
    shares = torch.rand(5, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    maps = receptive_field.add_residual(attention(triangle(7), layers=5), shares)
    numbers = receptive_field.normalize_rollout(maps.clone(), masks, shares, arithmetic="float64")
    logs = receptive_field.normalize_rollout(maps.clone(), masks, shares, arithmetic="log")
    assert torch.allclose(numbers, logs, rtol=1e-10)
    shares[2, 3] = 1.0
    assert not receptive_field._float64_suffices(receptive_field.null_maps(masks, shares), shares)
    assert torch.isfinite(receptive_field.normalize_rollout(maps, masks, shares)).all()
