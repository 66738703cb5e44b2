"""Measure how well one row of scores agrees with another, or with the relevant keys, and compute intervals.

A row is a 1-D tensor with one score per key. Rows that are compared have the same keys, so callers first
remove the keys that are not scored (for example the first token). A measure that is not defined is NaN and
not an error: `bootstrap` leaves NaNs out and counts them. If ties leave an order open, the value is the mean
over all orders, so that it does not depend on the order of keys. Measures with a convention of their own say
so.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import check_number, check_real_tensor, check_whole_number
from lens_mix.evaluation import ranks

if TYPE_CHECKING:
    import pandas

_PERFECT = 1e-12  # A correlation this close to 1 counts as 1, because the difference is a rounding error.
_DRAWS_PER_CHUNK = 1000  # The number of bootstrap draws that are in memory together.
# Least standard deviation of a draw, as a share of that of the values; coverage hardly depends on it.
_LEAST_SPREAD = 0.2


def spearman(row: Float[Tensor, " key"], other: Float[Tensor, " key"]) -> float:
    """Return Spearman's rank correlation, -1 to 1. Tied scores share their mean rank.

        >>> lm.evaluation.spearman(torch.tensor([0.1, 0.7, 0.2]), torch.tensor([0.2, 0.9, 0.1]))
        0.5

    It is NaN if a row is constant or has fewer than two keys.

    Args:
        row: One score per key.
        other: One score per key.

    Raises:
        TypeError: A row is not a series of numbers.
        ValueError: A row has numbers that are not finite, or the rows have different lengths.
    """
    return ranks.spearman(*_read_rows(row=row, other=other))


def partial_spearman(
    row: Float[Tensor, " key"], other: Float[Tensor, " key"], given: Float[Tensor, " key"] | None = None
) -> float:
    """Return Spearman's rank correlation of two rows, controlled for a third one, -1 to 1.

        >>> row, other = torch.tensor([0.1, 0.7, 0.2, 0.9]), torch.tensor([0.3, 0.8, 0.1, 0.6])
        >>> lm.evaluation.partial_spearman(row, other)

    (r_xy − r_xz r_yz) / √((1 − r_xz²)(1 − r_yz²)), where r are rank correlations. It is the agreement that
    remains after removing from both rows, in ranks, what a straight line of z explains. A row that follows
    the position exactly, as many rollouts do, has no partial correlation.

    It is NaN if a row is constant, in the order of `given` or its reverse, or has fewer than three keys.

    Args:
        row: One score per key.
        other: One score per key.
        given: z, one number per key. None: the position, 0, 1, 2, ….

    Raises:
        TypeError: As in `spearman`.
        ValueError: As in `spearman`.
    """
    x, y = _read_rows(row=row, other=other)
    z = np.arange(len(x), dtype=np.float64) if given is None else _read_rows(row=row, given=given)[1]
    if len(x) < 3:
        return math.nan
    r_xy, r_xz, r_yz = ranks.spearman(x, y), ranks.spearman(x, z), ranks.spearman(y, z)
    remaining = (1 - r_xz**2) * (1 - r_yz**2)
    # If a correlation is NaN, the comparison is false and the result is NaN.
    return (r_xy - r_xz * r_yz) / math.sqrt(remaining) if remaining > _PERFECT else math.nan


def top_k_overlap(row: Float[Tensor, " key"], other: Float[Tensor, " key"], k: int) -> float:
    """Return how many of the `k` highest keys two rows have in common, as a share of k, 0 to 1.

        >>> lm.evaluation.top_k_overlap(torch.tensor([0.1, 0.7, 0.2]), torch.tensor([0.2, 0.9, 0.1]), k=2)
        0.5

    Keys that are tied at the k-th place share the remaining places: the mean over all orders of the ties.
    For n keys, the expected value of two unrelated rows is k / n, and so is that of any row with a constant
    one. The measure is NaN if there are fewer than `k` keys.

    Args:
        row: One score per key.
        other: One score per key.
        k: How many of the highest keys are compared, at least 1.

    Raises:
        TypeError: As in `spearman`.
        ValueError: As in `spearman`, or k is below 1.
    """
    k = check_whole_number("k", k, 1)
    x, y = _read_rows(row=row, other=other)
    return float((_share_in_top(x, k) * _share_in_top(y, k)).sum() / k) if len(x) >= k else math.nan


def average_precision(row: Float[Tensor, " key"], relevant: Bool[Tensor, " key"]) -> float:
    """Return the average precision of the relevant keys in the order of the scores, above 0 to 1.

        >>> row, relevant = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([False, True, True])
        >>> lm.evaluation.average_precision(row, relevant)
        1.0

    Σ_n (R_n − R_{n−1}) P_n over the distinct scores, from the highest. P_n and R_n are precision and recall
    of the keys that have that score or a higher one. This is scikit-learn's `average_precision_score`, in
    which tied keys enter together. For a constant row it is the share of relevant keys. It is NaN if no key
    is relevant.

    Args:
        row: One score per key.
        relevant: One boolean per key.

    Raises:
        TypeError: As in `spearman`.
        ValueError: As in `spearman`, or `relevant` is not one boolean per key.
    """
    scores, marks = _read_scores_and_relevant(row, relevant)
    if not marks.any():
        return math.nan
    _, group = np.unique(-scores, return_inverse=True)  # The minus makes 0 the group of the highest score.
    hits = np.bincount(group, marks)
    precision = hits.cumsum() / np.bincount(group).cumsum()
    return float((hits * precision).sum() / marks.sum())


def reciprocal_rank(row: Float[Tensor, " key"], relevant: Bool[Tensor, " key"]) -> float:
    """Return 1 / the rank of the highest relevant key, above 0 to 1. Its mean over prompts is the MRR.

        >>> row, relevant = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([False, True, False])
        >>> lm.evaluation.reciprocal_rank(row, relevant)
        0.5

    If other keys are tied with it, the value is the mean over all orders of the ties. It is NaN if no key is
    relevant.

    Args:
        row: One score per key.
        relevant: One boolean per key.

    Raises:
        TypeError: As in `average_precision`.
        ValueError: As in `average_precision`.
    """
    scores, marks = _read_scores_and_relevant(row, relevant)
    if not marks.any():
        return math.nan
    best = scores[marks].max()
    ties = scores == best
    above, tied, right = (int(keys.sum()) for keys in (scores > best, ties, marks & ties))
    orders = math.comb(tied, right)
    # If the first relevant key of the tied ones is at place p, the other relevant ones are all after it.
    return sum(
        math.comb(tied - place, right - 1) / orders / (above + place) for place in range(1, tied - right + 2)
    )


def mass_accuracy(row: Float[Tensor, " key"], relevant: Bool[Tensor, " key"]) -> float:
    """Return the share of a row's positive scores that is on relevant keys, 0 to 1 (Arras et al., 2022).

        >>> row, relevant = torch.tensor([0.25, 0.5, 0.25]), torch.tensor([False, True, True])
        >>> lm.evaluation.mass_accuracy(row, relevant)
        0.75

    Negative scores count as 0. The share is NaN if no score is positive or no key is relevant.

    Args:
        row: One score per key.
        relevant: One boolean per key.

    Raises:
        TypeError: As in `average_precision`.
        ValueError: As in `average_precision`.
    """
    scores, marks = _read_scores_and_relevant(row, relevant)
    mass = scores.clip(0)
    return float(mass[marks].sum() / mass.sum()) if marks.any() and mass.sum() > 0 else math.nan


# ------------------------------------------------------------------ intervals


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over prompts with its bootstrap interval.

    Attributes:
        mean: The mean of the values, or of the differences if two measures were compared. NaN without values.
        low: The lower end of the interval. NaN for fewer than two values.
        high: The upper end of the interval. NaN for fewer than two values.
        count: The number of values.
        left_out: The number of values that were left out as NaN, or of pairs in which one was NaN.
        confidence: The share of samples whose interval contains the true mean.
    """

    mean: float
    low: float
    high: float
    count: int
    left_out: int
    confidence: float

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with one row, whose columns are the attributes."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(self)])


