"""Test measures of agreement against numbers by hand and against other libraries, and their intervals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch

from lens_mix.evaluation import (
    average_precision,
    bootstrap,
    mass_accuracy,
    partial_spearman,
    reciprocal_rank,
    spearman,
    top_k_overlap,
)


def row(*scores: float) -> torch.Tensor:
    return torch.tensor(scores, dtype=torch.float64)


def mask(*relevant: int) -> torch.Tensor:
    return torch.tensor(relevant, dtype=torch.bool)


def random_rows(keys: int, ties: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pair = torch.rand(2, keys, generator=generator, dtype=torch.float64)
    first, second = (pair * 4).round() if ties else pair
    return first, second


# ------------------------------------------------------------------ correlations


def test_spearman_by_hand():
    # The ranks are 1 2 3 4 and 1 3 2 4, so the correlation is 1 - 6 * 2 / (4 * 15).
    assert spearman(row(1, 2, 3, 4), row(0.1, 0.3, 0.2, 9)) == pytest.approx(0.8)
    assert spearman(row(1, 2, 3), row(3, 2, 1)) == pytest.approx(-1)


@pytest.mark.parametrize("ties", [False, True])
def test_spearman_is_scipys(ties):
    x, y = random_rows(9, ties, 3)
    assert spearman(x, y) == pytest.approx(scipy.stats.spearmanr(x.numpy(), y.numpy()).statistic)


def residuals(values: np.ndarray, given: np.ndarray) -> np.ndarray:
    line = np.column_stack([given, np.ones_like(given)])
    return values - line @ np.linalg.lstsq(line, values, rcond=None)[0]


@pytest.mark.parametrize("given", [None, row(3, 1, 4, 1, 5, 9, 2, 6, 5)], ids=["position", "given"])
@pytest.mark.parametrize("ties", [False, True])
def test_partial_correlation_is_that_of_the_residuals_of_ranks(ties, given):
    x, y = random_rows(9, ties, 5)
    z = torch.arange(9.0) if given is None else given
    ranks = [scipy.stats.rankdata(one.numpy()) for one in (x, y, z)]
    left = [residuals(one, ranks[2]) for one in ranks[:2]]
    expected = scipy.stats.pearsonr(*left).statistic
    assert partial_spearman(x, y, given) == pytest.approx(expected, abs=1e-12)


def test_partial_correlation_by_hand():
    # Σ d² is 8 between the rows, and 2 and 6 to the position. r = 1 - Σ d² / 10.
    x, y = row(1, 3, 2, 4), row(3, 1, 2, 4)
    r = [spearman(x, y), spearman(x, torch.arange(4.0)), spearman(y, torch.arange(4.0))]
    assert r == pytest.approx([0.2, 0.8, 0.4])
    expected = (0.2 - 0.8 * 0.4) / math.sqrt((1 - 0.64) * (1 - 0.16))
    assert partial_spearman(x, y) == pytest.approx(expected)


def test_a_row_that_is_the_position_has_no_partial_correlation():
    importance = row(5, 1, 4, 2, 3, 9, 7)
    for position in (torch.arange(7.0), -torch.arange(7.0), torch.arange(7.0).exp()):
        assert math.isnan(partial_spearman(position, importance))
        assert not math.isnan(spearman(position, importance))


@pytest.mark.parametrize("measure", [spearman, partial_spearman])
@pytest.mark.parametrize("pair", [(row(1), row(2)), (row(), row()), (row(2, 2, 2, 2), row(1, 4, 2, 3))])
def test_correlations_that_are_not_defined(measure, pair):
    assert math.isnan(measure(*pair))


def test_two_keys_leave_nothing_to_partial_out():
    assert spearman(row(1, 2), row(1, 2)) == pytest.approx(1)
    assert math.isnan(partial_spearman(row(1, 2), row(1, 2)))


# ------------------------------------------------------------------ top k


def test_overlap_by_hand():
    assert top_k_overlap(row(9, 8, 1, 0), row(9, 0, 8, 1), 2) == 0.5
    assert top_k_overlap(row(9, 8, 1, 0), row(8, 9, 0, 1), 2) == 1
    assert top_k_overlap(row(9, 8, 1, 0), row(0, 1, 8, 9), 2) == 0
    assert top_k_overlap(row(1, 2, 3), row(3, 2, 1), 3) == 1
    assert math.isnan(top_k_overlap(row(1, 2), row(1, 2), 3))


def every_order(scores: torch.Tensor) -> list[list[int]]:
    """Yield all orders by descending score that ties allow."""
    orders = itertools.permutations(range(len(scores)))
    return [list(order) for order in orders if bool((scores[list(order)].diff() <= 0).all())]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [1, 2, 4])
def test_ties_count_as_the_mean_over_their_orders(seed, k):
    x, y = ((one / 2).round() for one in random_rows(5, True, seed))
    shared = [len(set(a[:k]) & set(b[:k])) / k for a in every_order(x) for b in every_order(y)]
    assert top_k_overlap(x, y, k) == pytest.approx(np.mean(shared))


def test_a_constant_row_overlaps_by_chance():
    assert top_k_overlap(row(1, 1, 1, 1, 1), row(1, 2, 3, 4, 5), 2) == pytest.approx(0.4)


# ------------------------------------------------------------------ relevant keys


def test_average_precision_by_hand():
    # The relevant keys are first and third: (1 / 1 + 2 / 3) / 2.
    assert average_precision(row(9, 8, 7, 1), mask(1, 0, 1, 0)) == pytest.approx(5 / 6)
    assert average_precision(row(1, 2, 3), mask(1, 0, 0)) == pytest.approx(1 / 3)
    assert average_precision(row(3, 2, 1), mask(1, 1, 1)) == 1
    # This is scikit-learn's own example: average_precision_score([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]) is
    # 0.83...
    assert average_precision(row(0.1, 0.4, 0.35, 0.8), mask(0, 0, 1, 1)) == pytest.approx(0.8333333)
    # Tied keys enter together, at one threshold with precision 2 / 3 and recall 1.
    assert average_precision(row(2, 2, 2, 1), mask(1, 1, 0, 0)) == pytest.approx(2 / 3)
    assert average_precision(row(1, 1, 1, 1), mask(0, 1, 0, 0)) == 0.25
    assert math.isnan(average_precision(row(1, 2), mask(0, 0)))


def average_precision_by_thresholds(scores, relevant) -> float:
    """Return Σ (R_n - R_{n-1}) P_n, threshold by threshold."""
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        found = scores >= threshold
        recall = float((found & relevant).sum() / relevant.sum())
        total += (recall - before) * float((found & relevant).sum() / found.sum())
        before = recall
    return total


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_average_precision_by_its_definition(ties, seed):
    x, y = random_rows(11, ties, seed)
    relevant = y > y.median()
    expected = average_precision_by_thresholds(x, relevant)
    assert average_precision(x, relevant) == pytest.approx(expected)


def test_reciprocal_rank_by_hand():
    assert reciprocal_rank(row(9, 8, 7), mask(0, 0, 1)) == pytest.approx(1 / 3)
    assert reciprocal_rank(row(9, 8, 7), mask(0, 1, 1)) == 0.5
    # One of two tied keys is relevant, so it is first or second.
    assert reciprocal_rank(row(5, 5), mask(1, 0)) == pytest.approx(0.75)
    assert math.isnan(reciprocal_rank(row(5, 4), mask(0, 0)))


@pytest.mark.parametrize("seed", range(5))
def test_reciprocal_rank_is_the_mean_over_the_orders_of_ties(seed):
    x, y = ((one / 2).round() for one in random_rows(6, True, seed))
    relevant = y >= y.median()
    ranks = [min(place for place, key in enumerate(order, 1) if relevant[key]) for order in every_order(x)]
    assert reciprocal_rank(x, relevant) == pytest.approx(np.mean([1 / rank for rank in ranks]))


def test_mass_accuracy_by_hand():
    assert mass_accuracy(row(1, 2, 3, 4), mask(1, 0, 0, 1)) == 0.5
    assert mass_accuracy(row(1, -7, 3), mask(1, 1, 0)) == 0.25
    assert math.isnan(mass_accuracy(row(-1, 0, -2), mask(1, 0, 0)))
    assert math.isnan(mass_accuracy(row(1, 2), mask(0, 0)))


# ------------------------------------------------------------------ intervals


def test_the_interval_is_studentised():
    """The interval equals its definition, and is close to Student's for normal values."""
    values = np.random.default_rng(1).normal(2, 1, 25)
    found = bootstrap(torch.tensor(values), draws=20_000)
    drawn = np.random.default_rng(5).choice(values, (20_000, len(values)))
    t = (drawn.mean(1) - values.mean()) / scipy.stats.sem(drawn, axis=1)
    expected = values.mean() - np.quantile(t, [0.975, 0.025]) * scipy.stats.sem(values)
    assert (found.mean, found.count, found.left_out) == (pytest.approx(values.mean()), 25, 0)
    # Two runs of the bootstrap differ by a few thousandths here.
    assert (found.low, found.high) == pytest.approx(expected, abs=0.02)
    students = scipy.stats.t.interval(0.95, 24, values.mean(), scipy.stats.sem(values))
    assert (found.low, found.high) == pytest.approx(students, abs=0.1)
    assert found == bootstrap(torch.tensor(values), draws=20_000)
    assert found.low != bootstrap(torch.tensor(values), draws=20_000, seed=1).low


