"""Measure the cost of input maps of the last position, in forward passes of the same prompt.

python -m benchmarks.input_map.forwards smollm2 64
"""

from __future__ import annotations

import sys

import torch

import lens_mix as lm
from benchmarks.common import interleaved

REPEATS = 9


def main(model_name: str, count: str) -> None:
    """Print the medians of runs in turns."""
    import models

    torch.set_num_threads(1)
    model = getattr(models, model_name)()
    tokens = torch.randint(1000, 40000, (int(count),), generator=torch.Generator().manual_seed(0))

    def forward() -> None:
        with torch.no_grad():
            model(tokens[None])

    ways = {
        "forward": forward,
        "attention": lambda: lm.run(model, tokens, "attention", queries=[-1]),
        "gim": lambda: lm.run(model, tokens, lm.Gim(activations="ratio", readout="absolute"), queries=[-1]),
        "input_map": lambda: lm.input_map(model, tokens),
    }
    seconds = interleaved(ways, REPEATS)
    for name, taken in seconds.items():
        print(f"{name:10s} {taken / seconds['forward']:.2f} forward passes")
    print(f"one forward pass of {count} tokens: {seconds['forward']:.3f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
