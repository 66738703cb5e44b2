"""Write the table of models from what `tests.record_models` recorded on each release of TransformerLens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULT = Path(__file__).with_name("models.json")

_INTRODUCTION = """# Models

Which models work? Each row is a class that the tests build tiny and random on each release of TransformerLens
that has it, and compare with transformers. `lm.support(model)` gives the same answer for your model.

A number is how many of the {count} methods run on it. "yes" in the next columns means that Value Zeroing
runs, that gradients with respect to the input (`gim`) do, and that prompts may have pictures. A dash means
that the release does not have the class. A class that is not listed may work too, as every block is verified.
"""
_ABSENT = """
## Models without maps

{refusals}
- CodeGen and Llama 4 with pictures do not run on transformers 5.24. They do on 5.23.
- CLIP and others that TransformerLens has no adapter for cannot be loaded: `lm.run` needs a TransformerLens
  model, and raises a TypeError for one of transformers.
"""


def write_page() -> str:
    """Return the text of the page."""
    found = read_result()
    releases = sorted(found, key=_as_numbers, reverse=True)
    labels = list(dict.fromkeys(label for release in releases for label in found[release]))
    count = max(entry["methods"] for release in releases for entry in found[release].values())
    header = ["class", "model of the tests", *(f"methods, {release}" for release in releases)]
    header += ["Value Zeroing", "input maps", "pictures"]
    lines = [_write_row(header), _write_row(["---"] * len(header))]
    refusals: dict[str, list[str]] = {}
    for label in labels:
        entries = {release: found[release][label] for release in releases if label in found[release]}
        newest = next(iter(entries.values()))
        counts = [str(entries[release]["methods"]) if release in entries else "–" for release in releases]
        part = f", {newest['part']}" if newest["part"] else ""
        flags = ["yes" if newest[name] else "" for name in ("value_zeroing", "input_maps", "pictures")]
        lines.append(_write_row([f"{newest['class']}{part}", f"`{label}`", *counts, *flags]))
        for release, entry in entries.items():
            if entry["reason"]:
                reason = _shorten(entry["reason"])
                refusals.setdefault(f"`{label}`: {reason}", []).append(release)
    table = "\n".join(lines)
    listed = "\n".join(f"- {text} ({', '.join(names)})" for text, names in refusals.items())
    introduction = _INTRODUCTION.format(count=count)
    return f"{introduction}\n{table}\n{_ABSENT.format(refusals=listed)}"


def _as_numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def _write_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shorten(reason: str) -> str:
    """Return the first sentence of a reason, without the hooks of the model."""
    first = reason.partition("; these hooks are on the model")[0]
    first = first.rpartition("recorded: ")[2]
    return first if len(first) <= 300 else f"{first[:299]}…"


def read_result() -> Mapping[str, Any]:
    """Return what was recorded, by the release of TransformerLens and the label of the matrix."""
    result: Mapping[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return result
