"""Compute the leaderboard, benchmarks/LEADERBOARD.md: every method and aggregation on trained models.

    python -m benchmarks.leaderboard smollm2 importance        one model, one task; resumes a stopped run
    python -m benchmarks.leaderboard --tables                  all finished tables as Markdown
    python -m benchmarks.leaderboard --record smollm2-importance   a finished table into LEADERBOARD.md, then:
    python -m benchmarks.leaderboard --facts                   what is quoted of recorded tables (facts.py)
    python -m benchmarks.leaderboard smollm2 importance 40 gim     only the rows of one method, and then:
    python -m benchmarks.leaderboard --merge smollm2-importance gim         these rows into LEADERBOARD.md

Models: smollm2, gemma3, minilm. Tasks: importance, planted, removals, cells (for minilm: removals). Each
table also has the same methods on shuffled weights. Finished cases are stored in outputs/leaderboard/, one
file per model and task. A third argument limits the number of prompts.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import lens_mix as lm
from benchmarks import facts
from benchmarks.common import describe_measurement
from benchmarks.input_map.prompts import make
from lens_mix import evaluation, experiments

FOLDER = Path("outputs") / "leaderboard"
LAYER_METHODS = [
    "attention",
    "value_norm",
    "attn_res",
    "attn_res_ln",
    "atb_ff_res_ln",
    "globenc",
    "alti",
    "information_flow_routes",
    "value_zeroing",
    "gradient_attention",
]
INPUT_METHODS: list[Any] = [
    "decompx",
    "alti_logit",
    lm.methods.InputGradients(),
    lm.methods.InputGradients(score="times_input"),
    lm.methods.InputGradients(score="integrated", n_steps=8, baseline="mean"),
    "frozen_gradients",
    "gim",
    lm.methods.Gim(readout="absolute"),
    lm.methods.Gim(activations="ratio", readout="absolute"),
    lm.methods.TokenPatching(replacements=(" thing", " green")),
    "context_length",
    lm.methods.Occlusion(by="mask"),
    lm.methods.Occlusion(by="values"),
]
AGGREGATIONS = {
    "rollout": lm.rollout,
    "rollout, receptive field": lambda m: lm.rollout(m, receptive_field=True),
    "rollout, residual 0.5": lambda m: lm.rollout(m, residual=0.5),
    "rollout, residual measured": lambda m: lm.rollout(m, residual="measured"),
    "rollout, residual measured, receptive field": lambda m: lm.rollout(
        m, residual="measured", receptive_field=True
    ),
    "rollout, total mixing 1.5": lambda m: lm.rollout(m, total_mixing=1.5),
    "rollout, total mixing 5": lambda m: lm.rollout(m, total_mixing=5),
    "rollout, total mixing 1.5, receptive field": lambda m: lm.rollout(
        m, total_mixing=1.5, receptive_field=True
    ),
    "mean": lm.layer_mean,
    "mean of shares": lambda m: lm.layer_mean(m, normalize=True),
    "gradient_rollout": lm.gradient_rollout,
}
SENTENCES = (
    "The keys to the old cabinet are on the kitchen table.",
    "Doctors in the city asked for more money and better hours.",
    "A small dog ran across the street before the light changed.",
    "My sister plays the violin in an orchestra every Friday evening.",
    "Scientists have found water on a planet far from the sun.",
    "The film was long, but the ending surprised everyone in the room.",
    "He forgot his umbrella on the train and walked home in the rain.",
    "Prices rose again this month, mostly because of fuel and food.",
    "The museum will open two new rooms for modern art next spring.",
    "She wrote the letter by hand and sent it to her grandmother.",
    "Farmers in the valley grow apples, pears and a little wine.",
    "The bridge was closed after the storm, so the bus took another road.",
)


def short_prompts(count: int, longest: int = 160) -> list[str]:
    """Return short prompts of the half on which the search was made, of all kinds."""
    texts = [prompt.text for prompt in make() if prompt.half == "choose" and len(prompt.text) <= longest]
    random.Random(7).shuffle(texts)
    return texts[:count]


def task_of(name: str, model_name: str, model: Any, count: int | None = None) -> evaluation.Task:
    """Return the task of a model. `count` limits the number of prompts."""
    if model_name == "minilm":
        # A sentence's vector is what counts, and the residual stream at the first position represents it.
        return evaluation.Removals(SENTENCES, "sample", beam=2)
    if name == "importance":
        return evaluation.Importance(short_prompts(count or 40))
    if name == "planted":
        return evaluation.Cues(experiments.planted_facts(model, count or 24, sentences=3), leave_out=(0,))
    if name == "removals":
        return evaluation.Removals(short_prompts(count or 12, 70), "sample", beam=2)
    return evaluation.Cells(short_prompts(count or 12, 70), "zero" if name == "cells" else "mean")


def main(model_name: str, task_name: str, count: str | None = None, only: str = "") -> None:
    """Run one table as far as it is not finished.

    Args:
        model_name: "smollm2", "gemma3" or "minilm".
        task_name: "importance", "planted", "removals" or "cells".
        count: The largest number of prompts.
        only: The name of one method, whose forms alone are run.
    """
    import models

    model = {"smollm2": models.smollm2, "gemma3": models.gemma3, "minilm": models.minilm}[model_name]()
    task = task_of(task_name, model_name, model, int(count) if count else None)
    methods = LAYER_METHODS if task.layer_maps else [*LAYER_METHODS, *INPUT_METHODS]
    methods = [each for each in methods if only in ("", each, getattr(each, "name", ""))]
    name = f"{model_name}-{task_name}" + (f"-{only}" if only else "")
    start = time.time()
    board = lm.evaluate(
        model,
        task,
        methods,
        AGGREGATIONS,
        randomised_model=True,
        resume=FOLDER / f"{name}.jsonl",
        progress=True,
    )
    (FOLDER / f"{name}.md").write_text(board.to_markdown("position") + "\n")
    print(board.to_markdown("position"))
    print(f"{time.time() - start:.0f} s; not defined on this model: {board.refused}")


def record(name: str) -> None:
    """Put a finished table into LEADERBOARD.md with its date and releases, and write all facts anew."""
    path = FOLDER / f"{name}.md"
    date = time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
    facts.record(name, path.read_text(), describe_measurement(date))
    facts.write()


def merge(name: str, method: str) -> None:
    """Put the rows of one method, from a finished run of it alone, into LEADERBOARD.md; other rows stay.

    Intervals are percentiles of the bootstrap, as in the recorded rows.

    Raises:
        ValueError: The controls differ from the recorded ones, so the prompts or the measure differ.
    """
    lines = (FOLDER / f"{name}-{method}.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for line in lines[1:] for record in json.loads(line).get("records", [])]
    found = facts.recorded(facts.TABLES[name], "method", "cases")
    metrics = [column.removesuffix(" above position") for column in found.header[2:-1]]
    scores: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for each in records:
        scores.setdefault((each["method"], each["aggregation"]), {})[each["case"]] = each
    controls = scores["position", "-"]

    def cells(key: tuple[str, str]) -> list[str]:
        of = scores[key]
        row = [
            interval([of[i][metric] - (controls[i][metric] if "above" in column else 0) for i in sorted(of)])
            for metric, column in zip(metrics, found.header[2:-1], strict=True)
        ]
        return [*key, *row, str(len(of))]

    rows = {tuple(cells[:2]): cells for cells in found.body}
    fresh = {key: cells(key) for key in scores}
    differing = [key for key in (("position", "-"), ("random", "-")) if not _agree(fresh[key], rows[key])]
    if differing:
        raise ValueError(f"{name}: expected the recorded {rows[differing[0]]}, got {fresh[differing[0]]}")
    for key, row in fresh.items():
        if re.match(rf"{method}\b", key[0]):
            if key in rows and rows[key] != row:
                print(f"{name}: {rows[key]} is now {row}")
            rows[key] = row
    table = sorted(rows.values(), key=lambda row: -float(row[2].split()[0]))
    lines = [f"| {' | '.join(row)} |" for row in [found.header, *table]]
    text = "\n".join([lines[0], "|" + "---|" * len(found.header), *lines[1:]])
    date, release = facts.measured(name)
    kept = [each for each in re.findall(r"[^();]+: [\d-]+", date) if not each.strip().startswith(method)]
    today = time.strftime("%Y-%m-%d", time.gmtime())
    dates = "; ".join([*(each.strip() for each in kept), f"{method}: {today}"])
    facts.record(name, text, f"Measured {date.split()[0]} ({dates}) with {release}.")


def _agree(row: list[str], recorded: list[str]) -> bool:
    """Return whether two rows have the same figures, up to one unit of the last digit, by rounding."""
    found, expected = (re.findall(r"-?\d+(?:\.\d+)?", " ".join(each)) for each in (row, recorded))
    pairs = zip(found, expected, strict=False)
    return len(found) == len(expected) and all(abs(float(a) - float(b)) < 0.011 for a, b in pairs)


def interval(values: list[float]) -> str:
    """Return the mean of the defined values with its 95 % interval, percentiles of 10,000 drawn means."""
    defined = np.array([value for value in values if value is not None and not np.isnan(value)])
    drawn = np.random.default_rng(0).integers(0, len(defined), (10_000, len(defined)))
    low, high = np.quantile(defined[drawn].mean(1), [0.025, 0.975])
    return f"{defined.mean():.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    if sys.argv[1:] == ["--facts"]:
        facts.write()
    elif sys.argv[1:2] == ["--record"]:
        record(sys.argv[2])
    elif sys.argv[1:2] == ["--merge"]:
        merge(*sys.argv[2:4])
    elif sys.argv[1:] == ["--tables"]:
        for path in sorted(FOLDER.glob("*.md")):
            print(f"## {path.stem}\n\n{path.read_text()}")
    else:
        main(*sys.argv[1:5])