# An interval of 95 % must contain the true mean at least this often, and at most. With percentiles the first
# three are 0.84 to 0.92, and the log-normal ones 0.74 to 0.86.
DRAWN = {
    "normal": (lambda generator, size: generator.normal(0, 1, size), 0.0, 0.92),
    "exponential": (lambda generator, size: generator.exponential(1, size), 1.0, 0.92),
    "bounded": (lambda generator, size: generator.beta(5, 0.7, size), 5 / 5.7, 0.92),
    "log-normal, σ = 0.5": (lambda generator, size: generator.lognormal(0, 0.5, size), math.exp(1 / 8), 0.91),
    "log-normal, σ = 1": (lambda generator, size: generator.lognormal(0, 1, size), math.exp(0.5), 0.86),
}


@pytest.mark.parametrize("size", [8, 12, 20])
@pytest.mark.parametrize("name", DRAWN)
def test_the_interval_covers(name, size):
    draw, true, least = DRAWN[name]
    generator = np.random.default_rng(size)
    intervals = [bootstrap(draw(generator, size), draws=1000) for _ in range(500)]
    assert least <= np.mean([each.low <= true <= each.high for each in intervals]) <= 0.985


@pytest.mark.parametrize("size", [8, 20])
def test_the_interval_of_paired_differences_covers(size):
    """The difference of two measures is skewed, and small beside the spread of the prompts."""
    generator, inside, widths = np.random.default_rng(size), [], []
    for _ in range(500):
        prompts = generator.normal(0, 5, size)
        found = bootstrap(prompts + generator.exponential(0.5, size), prompts, draws=1000)
        inside.append(found.low <= 0.5 <= found.high)
        widths.append(found.high - found.low)
    assert 0.92 <= np.mean(inside) <= 0.985
    # The interval of the prompts themselves would be 4.6 wide and more.
    assert np.mean(widths) < 1.5


