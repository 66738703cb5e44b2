"""Compare `lm.input_map` with measured and with estimated scores, on held-out prompts.

    python -m benchmarks.input_map.exact smollm2 32 [limit]       (or gemma3)

The prompts have at most 32 tokens. It needs the importance of `benchmarks.input_map.importance`, stores the
rows, and writes `results/exact.md`.
"""

from __future__ import annotations

import datetime
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch

import lens_mix as lm
from benchmarks.input_map.importance import file_of, folder
from benchmarks.input_map.prompts import make
from benchmarks.input_map.table import agreement, interval

ROWS: dict[str, int | str | bool] = {"estimated": False, "8 measured": 8, "auto": "auto"}
NAMES = {
    "estimated": "`lm.input_map(exact=False)`",
    "8 measured": "`lm.input_map(exact=8)`",
    "auto": '`lm.input_map(exact="auto")`',
}


def compute_rows(model, tokens: torch.Tensor) -> dict[str, dict]:
    """Return the row of each setting, with what it measured and its processor time."""
    rows = {}
    for name, exact in ROWS.items():
        start = time.process_time()
        found = lm.input_map(model, tokens, exact=exact, progress=None)
        record = found.provenance["input_map"]
        rows[name] = {
            "row": found.scores[0, 0],
            "measured": len(record["measured"][0]) if "measured" in record else 0,
            "seconds": time.process_time() - start,
        }
    start = time.process_time()
    with torch.no_grad():
        model(tokens[None])
    rows["forward"] = {"seconds": time.process_time() - start}
    return rows


def main(model_name: str, longest: str, limit: str = "1000") -> None:
    """Compute the missing rows of held-out prompts, and write the table."""
    import models

    torch.set_num_threads(1)
    model, kept = getattr(models, model_name)(), folder(f"{model_name} exact")
    prompts = [prompt for prompt in make() if prompt.half == "held_out"]
    random.Random(0).shuffle(prompts)
    used, scores = [], {name: [] for name in ROWS}
    for prompt in prompts:
        measured = file_of(model_name, prompt)
        if not measured.exists() or len(used) == int(limit):
            continue
        record, path = torch.load(measured), kept / measured.name
        tokens, positions = record["tokens"], record["positions"]
        if len(tokens) > int(longest) or len(positions) < 4:
            continue
        if not path.exists():
            torch.save(compute_rows(model, tokens), path)
        rows = torch.load(path)
        used.append((len(tokens), rows))
        for name, values in scores.items():
            row = rows[name]["row"][positions].double().numpy()
            importance = record["importance"].double().numpy()
            values.append(agreement(row, importance, positions.double().numpy()))
    Path(__file__).parent.joinpath("results", f"exact_{model_name}.md").write_text(
        "\n".join(_make_page(model_name, longest, used, {name: np.array(v) for name, v in scores.items()}))
    )


def _make_page(model_name: str, longest: str, used: list, scores: dict[str, np.ndarray]) -> list[str]:
    from importlib.metadata import version

    measured_on = (
        f"Measured {datetime.date.today()} with TransformerLens {version('transformer-lens')}, "
        f"torch {version('torch')}."
    )
    lengths = [length for length, _ in used]
    lines = [
        "# Measured and estimated scores of `lm.input_map`",
        "",
        f"Written by `PYTHONPATH=.:demos python -m benchmarks.input_map.exact {model_name} {longest}`.",
        f"Held-out prompts of at most {longest} tokens ({min(lengths)} to {max(lengths)}). The measured "
        'scores are of the words " thing" and " green"; the importance is of four other words.',
        "",
        f"## Measured scores of {model_name}",
        "",
        measured_on,
        "",
        "| map | n | partial, 95 % | Spearman | more than estimated, 95 % | measured scores |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, values in scores.items():
        partial, plain, _ = values.mean(0)
        low, high = interval(values[:, 0])
        paired = values[:, 0] - scores["estimated"][:, 0]
        less, more = interval(paired)
        gain = "" if name == "estimated" else f"{paired.mean():.2f} ({less:.2f} to {more:.2f})"
        share = np.mean([rows[name]["measured"] / length for length, rows in used])
        lines.append(
            f"| {NAMES[name]} | {len(values)} | {partial:.2f} ({low:.2f} to {high:.2f}) | {plain:.2f} | {gain} "
            f"| {100 * share:.0f} % |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    main(*sys.argv[1:])
