"""Measure how often 95 % intervals of a mean contain it: studentised ones, and percentiles of drawn means.

python -m benchmarks.scales.intervals                writes results/intervals.md; about a minute
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.common import markdown_table
from lens_mix.evaluation import bootstrap

SAMPLES, DRAWS = 800, 2000
SIZES = (8, 12, 20)
# Each distribution with its true mean.
DISTRIBUTIONS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "normal": (lambda generator, size: generator.normal(size=size), 0.0),
    "exponential": (lambda generator, size: generator.exponential(size=size), 1.0),
    "log-normal, σ = 1": (lambda generator, size: generator.lognormal(size=size), float(np.exp(0.5))),
}


def percentile_interval(values: np.ndarray, generator: np.random.Generator) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % quantiles of the means of drawn values."""
    drawn = values[generator.integers(0, len(values), (DRAWS, len(values)))].mean(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def share_that_contain(name: str, size: int) -> dict[str, str]:
    """Return the share of samples of one size whose interval has the true mean, for each kind of it."""
    draw, mean = DISTRIBUTIONS[name]
    generator = np.random.default_rng(size)
    kinds = {"studentised": 0, "percentiles of the mean": 0}
    for _ in range(SAMPLES):
        values = draw(generator, size)
        found = bootstrap(values, draws=DRAWS)
        low, high = percentile_interval(values, generator)
        kinds["studentised"] += found.low <= mean <= found.high
        kinds["percentiles of the mean"] += low <= mean <= high
    return {kind: f"{100 * count / SAMPLES:.0f}" for kind, count in kinds.items()}


def main() -> None:
    """Write the table of all distributions and sizes."""
    rows = [
        {"values": name, "sample": f"of {size}", **share_that_contain(name, size)}
        for name in DISTRIBUTIONS
        for size in SIZES
    ]
    page = (
        "# Intervals\n\nWritten by `python -m benchmarks.scales.intervals`.\n\n"
        f"## Share of 95 % intervals that contain the true mean, in percent\n\n"
        f"{SAMPLES} samples of each kind, {DRAWS} draws for each interval.\n\n"
        f"Measured {time.strftime('%Y-%m-%d', time.gmtime())} with numpy {version('numpy')}.\n\n"
        f"{markdown_table(rows)}\n"
    )
    (Path(__file__).parent / "results" / "intervals.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
