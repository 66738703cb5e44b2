"""How well one row of scores agrees with another, or with the keys that matter; and intervals over prompts.

A row is a 1-D tensor: one score per key. Rows that are compared stand over the same keys; whoever compares
them cuts out what is not to be scored (the first token, say). What is not defined is NaN, never an error:
`bootstrap` leaves NaNs out and counts them. Where ties leave an order open, the value is the mean over all
orders, so that it does not hang on where a key stands, unless the measure has a convention of its own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import number, real_tensor, whole_number
from lens_mix.statistics import ranks

if TYPE_CHECKING:
    import pandas

_PERFECT = 1e-12  # a correlation this close to 1 is 1: what is left of the variance is rounding
_DRAWS_AT_ONCE = 1000  # draws of the bootstrap that are held at once
# Least standard deviation of a draw, as a share of that of the values; coverage hardly depends on it.
_LEAST_SPREAD = 0.2


def spearman(row: Float[Tensor, " key"], other: Float[Tensor, " key"]) -> float:
    """Spearman's rank correlation, -1 to 1; tied scores share their mean rank.

    NaN where a row is constant or there are fewer than two keys.

    Raises:
        TypeError, ValueError: no rows of finite numbers; rows of different lengths.
    """
    return ranks.spearman(*_rows(row=row, other=other))


def partial_spearman(
    row: Float[Tensor, " key"], other: Float[Tensor, " key"], given: Float[Tensor, " key"] | None = None
) -> float:
    """Spearman's rank correlation of two rows with a third one partialled out, -1 to 1.

    (r_xy − r_xz r_yz) / √((1 − r_xz²)(1 − r_yz²)) with rank correlations r: what is left of the agreement
    once both rows are cleared, in ranks, of what a straight line of z explains. A row that is nothing but the
    position, as many rollouts are, has no partial correlation at all.

    Args:
        row, other: one score per key.
        given: z; None: the position, 0, 1, 2, ….

    NaN where a row is constant or in the order of `given` (or its reverse), and with fewer than three keys.

    Raises:
        TypeError, ValueError: as `spearman`.
    """
    x, y = _rows(row=row, other=other)
    z = np.arange(len(x), dtype=np.float64) if given is None else _rows(row=row, given=given)[1]
    if len(x) < 3:
        return math.nan
    r_xy, r_xz, r_yz = ranks.spearman(x, y), ranks.spearman(x, z), ranks.spearman(y, z)
    left = (1 - r_xz**2) * (1 - r_yz**2)
    # A comparison with NaN is false.
    return (r_xy - r_xz * r_yz) / math.sqrt(left) if left > _PERFECT else math.nan


def top_k_overlap(row: Float[Tensor, " key"], other: Float[Tensor, " key"], k: int) -> float:
    """How many of the `k` highest keys two rows have in common, as a share of k, 0 to 1.

    Keys that are tied at the cut share the places that are left: the mean over all orders of the ties. With n
    keys two unrelated rows, and any row with a constant one, come to k / n.

    NaN where there are fewer than `k` keys.

    Raises:
        TypeError, ValueError: as `spearman`; k below 1.
    """
    k = whole_number("k", k, 1)
    x, y = _rows(row=row, other=other)
    return float((_in_top(x, k) * _in_top(y, k)).sum() / k) if len(x) >= k else math.nan


def average_precision(row: Float[Tensor, " key"], relevant: Bool[Tensor, " key"]) -> float:
    """Average precision of the relevant keys in the order of the scores, above 0 to 1.

    Σ_n (R_n − R_{n−1}) P_n over the distinct scores from the highest, P_n and R_n precision and recall of the
    keys that score as high or higher: scikit-learn's `average_precision_score`, tied keys entering together.
    A constant row comes to the share of keys that are relevant.

    NaN where no key is relevant.

    Raises:
        TypeError, ValueError: as `spearman`; `relevant` is no boolean per key.
    """
    scores, marks = _scores_and_relevant(row, relevant)
    if not marks.any():
        return math.nan
    _, group = np.unique(-scores, return_inverse=True)  # numbered from the highest score
    hits = np.bincount(group, marks)
    precision = hits.cumsum() / np.bincount(group).cumsum()
    return float((hits * precision).sum() / marks.sum())


def reciprocal_rank(row: Float[Tensor, " key"], relevant: Bool[Tensor, " key"]) -> float:
    """1 / the rank of the highest relevant key, above 0 to 1; its mean over prompts is the MRR.

    Where other keys tie with it, the mean over all orders of the ties.

    NaN where no key is relevant.

    Raises:
        TypeError, ValueError: as `average_precision`.
    """
    scores, marks = _scores_and_relevant(row, relevant)
    if not marks.any():
        return math.nan
    best = scores[marks].max()
    ties = scores == best
    above, tied, right = (int(keys.sum()) for keys in (scores > best, ties, marks & ties))
    orders = math.comb(tied, right)
    # The first relevant one of the tied keys stands at place p where the others are all behind it.
    return sum(
        math.comb(tied - place, right - 1) / orders / (above + place) for place in range(1, tied - right + 2)
    )


def mass_accuracy(row: Float[Tensor, " key"], relevant: Bool[Tensor, " key"]) -> float:
    """The share of a row's positive mass that lies on relevant keys, 0 to 1 (Arras et al., 2022).

    Negative scores count as 0.

    NaN where no score is positive, and where no key is relevant.

    Raises:
        TypeError, ValueError: as `average_precision`.
    """
    scores, marks = _scores_and_relevant(row, relevant)
    mass = scores.clip(0)
    return float(mass[marks].sum() / mass.sum()) if marks.any() and mass.sum() > 0 else math.nan


# ------------------------------------------------------------------ intervals


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over prompts with its bootstrap interval.

    Attributes:
        mean: of the values (of the differences, where two were compared); NaN without any.
        low, high: ends of the interval; NaN with fewer than two values.
        count: how many values the mean is over.
        left_out: how many were left out as NaN (pairs, where either was).
        confidence: the share of samples whose interval is to contain the true mean.
    """

    mean: float
    low: float
    high: float
    count: int
    left_out: int
    confidence: float

    def to_dataframe(self) -> pandas.DataFrame:
        """One row, the attributes as columns."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(self)])


def bootstrap(
    values: Any, against: Any = None, *, draws: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return the mean over prompts with its studentised bootstrap interval (Efron & Tibshirani, 1993, 12.5).

    For each draw, t is the distance of its mean from the mean of the values, in units of the draw's own
    standard error. The quantiles of t, times the standard error of the values, are the distances of the
    interval's ends from the mean. Percentiles of the drawn means are too narrow for few values, and misplaced
    for skewed ones.

    How often the interval contains the true mean of a few values was measured (docs/scales.md). If a rare
    large value may be missing from the sample, no interval that is computed from the sample does better.
    Values that are all equal have an interval of length 0. The interval may exceed the range of a bounded
    measure.

    Args:
        values: one number per prompt, NaN where it is not defined.
        against: another measure of the same prompts in the same order: the interval is that of the mean
            paired difference values − against. Where it leaves 0 out, the two differ by more than the choice
            of prompts explains.
        draws: how often as many prompts are drawn anew, with replacement.
        confidence: the share of samples whose interval is to contain the true mean, 0 to 1.
        seed: of the draws: the same numbers give the same interval.

    Raises:
        TypeError, ValueError: no series of numbers; infinite ones; another number of them in `against`.
    """
    draws, seed = whole_number("draws", draws, 1), whole_number("seed", seed, 0)
    confidence = number("confidence", confidence, 0, 1)
    given = _series("values", values)
    if against is not None:
        other = _series("against", against)
        if other.shape != given.shape:
            raise ValueError(f"against: expected {len(given)} values, one per value, got {len(other)}")
        given = given - other
    numbers = given[~np.isnan(given)]
    mean = float(numbers.mean()) if len(numbers) else math.nan
    low = high = math.nan
    if len(numbers) > 1:
        tail = (1 - confidence) / 2
        below, above = np.quantile(_drawn_t(numbers, draws, seed), [1 - tail, tail])
        error = numbers.std(ddof=1) / math.sqrt(len(numbers))
        low, high = float(mean - below * error), float(mean - above * error)
    return Interval(mean, low, high, len(numbers), len(given) - len(numbers), confidence)


