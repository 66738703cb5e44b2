"""Measure the cost of input maps of the last position, in forward passes of the same prompt.

python -m benchmarks.input_map.forwards smollm2 16 20 64             writes results/forwards.md; two minutes
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lens_mix as lm
from benchmarks.common import describe_machine, describe_measurement, markdown_table

REPEATS = 9


def draw_tokens(count: int) -> torch.Tensor:
    """Return a prompt of drawn tokens."""
    return torch.randint(1000, 40000, (count,), generator=torch.Generator().manual_seed(0))


def forward_of(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    """Return a function that runs one forward pass."""

    def forward() -> None:
        with torch.no_grad():
            model(tokens[None])

    return forward


def ways_of(model: Any, count: int) -> dict[str, Callable[[], Any]]:
    """Return what is compared on a prompt of `count` drawn tokens, by name."""
    tokens = draw_tokens(count)
    gim = lm.methods.Gim(activations="ratio", readout="absolute")
    return {
        "forward": forward_of(model, tokens),
        "`attention`, one row": lambda: lm.run(model, tokens, "attention", queries=[-1]),
        "`gim`, ratio, absolute": lambda: lm.run(model, tokens, gim, queries=[-1]),
        "`lm.input_map(exact=False)`": lambda: lm.input_map(model, tokens, exact=False),
        "`lm.input_map`": lambda: lm.input_map(model, tokens),
    }


def processor_seconds(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median processor time of each way. They take turns, so that other load falls on all."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, run in ways.items():
            start = time.process_time()
            run()
            # The first turn reads weights and compiles, so it does not count.
            if turn:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main(model_name: str, *counts: str) -> None:
    """Write the medians of runs in turns, for each number of tokens."""
    import models

    torch.set_num_threads(1)
    model = getattr(models, model_name)()
    rows = []
    for count in map(int, counts):
        seconds = processor_seconds(ways_of(model, count), REPEATS)
        forward = seconds.pop("forward")
        rows += [
            {
                "map": name,
                "length": f"of {count} tokens",
                "forward passes": f"{taken / forward:.1f}",
                "one forward pass, s": f"{forward:.3f}",
            }
            for name, taken in seconds.items()
        ]
    command = f"python -m benchmarks.input_map.forwards {' '.join([model_name, *counts])}"
    page = (
        f"# Cost of input maps\n\nWritten by `PYTHONPATH=.:demos {command}`; "
        "processor time on one thread, medians of "
        f"{REPEATS} runs in turns.\n\n"
        f"Machine: {describe_machine()}.\n\n## Forward passes of {model_name}\n\n"
        f"{describe_measurement()}\n\n{markdown_table(rows)}\n"
    )
    (Path(__file__).parent / "results" / "forwards.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main(*sys.argv[1:])
