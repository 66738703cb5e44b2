"""Compute the leaderboard of docs/evidence/leaderboard.md: every method and aggregation on trained models.

    python -m benchmarks.leaderboard smollm2 importance        one model, one task; resumes a stopped run
    python -m benchmarks.leaderboard --tables                  all finished tables as Markdown
    python -m benchmarks.leaderboard --record smollm2-importance   a finished table into LEADERBOARD.md, then:
    python -m benchmarks.leaderboard --facts                   what is quoted of recorded tables (facts.py)
    python -m benchmarks.leaderboard smollm2 importance 40 gim     only the rows of one method, and then:
    python -m benchmarks.leaderboard --merge smollm2-importance gim     these rows into LEADERBOARD.md

Models: smollm2, gemma3, minilm. Tasks: importance, planted, removals, cells (for minilm: removals). Each
table also has the same methods on shuffled weights. Finished cases are stored in outputs/leaderboard/, one
file per model and task. A third argument limits the number of prompts.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import lens_mix as lm
from benchmarks import facts
from benchmarks.common import describe_measurement
from benchmarks.input_map.prompts import make
from lens_mix import evaluation

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
    lm.InputGradients(),
    lm.InputGradients(score="times_input"),
    lm.InputGradients(score="integrated", n_steps=8, baseline="mean"),
    "frozen_gradients",
    "gim",
    lm.Gim(readout="absolute"),
    lm.Gim(activations="ratio", readout="absolute"),
    lm.AttributionPatching(replacements=(" thing", " green")),
    "context_length",
    lm.Occlusion(by="mask"),
    lm.Occlusion(by="values"),
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
        return evaluation.Cues(evaluation.planted_facts(model, count or 24, sentences=3), leave_out=(0,))
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


if __name__ == "__main__":
    if sys.argv[1:] == ["--facts"]:
        facts.write()
    elif sys.argv[1:2] == ["--record"]:
        record(sys.argv[2])
    elif sys.argv[1:] == ["--tables"]:
        for path in sorted(FOLDER.glob("*.md")):
            print(f"## {path.stem}\n\n{path.read_text()}")
    else:
        main(*sys.argv[1:4])
