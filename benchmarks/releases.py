"""Compare Value Zeroing of two checkouts of this repository, in turns, by processor time on one thread.

    git worktree add ../old d092647
    python -m benchmarks.releases ../old . --repeats 5 --out benchmarks

Each side runs in a process of its own. Old checkouts choose a library for large products by a timing; here
they use PyTorch's own.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TITLE = "Value Zeroing, this release and d092647"
NOTE = "Two processes in turns, one thread, processor time, MKL on both sides; ratios by turn; medians."
LARGE_PRODUCT = (
    "lens_mix.lens.large_product",
    "lens_mix.algebra.large_product",
    "lens_mix.methods.large_product",
)


def answer(root: str, name: str, layers: int) -> None:
    """Run a worker: print the seconds of one run for each length that is read from standard input."""
    sys.path.insert(0, root)
    import torch

    torch.set_num_threads(1)
    lens_mix, common = importlib.import_module("lens_mix"), importlib.import_module("benchmarks.common")
    for module in LARGE_PRODUCT:
        if (Path(root) / f"{module.replace('.', '/')}.py").exists():
            importlib.import_module(module)._onednn_is_faster = lambda threads: False
    model = common.MODELS[name](layers=layers)
    for line in sys.stdin:
        tokens = common.random_tokens(model, int(line))
        start = time.process_time()
        lens_mix.run(model, tokens, "value_zeroing", engine="algebra")
        print("seconds", time.process_time() - start, flush=True)


def seconds(worker: subprocess.Popen[str], length: int) -> float:
    """Return the seconds of one run of a worker."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{length}\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("seconds"):
            return float(line.split()[1])
    raise RuntimeError(f"expected seconds, got the end of a worker's output: {worker.args}")


def rows(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield a row per model and length, from two workers that run as long as the model is measured."""
    for name in options.models:
        workers = []
        for root in (options.old.resolve(), options.new.resolve()):
            command = [sys.executable, __file__, str(root), "", "--worker", "--models", name]
            command += ["--layers", str(options.layers)]
            environment = {**os.environ, "PYTHONPATH": str(root)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            workers.append(subprocess.Popen(command, text=True, cwd=root, env=environment, **pipes))
        for length in options.sizes:
            for worker in workers * 2:
                seconds(worker, length)
            times = [[seconds(worker, length) for worker in workers] for _ in range(options.repeats)]
            old, new = (statistics.median(column) for column in zip(*times, strict=True))
            # The speed of a product may change by a third within a second, so ratios are made within a turn.
            ratio = statistics.median(before / after for before, after in times)
            yield {"model": name, "positions": length, "old s": old, "new s": new, "old ÷ new": ratio}
        for worker in workers:
            worker.terminate()


def main() -> None:
    """Print the table or write it to a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--out", type=Path, help="a folder whose RESULTS.md and results.json get the table")
    parser.add_argument("--models", nargs="+", default=["gpt2-like", "bert-like", "llama-like"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return answer(options.old, options.models[0], options.layers)
    # This import is not at the top, because a worker has to use the `benchmarks.common` of its own checkout.
    from benchmarks import common

    if options.out is not None:
        common.write_table(options.out, TITLE, rows(options), NOTE)
    else:
        print(common.markdown_table(list(rows(options))))


if __name__ == "__main__":
    main()
