"""Score every method on the constructed models, and write results/areas.md.

python -m benchmarks.constructed               24 prompts per model
python -m benchmarks.constructed --count 4     fewer prompts
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.common import describe_machine, markdown_table
from lens_mix.experiments import score_constructed

FILE = Path(__file__).parent / "results" / "areas.md"
# The title of each table, by the aggregation in the data frame.
TITLES = {
    "layers": "Layer maps",
    "input": "Input maps of the methods themselves",
    "rollout": "Rollouts of layer maps",
    "gradient_rollout": "Gradient rollouts",
    "mean": "Means over layers",
    "flow": "Flows",
}


def main() -> None:
    """Write the tables with their date and machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=24, help="prompts per model")
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    start = time.perf_counter()
    frame = score_constructed(count=options.count, progress=True)
    text = format_page(frame, options.count, time.perf_counter() - start)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(text, encoding="utf-8")


def format_page(frame: pd.DataFrame, count: int, seconds: float) -> str:
    """Return the page of results: one table per kind of map, and the reasons for empty cells.

    Args:
        frame: What `score_constructed` returned.
        count: The number of prompts per model.
        seconds: The time that it took.
    """
    texts = [
        "# Methods on constructed models",
        "Written by `python -m benchmarks.constructed`; see "
        "[the page](../../../docs/evidence/known_truth.md).",
        f"Machine: {describe_machine()}; {seconds:.0f} s.",
        f"Mean area under the ROC curve over {count} prompts, 0 to 1. 1: every true cell or token scores "
        "above every false one. 0.5: chance. A dash: the method does not run on the model. `position` is a "
        "control in which later keys have higher scores.",
    ]
    for aggregation, title in TITLES.items():
        part = frame[frame.aggregation == aggregation]
        texts += [f"## {title}", markdown_table(_list_areas(part)), _describe_intervals(part)]
    texts += ["## Methods that do not run", markdown_table(_list_reasons(frame))]
    return "\n\n".join(texts) + "\n"


def _list_areas(part: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one row per model, with the area of each method."""
    methods = dict.fromkeys(part.method)
    areas = {(row.model, row.method): row for row in part.itertuples()}
    return [
        {"model": model, **{name: _format_area(areas.get((model, name))) for name in methods}}
        for model in dict.fromkeys(part.model)
    ]


def _format_area(row: Any) -> str:
    return "–" if row is None or not row.n else f"{row.area:.2f}"


def _describe_intervals(part: pd.DataFrame) -> str:
    """Return a sentence on the width of the intervals, of the methods and of the control."""
    half = (part.high - part.low) / 2
    methods, position = half[part.method != "position"], half[part.method == "position"]
    control = f" and ± {position.max():.2f} for `position`" if len(position) else ""
    return f"The 95 % bootstrap intervals are at most ± {methods.max():.2f} for the methods{control}."


def _list_reasons(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each reason once, with the methods and models that it concerns."""
    refused = frame[frame.n == 0]
    return [
        {
            "methods": _list_names(group.method),
            "models": _list_names(group.model),
            "reason": reason,
        }
        for reason, group in refused.groupby(refused.note.map(_shorten), sort=False)
    ]


def _list_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _shorten(note: str) -> str:
    """Return the reason without the method, the engine and the block, so that equal reasons are one row."""
    return note[note.index("expected") :] if "expected" in note else note


if __name__ == "__main__":
    main()
