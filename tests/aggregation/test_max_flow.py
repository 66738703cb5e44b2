"""Test maximum flow against networkx, and its bounds."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_mix.aggregation import max_flow
from lens_mix.aggregation.flow_bounds import find_pairs_at_bound, first_layer_bound
from lens_mix.aggregation.flow_rows import compute_flows

CLOSE = {"rtol": 0, "atol": 2e-8}


def stack(layers, size, causal=False, seed=0, sharpness=2.0, residual=0.5, density=1.0):
    """Return capacities whose rows sum to 1, or are zero if `density` removes all keys without a residual."""
    generator = np.random.default_rng(seed)
    weights = np.exp(sharpness * generator.standard_normal((layers, size, size)))
    weights *= generator.random(weights.shape) < density
    if causal:
        weights = np.tril(weights)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total > 0, total, 1)
    mixed = (1 - residual) * weights + residual * np.eye(size)
    if residual > 0:
        mixed = np.where(total > 0, mixed, np.eye(size))
    return mixed


def all_flows(capacities, solver="scipy", **options):
    layers, size, _ = capacities.shape
    return compute_flows(capacities, range(1, layers + 1), range(size), solver, **options)


stacks = st.builds(
    stack,
    layers=st.integers(1, 6),
    size=st.integers(1, 6),
    causal=st.booleans(),
    seed=st.integers(0, 10**6),
    sharpness=st.sampled_from([0.0, 1.0, 4.0]),
    residual=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    density=st.sampled_from([1.0, 0.5, 0.2]),
)


# ---------------------------------------------------------------------- against networkx


@settings(max_examples=30, deadline=None)
@given(stacks)
def test_equals_networkx(capacities):
    np.testing.assert_allclose(all_flows(capacities), all_flows(capacities, "networkx"), **CLOSE)


@settings(max_examples=30, deadline=None)
@given(stacks, st.floats(1e-6, 1e6))
def test_capacities_of_any_size(capacities, factor):
    np.testing.assert_allclose(all_flows(capacities * factor) / factor, all_flows(capacities), **CLOSE)


def test_capacities_that_do_not_come_from_rows_that_sum_to_1():
    capacities = 7 * np.random.default_rng(0).random((4, 5, 5))
    expected = all_flows(capacities, "networkx")
    np.testing.assert_allclose(all_flows(capacities), expected, rtol=0, atol=1e-6)
    assert expected.max() > 7


def test_a_window_of_attention_uses_its_own_pattern():
    band = np.tril(np.ones((9, 9))) - np.tril(np.ones((9, 9)), -3)
    capacities = np.stack([band / band.sum(1, keepdims=True)] * 5) * 0.5 + 0.5 * np.eye(9)
    flows = all_flows(capacities)
    np.testing.assert_allclose(flows, all_flows(capacities, "networkx"), **CLOSE)
    assert flows[0, 8, 5] == 0
    assert flows[1, 8, 4] > 0


def test_windows_of_one_width_may_have_different_patterns():
    allowed = np.tril(np.random.default_rng(5).random((8, 8)) < 0.4) | np.eye(8, dtype=bool)
    capacities = allowed * stack(4, 8, causal=True)
    np.testing.assert_allclose(all_flows(capacities), all_flows(capacities, "networkx"), **CLOSE)


def test_one_and_two_layers_are_exact():
    capacities = stack(2, 7)
    flows = all_flows(capacities)
    np.testing.assert_array_equal(flows[0], capacities[0])
    expected = np.minimum(capacities[1][:, :, None], capacities[0][None]).sum(1)
    np.testing.assert_allclose(flows[1], expected, rtol=0, atol=1e-15)


def test_a_narrow_middle_limits_the_flow():
    # The first and the last layer have a capacity of 1, but the second layer only of 0.25.
    top, first = np.full((2, 2), 0.5), np.full((2, 2), 0.5)
    middle = np.array([[0.125, 0.0], [0.0, 0.125]])
    flows = all_flows(np.stack([first, middle, top]))
    np.testing.assert_allclose(flows[2], np.full((2, 2), 0.25), **CLOSE)


# ---------------------------------------------------------------------- properties


@settings(max_examples=40, deadline=None)
@given(stacks)
def test_never_above_what_leaves_the_query_or_enters_the_key(capacities):
    flows = all_flows(capacities)
    for level, found in enumerate(flows, start=1):
        leaves, enters = capacities[level - 1].sum(1), capacities[0].sum(0)
        assert (found <= np.minimum(leaves[:, None], enters[None, :]) + 1e-8).all()
        assert (found <= first_layer_bound(capacities, level) + 1e-8).all()
        assert (found >= 0).all()


@settings(max_examples=40, deadline=None)
@given(stacks, st.data())
def test_more_capacity_never_means_less_flow(capacities, data):
    layers, size, _ = capacities.shape
    layer = data.draw(st.integers(0, layers - 1))
    query, key = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    wider = capacities.copy()
    wider[layer, query, key] += data.draw(st.floats(0, 2))
    assert (all_flows(wider) >= all_flows(capacities) - 1e-7).all()


@settings(max_examples=20, deadline=None)
@given(stacks)
def test_the_rollout_is_a_flow_so_no_maximum_is_below_it(capacities):
    rolled = np.eye(capacities.shape[1])
    for matrix, flows in zip(capacities, all_flows(capacities), strict=True):
        rolled = matrix @ rolled
        assert (flows >= rolled - 1e-8).all()


@pytest.mark.parametrize("residual", [0.0, 0.5])
def test_nothing_flows_from_later_tokens(residual):
    flows = all_flows(stack(5, 8, causal=True, residual=residual))
    assert (np.triu(flows, 1) == 0).all()
    assert (flows[:, range(8), range(8)] > 0).all()


def test_pairs_solved_together_are_as_pairs_solved_alone(monkeypatch):
    capacities = stack(6, 9, causal=True, density=0.6)
    together = all_flows(capacities)
    monkeypatch.setattr(max_flow, "_EDGES_PER_CALL", 0)
    np.testing.assert_array_equal(all_flows(capacities), together)


def test_levels_asked_for_together_are_as_levels_alone():
    # Computed together, the flows of a level can show those of the next level.
    capacities = stack(8, 10, sharpness=1.0)
    together = all_flows(capacities)
    for level in range(1, 9):
        alone = compute_flows(capacities, [level], range(10))[0]
        np.testing.assert_allclose(together[level - 1], alone, rtol=0, atol=2e-9)


def test_rows_and_keys_can_be_asked_for_alone():
    capacities = stack(5, 6, seed=3)
    whole = all_flows(capacities)
    alone = compute_flows(capacities, [4], [5, 2], keys=[0, 3])
    np.testing.assert_array_equal(alone[0][:, [0, 3]], whole[3][[5, 2]][:, [0, 3]])
    assert (alone[0][:, [1, 2, 4, 5]] == 0).all()


# ---------------------------------------------------------------------- pairs at the bound


@settings(max_examples=30, deadline=None)
@given(
    st.integers(3, 10),
    st.integers(2, 7),
    st.integers(0, 10**6),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.2, 0.5]),
    st.sampled_from([1.0, 0.7]),
)
def test_pairs_at_the_bound_have_that_flow(layers, size, seed, sharpness, residual, density):
    capacities = stack(layers, size, seed=seed, sharpness=sharpness, residual=residual, density=density)
    at_bound = find_pairs_at_bound(capacities)
    solved = compute_flows(capacities, [layers], range(size), "networkx")[0]
    bound = first_layer_bound(capacities, layers)
    np.testing.assert_allclose(solved[at_bound], bound[at_bound], rtol=0, atol=1e-9)


@pytest.mark.parametrize("first_token", [0.0, 4.0])
@pytest.mark.parametrize(("layers", "size"), [(12, 32), (24, 16)])
def test_most_pairs_of_deep_bidirectional_stacks_are_at_the_bound(layers, size, first_token):
    # The mean of four heads is like a layer map of attention, in which the first token may have most weight.
    generator = np.random.default_rng(0)
    logits = 2 * generator.standard_normal((layers, 4, size, size))
    logits[..., 0] += first_token
    weights = np.exp(logits)
    weights = (weights / weights.sum(-1, keepdims=True)).mean(1)
    assert find_pairs_at_bound(0.5 * weights + 0.5 * np.eye(size)).mean() > 0.8


def test_no_pair_is_found_in_shallow_or_causal_stacks_or_with_other_row_sums():
    deep = stack(12, 8)
    assert find_pairs_at_bound(deep).all()
    assert not find_pairs_at_bound(deep * 0.5).any()
    assert not find_pairs_at_bound(deep[:2]).any()
    assert not find_pairs_at_bound(stack(12, 8, causal=True)).any()


def test_the_bound_of_causal_stacks_counts_the_tokens_between_only():
    capacities = stack(4, 6, causal=True)
    bound = first_layer_bound(capacities, 4)
    expected = min(capacities[3][4, 2:5].sum(), capacities[0][2:5, 2].sum())
    assert bound[4, 2] == pytest.approx(expected, abs=1e-15)
    assert bound[2, 4] == 0


# ---------------------------------------------------------------------- several processes


@pytest.mark.slow
def test_processes_give_the_same():
    capacities = stack(4, 6, causal=True)
    np.testing.assert_array_equal(all_flows(capacities, processes=2), all_flows(capacities))


def test_progress_counts_the_pairs(capsys):
    all_flows(stack(3, 4, causal=True), progress=True)
    printed = capsys.readouterr().err
    assert "flow" in printed
    done, total = re.findall(r"(\d+)/(\d+)", printed)[-1]
    assert done == total
    assert int(total) > 16


# ---------------------------------------------------------------------- nothing flows


def test_no_capacity_at_all_is_no_flow():
    assert (all_flows(np.zeros((4, 3, 3))) == 0).all()
    assert (all_flows(np.zeros((4, 3, 3)), "networkx") == 0).all()