def bootstrap(
    values: Any, against: Any = None, *, draws: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return the mean over prompts with its studentised bootstrap interval (Efron & Tibshirani, 1993, 12.5).

        >>> lm.evaluation.bootstrap([0.61, 0.72, 0.58, 0.66, 0.70])

    For each draw, t is the distance of its mean from the mean of the values, in units of the draw's own
    standard error. The quantiles of t, times the standard error of the values, are the distances of the
    interval's ends from the mean. Percentiles of the drawn means would be too narrow for few values, and
    misplaced for skewed ones.

    The documentation lists how often the interval contained the true mean of a few values. If a rare
    large value may be missing from the sample, no interval that is computed from the sample does better.
    Values that are all equal have an interval of length 0. The interval may exceed the range of a bounded
    measure.

    Args:
        values: One number per prompt. NaN means that the measure is not defined.
        against: Another measure of the same prompts in the same order. The interval is then that of the mean
            paired difference values − against. If it does not contain 0, the two measures differ by more than
            the choice of prompts explains.
        draws: The number of samples that are drawn with replacement, each as large as the values.
        confidence: The share of samples whose interval contains the true mean, 0 to 1.
        seed: The seed of the draws. The same seed gives the same interval.

    Raises:
        TypeError: `values` or `against` is not a series of numbers.
        ValueError: A number is infinite, an option is out of range, or `against` has another length.
    """
    draws, seed = check_whole_number("draws", draws, 1), check_whole_number("seed", seed, 0)
    confidence = check_number("confidence", confidence, 0, 1)
    given = _read_series("values", values)
    if against is not None:
        other = _read_series("against", against)
        if other.shape != given.shape:
            raise ValueError(f"against: expected {len(given)} values, one per value, got {len(other)}")
        given = given - other
    numbers = given[~np.isnan(given)]
    mean = float(numbers.mean()) if len(numbers) else math.nan
    low = high = math.nan
    if len(numbers) > 1:
        tail = (1 - confidence) / 2
        below, above = np.quantile(_draw_t(numbers, draws, seed), [1 - tail, tail])
        error = numbers.std(ddof=1) / math.sqrt(len(numbers))
        low, high = float(mean - below * error), float(mean - above * error)
    return Interval(mean, low, high, len(numbers), len(given) - len(numbers), confidence)


def _draw_t(values: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Return the distance of each draw's mean from that of the values, in standard errors of the draw."""
    generator = np.random.default_rng(seed)
    # The values of a draw may be all equal, so its standard error needs a lower bound.
    least = _LEAST_SPREAD * values.std(ddof=1)
    if least == 0:
        return np.zeros(draws)
    found = []
    for start in range(0, draws, _DRAWS_PER_CHUNK):
        size = min(_DRAWS_PER_CHUNK, draws - start)
        drawn = values[generator.integers(0, len(values), (size, len(values)))]
        error = np.maximum(drawn.std(1, ddof=1), least) / math.sqrt(len(values))
        found.append((drawn.mean(1) - values.mean()) / error)
    return np.concatenate(found)


# ------------------------------------------------------------------ reading arguments


def _read_rows(**given: Any) -> list[np.ndarray]:
    """Return rows of finite numbers of one length, as float64 arrays."""
    read = {}
    for name, values in given.items():
        read[name] = _read_series(name, values)
        if not np.isfinite(read[name]).all():
            raise ValueError(f"{name}: expected finite scores, got NaN or infinity")
    first, *others = read
    for name in others:
        if read[name].shape != read[first].shape:
            raise ValueError(
                f"{name}: expected as many keys as {first}, {len(read[first])}, got {len(read[name])}"
            )
    return list(read.values())


def _read_series(name: str, values: Any) -> np.ndarray:
    tensor = check_real_tensor(name, values)
    if tensor.ndim != 1:
        raise ValueError(f"{name}: expected a 1-D tensor, got shape {list(tensor.shape)}")
    series = tensor.to("cpu", torch.float64).numpy()
    if np.isinf(series).any():
        raise ValueError(f"{name}: expected finite numbers (or NaN for not defined), got infinity")
    return series


def _read_scores_and_relevant(row: Any, relevant: Any) -> tuple[np.ndarray, np.ndarray]:
    (scores,) = _read_rows(row=row)
    marks = check_real_tensor("relevant", relevant)
    if marks.dtype != torch.bool or tuple(marks.shape) != scores.shape:
        raise ValueError(
            f"relevant: expected one boolean per key, [{len(scores)}], got {marks.dtype} of shape "
            f"{list(marks.shape)}"
        )
    return scores, marks.cpu().numpy()


def _share_in_top(scores: np.ndarray, k: int) -> np.ndarray:
    """Return the share of each key in the `k` highest: 1, 0, or its part of the places that ties share."""
    cut = np.sort(scores)[-k]
    above, tied = scores > cut, scores == cut
    shares: np.ndarray = above + tied * ((k - above.sum()) / tied.sum())
    return shares
