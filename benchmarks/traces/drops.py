"""Measure what is lost if a map's five strongest sentences are removed together.

python -m benchmarks.traces.drops smollm2 choose            (or gemma3, held_out)
python -m benchmarks.traces.drops smollm2 held_out 8        all sets of five in eight short statements
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.input_map.importance import load
from benchmarks.traces.gold import Record, log_p_without, records, store
from benchmarks.traces.scores import TOP_SENTENCES, best_sentences, strongest

# All sets of five of more sentences are too many to remove.
FEW_SENTENCES = 12
# Rows with this beginning are inputs of learned maps, and not maps.
FEATURES = "features: "
# Maps without negative scores give every token something, so long sentences have large sums. These are also
# scored above the prompt's median, a variant that was found on the half to choose on.
ABOVE_MEDIAN = (
    "gim, absolute",
    "gim, ratio, absolute",
    "gradient_attention, mean",
    "value_zeroing, mean",
    "alti, mean",
)


def rows_of(path: Path) -> dict[str, Float[Tensor, " prompt"]]:
    """Return all stored rows of a record by the name of the map, and some of them above their median."""
    rows: dict[str, Tensor] = {}
    stem = path.name.removesuffix(".record.pt")
    for file in sorted(path.parent.glob(f"{stem}.*.pt")):
        if file != path:
            rows |= torch.load(file)["rows"]
    rows = {name: row for name, row in rows.items() if not name.startswith(FEATURES)}
    for name in ABOVE_MEDIAN:
        if name in rows:
            rows[f"{name}, above the median"] = (rows[name] - rows[name].median()).clamp_min(0)
    return rows


def removal_row(record: Record) -> Float[Tensor, " prompt"] | None:
    """Return the measured effect of each sentence as a row; None if sentences were not removed."""
    if not record.effects:
        return None
    row = torch.zeros(record.n_prompt, dtype=torch.float64)
    for piece, effect in zip(record.sentences, record.effects, strict=True):
        positions = record.positions_of([piece])
        row[positions] = effect / len(positions)
    return row


def add_drops(model: Any, path: Path, record: Record) -> None:
    """Measure the sets of sentences that are missing in a record, and store it."""
    sets = {strongest(record, row, TOP_SENTENCES) for row in rows_of(path).values()}
    sets.add(best_sentences(record, TOP_SENTENCES))
    missing = sets - set(record.drops)
    for chosen in missing:
        record.drops[chosen] = record.log_p - log_p_without(model, record, chosen)
    if missing:
        store(path, record)


def add_every_set(model: Any, path: Path, record: Record) -> None:
    """Measure all sets of five sentences, which takes minutes, and store them."""
    for chosen in combinations(sorted(record.sentences), TOP_SENTENCES):
        if chosen not in record.drops:
            record.drops[chosen] = record.log_p - log_p_without(model, record, chosen)
    store(path, record)


def main(model_name: str, half: str, every: str = "0") -> None:
    """Measure the missing sets of all statements; all sets of the first `every` with few sentences."""
    torch.set_num_threads(1)
    model, _ = load(model_name)
    left = int(every)
    for path, record in records(model_name, half, "statement"):
        add_drops(model, path, record)
        if left > 0 and len(record.sentences) <= FEW_SENTENCES:
            add_every_set(model, path, record)
            print(path.name, flush=True)
            left -= 1


if __name__ == "__main__":
    main(*sys.argv[1:])