def _drawn_t(values: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Return how far the mean of each draw is from that of the values, in standard errors of the draw."""
    generator = np.random.default_rng(seed)
    # Draws of few or tied values may be all alike, with a standard error of 0.
    least = _LEAST_SPREAD * values.std(ddof=1)
    if least == 0:
        return np.zeros(draws)
    found = []
    for start in range(0, draws, _DRAWS_AT_ONCE):
        size = min(_DRAWS_AT_ONCE, draws - start)
        drawn = values[generator.integers(0, len(values), (size, len(values)))]
        error = np.maximum(drawn.std(1, ddof=1), least) / math.sqrt(len(values))
        found.append((drawn.mean(1) - values.mean()) / error)
    return np.concatenate(found)


# ------------------------------------------------------------------ reading arguments


def _rows(**given: Any) -> list[np.ndarray]:
    """Rows of finite numbers of one length, in float64."""
    read = {}
    for name, values in given.items():
        read[name] = _series(name, values)
        if not np.isfinite(read[name]).all():
            raise ValueError(f"{name}: expected finite scores, got NaN or infinity")
    first, *others = read
    for name in others:
        if read[name].shape != read[first].shape:
            raise ValueError(
                f"{name}: expected as many keys as {first}, {len(read[first])}, got {len(read[name])}"
            )
    return list(read.values())


def _series(name: str, values: Any) -> np.ndarray:
    tensor = real_tensor(name, values)
    if tensor.ndim != 1:
        raise ValueError(f"{name}: expected a 1-D tensor, got shape {list(tensor.shape)}")
    series = tensor.to("cpu", torch.float64).numpy()
    if np.isinf(series).any():
        raise ValueError(f"{name}: expected finite numbers (or NaN: not defined), got infinity")
    return series


def _scores_and_relevant(row: Any, relevant: Any) -> tuple[np.ndarray, np.ndarray]:
    (scores,) = _rows(row=row)
    marks = real_tensor("relevant", relevant)
    if marks.dtype != torch.bool or tuple(marks.shape) != scores.shape:
        raise ValueError(
            f"relevant: expected one boolean per key, [{len(scores)}], got {marks.dtype} of shape "
            f"{list(marks.shape)}"
        )
    return scores, marks.cpu().numpy()


def _in_top(scores: np.ndarray, k: int) -> np.ndarray:
    """How much of each key is among the `k` highest: 1, 0, or a share of the places left at the cut."""
    cut = np.sort(scores)[-k]
    above, tied = scores > cut, scores == cut
    return above + tied * ((k - above.sum()) / tied.sum())
