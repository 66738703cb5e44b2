"""Compute rank correlations."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Real


def spearman(x: Real[np.ndarray, " n"], y: Real[np.ndarray, " n"]) -> float:
    """Return Spearman's rank correlation, in -1..1.

    It is NaN if `x` or `y` is constant or has fewer than two values.

    Args:
        x: The first variable.
        y: The second variable, with as many values.

    Raises:
        ValueError: Different lengths, or values that are not finite.
    """
    x, y = np.asarray(x, dtype=np.float64).ravel(), np.asarray(y, dtype=np.float64).ravel()
    if x.shape != y.shape:
        raise ValueError(f"y: expected as many values as x, {len(x)}, got {len(y)}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("x, y: expected finite values, got NaN or infinity")
    # scipy returns NaN for these too, but with a warning.
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    from scipy.stats import spearmanr

    return float(spearmanr(x, y).statistic)
