"""Run all benchmarks: `make bench` (quick, minutes) or `make bench BENCH=--full` (an hour or more).

    python -m benchmarks.run             gpt2-like, llama-like, bert-like of 3 layers; 32 and 128 positions
    python -m benchmarks.run --full      12 layers; 32 to 256 positions, the norm maps to 1024; SmolLM2-135M
    python -m benchmarks.run --tables costs [--rows NAME ...]   what calls cost on SmolLM2-135M
    python -m benchmarks.run --tables corpus [--rows NAME ...]  throughput, memory and kills of lm.corpus.run

The results are benchmarks/RESULTS.md and results.json (or those in the folder of --out), written row by row:

- for every method, its time as a ratio to one forward pass of the same model, its peak of tensors, and how
  both grow with the length;
- Value Zeroing beside all alternatives, attribution beside captum, flow beside networkx.

Ratios are of medians from one run. Each table has its date and machine. --tables measures some tables, and
the others stay unchanged. A method that takes more than --patience seconds at one length is not run at the
next one.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import lens_mix as lm
from benchmarks import attribution, bfloat16, common, corpus, costs, flow, precision, rollout, value_zeroing
from lens_mix.methods import METHODS

HERE = Path(__file__).resolve().parent
NORM_MAPS = ("attention", "value_norm", "attn_res", "attn_res_w", "attn_res_ln")
SMOLLM2 = "SmolLM2-135M"


def all_methods(
    name: str, sizes: list[int], layers: int, repeats: int, patience: float
) -> Iterator[dict[str, Any]]:
    """Yield a row per method and length."""
    model = common.smollm2() if name == SMOLLM2 else common.MODELS[name](layers=layers)
    forward: dict[int, float] = {}
    for method in METHODS:
        seconds: dict[int, float] = {}
        for size in sizes:
            if size > 256 and method not in NORM_MAPS:
                continue
            tokens = common.random_tokens(model, size)
            try:
                row = _measure_method(model, method, tokens, repeats)
            except (ValueError, RuntimeError) as problem:
                yield {"model": name, "positions": size, "method": method, "note": str(problem)[:120]}
                break
            forward[size] = row.pop("forward")
            seconds[size] = row["seconds"]
            if len(seconds) > 1:
                lengths, times = list(seconds)[-2:], list(seconds.values())[-2:]
                row["growth exponent"] = common.growth_exponent(lengths, times)
            yield {"model": name, "positions": size, "method": method, **row}
            if row["seconds"] > patience:
                break


def _measure_method(model: Any, method: str, tokens: torch.Tensor, repeats: int) -> dict[str, float]:
    def run() -> object:
        return lm.run(model, tokens, method)

    def forward() -> None:
        with torch.no_grad():
            model(tokens[None])

    peak = common.peak_bytes(run)
    seconds = common.interleaved({"method": run, "forward": forward}, repeats, warm_up=())
    return {
        "seconds": seconds["method"],
        "÷ forward": seconds["method"] / seconds["forward"],
        "peak MB": peak / 1e6,
        "forward": seconds["forward"],
    }


# ------------------------------------------------------------------ tables


def compared(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure Value Zeroing beside all alternatives, 256 positions for one model only."""
    layers, sizes = (12, [32, 64, 128]) if options.full else (3, [64, 128])
    names = [name for name in options.models if name != SMOLLM2]
    for name in names:
        for size in [*sizes, 256] if options.full and name == names[0] else sizes:
            yield value_zeroing.compare(name, size, layers, options.repeats, peers=True)


def digits(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the digits that float32 loses."""
    if options.full:
        yield from precision.main()


def methods(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure every method on one model."""
    layers, sizes = (12, [32, 64, 128, 256, 512, 1024]) if options.full else (3, [32, 128])
    yield from all_methods(name, options.sizes or sizes, layers, options.repeats, options.patience)


def captum(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure attribution of attention beside captum's integrated gradients."""
    for positions in (32, 64) if options.full else (32,):
        yield attribution.against_captum(12 if options.full else 3, positions, options.repeats)


def eight_points(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure attribution with the points that each layer needs, beside eight in every layer."""
    layers = 12 if options.full else 3
    for name, tolerance in itertools.product(options.models, (None, 0.01)):
        yield attribution.against_eight_points(name, layers, 64, options.repeats, tolerance)


def plain_loop(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure roll-out beside a loop of three lines."""
    for causal in (True, False):
        yield rollout.against_plain_loop(12, 1024, causal, options.repeats)


def networkx(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure attention flow beside networkx, which solves a sample of the pairs."""
    for layers, causal in ((12, False), (12, True), (6, False)) if options.full else ((6, True),):
        yield flow.against_networkx(layers, 32, causal, options.repeats, sample=6)


TABLES = (
    "compared",
    "costs",
    "digits",
    "captum",
    "points",
    "rollout",
    "networkx",
    "methods",
    "bfloat16",
    "lengths",
    "corpus",
)
# These are measured by `--full` or by name: they take ten minutes or more.
LONG = ("bfloat16", "corpus", "costs", "lengths")
COSTS, BY_LENGTH = "What calls cost", "Time and memory by length"
CORPUS = "A corpus"
KEYS = {COSTS: costs.KEYS["costs"], BY_LENGTH: costs.KEYS["lengths"], CORPUS: corpus.KEYS}
WITH_ROWS = (*costs.TABLES, "corpus")


def tables(options: argparse.Namespace) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    """Yield the title and rows of each table that is asked for. Each model has a table of all methods."""
    if "compared" in options.tables:
        yield "Value Zeroing compared", compared(options)
    if "costs" in options.tables:
        yield COSTS, costs.rows("costs", options.rows)
    if "bfloat16" in options.tables:
        yield "bfloat16 beside float32", bfloat16.rows()
    if "lengths" in options.tables:
        yield BY_LENGTH, costs.rows("lengths", options.rows)
    if "corpus" in options.tables:
        yield CORPUS, corpus.rows(options.rows)
    if "digits" in options.tables:
        yield "Digits of float32", digits(options)
    if "captum" in options.tables:
        yield "Attention attribution, captum", captum(options)
    if "points" in options.tables:
        yield "Attention attribution, eight points in every layer", eight_points(options)
    if "rollout" in options.tables:
        yield "Rollout, a plain loop", plain_loop(options)
    if "networkx" in options.tables:
        yield "Attention flow, networkx", networkx(options)
    if "methods" in options.tables:
        for name in options.models:
            yield f"Every method, {name}", methods(name, options)


def main() -> None:
    """Write the tables that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--models", nargs="+", choices=[*common.MODELS, SMOLLM2])
    parser.add_argument("--sizes", nargs="+", type=int, help="positions in the table of every method")
    parser.add_argument("--tables", nargs="+", choices=TABLES)
    parser.add_argument(
        "--rows", nargs="+", help="the names of some rows of the table costs, lengths or corpus"
    )
    parser.add_argument("--note", default="", help="what else ran, printed with the tables")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    options.models = options.models or [*common.MODELS, *([SMOLLM2] if options.full else [])]
    options.tables = options.tables or [name for name in TABLES if options.full or name not in LONG]
    if options.rows and options.tables not in [[name] for name in WITH_ROWS]:
        parser.error(f"--rows: expected --tables {' or '.join(WITH_ROWS)}, got {' '.join(options.tables)}")
    torch.set_num_threads(options.threads)
    for title, found_rows in tables(options):
        common.write_table(
            options.out, title, found_rows, options.note, KEYS.get(title, ()), bool(options.rows)
        )


if __name__ == "__main__":
    main()
