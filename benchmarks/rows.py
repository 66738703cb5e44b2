"""Measure rows on demand, and the time of a run beside a forward pass.

    python -m benchmarks.rows            the time of a run on SmolLM2-135M; the last row of 1024 positions
    python -m benchmarks.rows --long     SmolLM2-135M, last row of 2000 and 8000 tokens

Times are processor times, the smallest of several runs, so that other work on the machine affects ratios as
little as possible. Memory is the tensors that exist at one time, beside those of a plain forward pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import lens_mix as lm
from benchmarks import common
from lens_mix.lens.verification import kept

TEXT = "The Eiffel Tower is in the city of Paris, and the Colosseum is in the city of Rome, which lies"


def least_seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the processor time of the fastest of several runs, after one that does not count."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def overheads(repeats: int = 5) -> Iterator[dict[str, Any]]:
    """Measure the first call, later calls and run_many on SmolLM2-135M, for one prompt and a batch of 16."""
    model = common.smollm2()
    tokens = model.to_tokens(TEXT)[:, :20]
    layers = int(model.cfg.n_layers)

    def first_call() -> None:
        kept._verifications.clear()
        lm.run(model, tokens[0], "attention")

    forward = least_seconds(lambda: _run_forward(model, tokens), repeats)
    first = least_seconds(first_call, repeats)
    allowed = 2.5 * forward + 0.02 * layers
    yield {"what": "first call (verification), attention", "seconds": first, "÷ forward": first / forward}
    yield {"what": "2.5 forwards and 0.02 s per block", "seconds": allowed, "÷ forward": allowed / forward}
    for method in ("attention", "attn_res_ln"):
        seconds = least_seconds(lambda name=method: lm.run(model, tokens[0], name), repeats)
        yield {"what": f"run, {method}", "seconds": seconds, "÷ forward": seconds / forward}
    batch = tokens.repeat(16, 1)
    forward = least_seconds(lambda: _run_forward(model, batch), repeats)
    for method in ("attention", "attn_res_ln"):
        many = least_seconds(lambda name=method: list(lm.run_many(model, batch, name)), repeats)
        yield {"what": f"run_many, 16 prompts, {method}", "seconds": many, "÷ forward": many / forward}


def last_rows(repeats: int = 2) -> Iterator[dict[str, Any]]:
    """Measure the last row in all layers of a gpt2-like model, 1024 positions."""
    methods = ("attention", "attn_res_ln", "alti", "value_zeroing")
    yield from _measure_methods(common.gpt2_like(), "gpt2-like", 1024, methods, repeats)


def long_prompts() -> Iterator[dict[str, Any]]:
    """Measure the last row in all layers of SmolLM2-135M."""
    model = common.smollm2()
    methods = ("attention", "attn_res_ln", "alti", "value_zeroing")
    yield from _measure_methods(model, "SmolLM2-135M", 2000, methods, 1)
    yield from _measure_methods(model, "SmolLM2-135M", 8000, ("attention", "attn_res_ln", "alti"), 1)


def _measure_methods(
    model: Any, name: str, positions: int, methods: tuple[str, ...], repeats: int
) -> Iterator[dict[str, Any]]:
    tokens = common.random_tokens(model, positions)
    lm.run(model, tokens[:16], "attn_res_ln")  # The first run verifies the model, which is not timed.
    forward = least_seconds(lambda: _run_forward(model, tokens[None]), repeats)
    peak = common.peak_bytes(lambda: _run_forward(model, tokens[None]))
    for method in methods:
        run = lambda method=method: lm.run(model, tokens, method, queries=[-1])  # noqa: E731
        seconds, memory = least_seconds(run, repeats), common.peak_bytes(run)
        yield {
            "model": name,
            "positions": positions,
            "last row of": method,
            "seconds": seconds,
            "÷ forward": seconds / forward,
            "peak MB": memory / 1e6,
            "peak ÷ forward's": memory / peak,
        }


@torch.no_grad()
def _run_forward(model: Any, tokens: torch.Tensor) -> None:
    model(tokens)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(common.machine())
    for rows in (long_prompts(),) if options.long else (overheads(), last_rows()):
        print(common.markdown_table(list(rows)))


if __name__ == "__main__":
    main()