@pytest.mark.parametrize("values", [[0.0, 1.0], [0.0, 0.0, 1.0], [1.0] * 9 + [0.0], [0.2, 0.2, 0.2, 0.9]])
def test_intervals_of_tied_values_are_finite(values):
    found = bootstrap(values)
    assert found.low < found.mean < found.high
    assert found.high - found.low < 40 * np.std(values)


def test_pairs_are_left_out_together():
    nan = math.nan
    ours, theirs = [3.0, nan, 5.0, 7.0, 1.0], [1.0, 2.0, nan, 4.0, 1.0]
    found = bootstrap(ours, theirs)
    assert (found.mean, found.count, found.left_out) == (pytest.approx(5 / 3), 3, 2)
    # A constant difference does not vary, although each side does.
    apart = bootstrap([1.0, 5.0, 9.0], [0.0, 4.0, 8.0])
    assert (apart.mean, apart.low, apart.high) == (1, 1, 1)


def test_intervals_of_few_values():
    none, one = bootstrap([math.nan, math.nan]), bootstrap([2.0, math.nan])
    assert math.isnan(none.mean)
    assert (none.count, none.left_out) == (0, 2)
    assert one.mean == 2
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert list(one.to_dataframe()["left_out"]) == [1]


def test_a_permuted_map_scores_as_random():
    """If map and importance are unrelated, every measure's interval contains its value by chance."""
    generator = torch.Generator().manual_seed(0)
    measured = {"spearman": [], "partial": [], "overlap": [], "precision": [], "mass": [], "mrr": []}
    for _ in range(200):
        importance = torch.rand(8, generator=generator, dtype=torch.float64)
        permuted = importance[torch.randperm(8, generator=generator)]
        relevant = importance >= importance.sort().values[5]
        measured["spearman"].append(spearman(permuted, importance))
        measured["partial"].append(partial_spearman(permuted, importance))
        measured["overlap"].append(top_k_overlap(permuted, importance, 2))
        measured["precision"].append(average_precision(permuted, relevant))
        measured["mass"].append(mass_accuracy(permuted, relevant))
        measured["mrr"].append(reciprocal_rank(permuted, relevant))
    orders = list(itertools.combinations(range(1, 9), 3))
    precision = np.mean([np.mean([(i + 1) / place for i, place in enumerate(one)]) for one in orders])
    chance = {"spearman": 0, "partial": 0, "overlap": 2 / 8, "precision": precision, "mass": 3 / 8}
    chance["mrr"] = np.mean([1 / one[0] for one in orders])
    for name, values in measured.items():
        interval = bootstrap(values, confidence=0.99)
        assert interval.low <= chance[name] <= interval.high, name


# ------------------------------------------------------------------ bad input


def test_refusals():
    with pytest.raises(ValueError, match=r"other: expected as many keys as row, 3, got 2"):
        spearman(row(1, 2, 3), row(1, 2))
    with pytest.raises(ValueError, match=r"row: expected finite scores"):
        top_k_overlap(row(1, math.nan), row(1, 2), 1)
    with pytest.raises(ValueError, match=r"relevant: expected one boolean per key"):
        average_precision(row(1, 2), torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"values: expected finite numbers"):
        bootstrap([1.0, math.inf])
    with pytest.raises(ValueError, match=r"against: expected 2 values"):
        bootstrap([1.0, 2.0], [1.0])
