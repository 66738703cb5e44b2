"""Compare `lm.input_map` with measured and with estimated scores, on held-out prompts.

    python -m benchmarks.input_map.exact smollm2       (or gemma3)

It needs the importance of `benchmarks.input_map.importance`, stores the rows, and writes `results/exact.md`
(of another model, `results/exact_MODEL.md`) with tables of prompts up to 32 tokens and, if there are longer
ones, of these and of all.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import lens_mix as lm
from benchmarks.common import machine, markdown_table
from benchmarks.input_map.importance import file_of, folder
from benchmarks.input_map.prompts import make
from benchmarks.input_map.table import agreement, interval
from lens_mix.methods.token_patching import LONGEST_MEASURED as LONGEST

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


def main(model_name: str) -> None:
    """Compute the missing rows of held-out prompts, and write the tables."""
    import models

    torch.set_num_threads(1)
    model, kept = getattr(models, model_name)(), folder(f"{model_name} exact")
    used: list[tuple[int, dict, dict[str, tuple[float, float, float]]]] = []
    for prompt in make():
        measured = file_of(model_name, prompt)
        if prompt.half != "held_out" or not measured.exists():
            continue
        record, path = torch.load(measured), kept / measured.name
        tokens, positions = record["tokens"], record["positions"]
        if len(positions) < 4:
            continue
        if not path.exists():
            torch.save(compute_rows(model, tokens), path)
        rows = torch.load(path)
        other = record["importance"].double().numpy(), positions.double().numpy()
        scores = {name: agreement(rows[name]["row"][positions].double().numpy(), *other) for name in ROWS}
        used.append((len(tokens), rows, scores))
    name = "exact.md" if model_name == "smollm2" else f"exact_{model_name}.md"
    described = ", ".join(f"{key} {value}" for key, value in machine().items() if value is not None)
    longer = [each for each in used if each[0] > LONGEST]
    sections = [
        _make_section(model_name, f"at most {LONGEST} tokens", [each for each in used if each[0] <= LONGEST])
    ]
    if longer:
        sections += [
            _make_section(model_name, f"more than {LONGEST} tokens", longer),
            _make_section(model_name, "all lengths", used),
        ]
    page = (
        "# Measured and estimated scores of `lm.input_map`\n\n"
        f"Written by `PYTHONPATH=.:demos python -m benchmarks.input_map.exact {model_name}`. The measured "
        'scores are of the words " thing" and " green". The importance is of four other words. Processor '
        f"time on one thread, which other programs disturbed.\n\nMachine: {described}.\n\n"
    )
    path = Path(__file__).parent / "results" / name
    path.write_text(page + "\n".join(sections), encoding="utf-8")


def _make_section(model_name: str, title: str, used: list) -> str:
    """Return the table of some prompts."""
    rows = []
    for name in ROWS:
        scores = np.array([scores[name] for _, _, scores in used])
        gain = scores[:, 0] - np.array([scores["estimated"][0] for _, _, scores in used])
        low, high = interval(scores[:, 0])
        less, more = interval(gain)
        passes = [made[name]["seconds"] / made["forward"]["seconds"] for _, made, _ in used]
        share = np.mean([made[name]["measured"] / count for count, made, _ in used])
        rows.append(
            {
                "map": NAMES[name],
                "n": len(used),
                "partial, 95 %": f"{scores[:, 0].mean():.2f} ({low:.2f} to {high:.2f})",
                "Spearman": f"{scores[:, 1].mean():.2f}",
                "more than estimated, 95 %": ""
                if name == "estimated"
                else f"{gain.mean():.2f} ({less:.2f} to {more:.2f})",
                "measured scores": f"{100 * share:.0f} %",
                "forward passes, median": f"{np.median(passes):.1f}",
            }
        )
    releases = f"TransformerLens {version('transformer-lens')}, torch {version('torch')}"
    lengths = [count for count, _, _ in used]
    return (
        f"## {model_name}, held out, {title}\n\n{min(lengths)} to {max(lengths)} tokens.\n\n"
        f"Measured {time.strftime('%Y-%m-%d', time.gmtime())} with {releases}.\n\n{markdown_table(rows)}\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
