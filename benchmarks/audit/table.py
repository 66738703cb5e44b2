"""Write how often the verdicts of `lm.audit` are right, on the planted cases that were measured.

    PYTHONPATH=.:demos python -m benchmarks.audit.table          writes benchmarks/audit/results/verdicts.md

It reads `outputs/audit/MODEL/report.jsonl`, which `python -m benchmarks.audit MODEL report …` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.audit.cases import FORMS, VERDICTS
from benchmarks.common import describe_measurement
from benchmarks.traces.table import wilson

MODELS = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}
FILE = Path(__file__).parent / "results" / "verdicts.md"
HARD = tuple(form for form in FORMS if form != "short")
Entry = dict[str, Any]


def read(model_name: str, part: str = "report") -> list[Entry]:
    """Return the measured cases of a model, those whose value it would not write itself among them."""
    path = Path(f"outputs/audit/{model_name}/{part}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_right(entry: Entry) -> bool:
    """Return whether the verdict of a case is the planted one."""
    return bool(entry["verdict"] == entry["truth"])


def names_planted(entry: Entry) -> bool:
    """Return whether the sources that a claim rests on are exactly the planted ones."""
    found = {source for ground in entry["grounds"] for source in ground[0]}
    return found == set(entry["gold"])


def share(values: Iterable[bool]) -> str:
    """Return a share with its interval, or nothing."""
    array = np.array([float(each) for each in values])
    if not len(array):
        return ""
    low, high = wilson(array)
    return f"{array.mean():.2f} [{low:.2f}, {high:.2f}]"


def row(cells: Sequence[Any]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def describe_verdicts(entries: Sequence[Entry]) -> list[str]:
    """Return the table of verdicts: how many are right, and how many planted ones are found."""
    lines = [
        "| verdict | n | precision, 95 % | planted | recall, 95 % | unclear, 95 % |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for verdict in VERDICTS:
        given = [entry for entry in entries if entry["verdict"] == verdict]
        planted = [entry for entry in entries if entry["truth"] == verdict]
        unclear = [entry["verdict"] == "unclear" for entry in planted]
        precision, recall = share(map(is_right, given)), share(map(is_right, planted))
        lines.append(row([verdict, len(given), precision, len(planted), recall, share(unclear)]))
    committed = [entry for entry in entries if entry["verdict"] != "unclear"]
    unclear = [entry["verdict"] == "unclear" for entry in entries]
    right = share(map(is_right, committed))
    found = share(map(is_right, entries))
    lines.append(row(["all", len(committed), right, len(entries), found, share(unclear)]))
    return lines


def describe_forms(entries: Sequence[Entry]) -> list[str]:
    """Return the table of forms, with the number of passes and whether the planted sources are named."""
    lines = [
        "| form | n | sources | right where it commits itself, 95 % | unclear | planted sources, 95 % | "
        "passes, mean | passes, most |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for form in FORMS:
        own = [entry for entry in entries if entry["form"] == form]
        if own:
            committed = [entry for entry in own if entry["verdict"] != "unclear"]
            rests = [entry for entry in committed if entry["gold"]]
            passes = np.array([entry["passes"] for entry in own])
            count = f"{np.mean([entry['n'] for entry in own]):.0f}"
            cells = [form, len(own), count, share(map(is_right, committed))]
            cells.append(share(entry["verdict"] == "unclear" for entry in own))
            cells += [share(map(names_planted, rests)), f"{passes.mean():.1f}", passes.max()]
            lines.append(row(cells))
    return lines


def main() -> None:
    """Write the record."""
    lines = ["# Verdicts of the audit on planted cases", ""]
    lines += [
        'Written by `PYTHONPATH=.:demos python -m benchmarks.audit.table`. Cases of the part "report", whose '
        "topics, words and fillers are not those of the parts on which thresholds were chosen and rules were "
        "mended. It was measured once: seeds 0 to 12, of long prompts 0 to 2. Precision: the share of the "
        "claims with this verdict for which it is the planted one. Recall: the share of the claims with this "
        "truth that get it. Unclear: the share of these that get no verdict. Planted sources: the share of "
        "claims whose named sources are exactly the planted ones. Passes: forward passes without sources, "
        "besides the trace. Intervals are 95 % (Wilson).",
    ]
    for model_name, name in MODELS.items():
        tried = read(model_name)
        entries = [entry for entry in tried if entry["written"]]
        groups = {"short": ("short",), "hard": HARD}
        for group, forms in groups.items():
            own = [entry for entry in entries if entry["form"] in forms]
            if own:
                listed = [form for form in forms if any(entry["form"] == form for entry in own)]
                lines += ["", f"## Verdicts of {name}, {group}", "", f"Forms: {', '.join(listed)}.", ""]
                lines += [describe_measurement(), ""]
                lines += describe_verdicts(own)
        if entries:
            lines += ["", f"## Forms of {name}", ""]
            lines += [
                f"{len(entries)} of {len(tried)} cases: the others have a value that it would not write."
            ]
            lines += ["", *describe_forms(entries)]
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
