"""Rank correlation."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Real


def spearman(x: Real[np.ndarray, " n"], y: Real[np.ndarray, " n"]) -> float:
    """Spearman's rank correlation, in -1..1; NaN where one side is constant or there are fewer than two.

    Raises:
        ValueError: different lengths, or values that are not finite.
    """
    x, y = np.asarray(x, dtype=np.float64).ravel(), np.asarray(y, dtype=np.float64).ravel()
    if x.shape != y.shape:
        raise ValueError(f"y: expected as many values as x, {len(x)}, got {len(y)}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("x, y: expected finite values, got NaN or infinity")
    # scipy gives NaN for these too, with a warning.
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    from scipy.stats import spearmanr

    return float(spearmanr(x, y).statistic)
