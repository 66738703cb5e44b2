"""All benchmarks in one run: `make bench` (quick, minutes) or `make bench BENCH=--full` (an hour or more).

    python -m benchmarks.run             gpt2-like, llama-like, bert-like of 3 layers; 32 and 128 positions
    python -m benchmarks.run --full      12 layers; 32 to 256 positions, the norm maps to 1024; SmolLM2-135M

Writes benchmarks/RESULTS.md and results.json, or where --out points: every method's time as a ratio to one
forward pass of the same model, its peak of tensors, how both grow with the length; and Value Zeroing beside
everything that it could be compared with. Ratios are of medians from one run. A method that is slower than
--patience seconds at one length is not run at the next.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import lens_mix as lm
from benchmarks import common, precision, value_zeroing
from lens_mix.methods import METHODS

HERE = Path(__file__).resolve().parent
NORM_MAPS = ("attention", "value_norm", "attn_res", "attn_res_w", "attn_res_ln")
SMOLLM2 = "SmolLM2-135M"


def all_methods(
    name: str, sizes: list[int], layers: int, repeats: int, patience: float
) -> Iterator[dict[str, Any]]:
    """A row per method and length."""
    model = common.smollm2() if name == SMOLLM2 else common.MODELS[name](layers=layers)
    forward: dict[int, float] = {}
    for method in METHODS:
        seconds: dict[int, float] = {}
        for size in sizes:
            if size > 256 and method not in NORM_MAPS:
                continue
            tokens = common.random_tokens(model, size)
            try:
                row = _one(model, method, tokens, repeats)
            except (ValueError, RuntimeError) as problem:
                yield {"model": name, "positions": size, "method": method, "note": str(problem)[:120]}
                break
            forward[size] = row.pop("forward")
            seconds[size] = row["seconds"]
            if len(seconds) > 1:
                row["grows as n^"] = common.growth_exponent(list(seconds)[-2:], list(seconds.values())[-2:])
            yield {"model": name, "positions": size, "method": method, **row}
            if row["seconds"] > patience:
                break


def _one(model: Any, method: str, tokens: torch.Tensor, repeats: int) -> dict[str, float]:
    def run() -> object:
        return lm.run(model, tokens, method)

    def forward() -> None:
        with torch.no_grad():
            model(tokens[None])

    peak = common.peak_bytes(run)
    seconds = common.interleaved({"method": run, "forward": forward}, repeats, warm_up=False)
    return {
        "seconds": seconds["method"],
        "÷ forward": seconds["method"] / seconds["forward"],
        "peak MB": peak / 1e6,
        "forward": seconds["forward"],
    }


def longest(layers: int) -> dict[str, Any]:
    """1024 positions in a process of its own, for its resident memory."""
    command = [sys.executable, "-m", "benchmarks.value_zeroing", "--memory", "1024", "--layers", str(layers)]
    command += ["--threads", str(torch.get_num_threads())]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(full: bool, repeats: int, patience: float) -> dict[str, Any]:
    """All tables."""
    layers = 12 if full else 3
    sizes = [32, 64, 128, 256, 512, 1024] if full else [32, 128]
    names = list(common.MODELS)
    vz_sizes = [32, 64, 128, 256] if full else [64, 128]
    found: dict[str, Any] = {"machine": common.machine(), "GEMM GFLOP/s": common.gemm_rate() / 1e9}
    found["Value Zeroing compared"] = value_zeroing.rows(names, vz_sizes, layers, repeats, peers=True)
    if full:
        found["Value Zeroing, 1024 positions"] = [longest(layers)]
        found["Digits of float32"] = precision.main()
        names.append(SMOLLM2)
    found["Every method"] = [
        row for name in names for row in all_methods(name, sizes, layers, repeats, patience)
    ]
    return found


def report(found: dict[str, Any]) -> str:
    """The tables as Markdown."""
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items() if value is not None)
    lines = [
        "# Benchmark results",
        "",
        "Written by `make bench` from one real run; medians; what is compared ran in turns.",
        f"Machine: {machine}.",
        f"One large matrix product ran at {found['GEMM GFLOP/s']:.0f} GFLOP/s (float32).",
        "No GPU was at hand." if found["machine"]["gpu"] is None else "",
    ]
    for title, rows in found.items():
        if isinstance(rows, list):
            lines += ["", f"## {title}", "", common.markdown_table(rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options.full, options.repeats, options.patience)
    options.out.mkdir(parents=True, exist_ok=True)
    text = report(found)
    (options.out / "RESULTS.md").write_text(text)
    (options.out / "results.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(text)


if __name__ == "__main__":
    main()
