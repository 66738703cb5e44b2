"""Run the trace benchmarks in rounds: a prompt of each family and model, its removals, and its maps.

    python -m benchmarks.traces choose 3                  three rounds
    python -m benchmarks.traces held_out 8 smollm2        eight, of one model
    python -m benchmarks.traces held_out 8 all recommended    only one group of maps, of what exists
    python -m benchmarks.traces held_out 4 all "" long_500,long_1000,long_2000     long prompts
    python -m benchmarks.traces held_out 12 all "" same_2000,same_8000      with distractors of the same form

Everything is stored in `outputs/traces/`, so a stopped run continues. A file `outputs/traces/stop` stops it.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import torch

from benchmarks.traces.drops import add_drops
from benchmarks.traces.gold import find, folder, records
from benchmarks.traces.maps import LONG_GROUPS, SAME_FORM_GROUPS, SHORT_GROUPS, compute, load_models
from benchmarks.traces.prompts import LENGTHS, SAME_FORM

MODELS = ("smollm2", "gemma3")
FAMILIES = ("needle", "conflict", "statement", "injection", "variables")
# Prompts per round of the held-out half: fewer of those in which most maps are right.
SHARES = {"needle": 0.75, "conflict": 1, "statement": 1, "injection": 0.5, "variables": 0.75}


def choose_groups(family: str, only: str) -> tuple[str, ...]:
    """Return the groups of maps of a family, or the only one."""
    if only:
        return (only,)
    if family in SAME_FORM:
        return SAME_FORM_GROUPS
    return LONG_GROUPS if family in LENGTHS else SHORT_GROUPS


def main(half: str, count: str, model_names: str = "all", only: str = "", families: str = "") -> None:
    """Run `count` rounds."""
    torch.set_num_threads(1)
    start = time.time()
    for turn in range(1, int(count) + 1):
        for family in families.split(",") if families else FAMILIES:
            number = math.ceil(turn * (1 if half == "choose" else SHARES.get(family, 1)))
            groups = choose_groups(family, only)
            for model_name in MODELS if model_names == "all" else (model_names,):
                if Path("outputs/traces/stop").exists():
                    return
                found = load_models(model_name)
                if not only:
                    # Without the patterns of long prompts the removals take a third of the time.
                    found.plain.set_attn_implementation("sdpa" if family in LENGTHS else "eager")
                    find(found.plain, found.tokenizer, model_name, half, family, number)
                found.plain.set_attn_implementation("eager")
                for path, record in list(records(model_name, half, family))[:number]:
                    compute(found, path, record, groups)
                    if family == "statement":
                        add_drops(found.plain, path, record)
                place = folder(model_name, half, family)
                print(number, place, f"{time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
