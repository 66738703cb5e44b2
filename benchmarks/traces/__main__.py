"""Run the trace benchmarks in rounds: a prompt of each family and model, its removals, and its maps.

    python -m benchmarks.traces choose 3                  three prompts per family and model
    python -m benchmarks.traces held_out 8 smollm2        eight, of one model
    python -m benchmarks.traces held_out 8 all recommended    only one group of maps, of what exists

Everything is stored in `outputs/traces/`, so a stopped run continues. A file `outputs/traces/stop` stops it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from benchmarks.traces.drops import add_drops
from benchmarks.traces.gold import find, folder, records
from benchmarks.traces.maps import GROUPS, compute, load_models

MODELS = ("smollm2", "gemma3")
FAMILIES = ("needle", "conflict", "statement", "injection", "variables")
# The recipe of `lm.input_map` takes a pass for each written token, so it comes last.
LAST = "recommended"


def main(half: str, count: str, model_names: str = "all", only: str = "", families: str = "") -> None:
    """Run rounds until every family of every model has `count` prompts."""
    torch.set_num_threads(1)
    start = time.time()
    groups = [only] if only else [name for name in GROUPS if name != LAST]
    for number in range(1, int(count) + 1):
        for family in families.split(",") if families else FAMILIES:
            for model_name in MODELS if model_names == "all" else (model_names,):
                if Path("outputs/traces/stop").exists():
                    return
                found = load_models(model_name)
                if not only:
                    find(found.plain, found.tokenizer, model_name, half, family, number)
                for path, record in list(records(model_name, half, family))[:number]:
                    compute(found, path, record, groups)
                    if family == "statement":
                        add_drops(found.plain, path, record)
                place = folder(model_name, half, family)
                print(number, place, f"{time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
