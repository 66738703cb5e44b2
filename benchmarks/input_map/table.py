"""Print the table of all rows against measured replacement, with intervals.

python -m benchmarks.input_map.table smollm2 choose        (or gemma3, held_out)
python -m benchmarks.input_map.table smollm2 held_out gim   only the forms of gim, beside its ratio form
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
from scipy.stats import rankdata

from benchmarks.input_map.importance import file_of, folder
from benchmarks.input_map.prompts import make

DRAWS = 2000
YARDSTICKS = {
    "mean embedding, N forwards": "mean_embedding",
    "values zeroed in all layers, N forwards": "values_zeroed",
}


def agreement(row: np.ndarray, other: np.ndarray, position: np.ndarray) -> tuple[float, float, float]:
    """Return Spearman controlled for position, Spearman, and whether the strongest key is the same.

    The strongest key is one before the last. A constant row, or one that follows the position exactly, has
    an agreement of 0.
    """
    ranks = [rankdata(values) for values in (np.round(row, 12), other, position)]
    if np.ptp(ranks[0]) == 0:
        return 0.0, 0.0, 0.0
    (_, xy, xz), (_, _, yz), _ = np.corrcoef(ranks)
    rest = (1 - xz**2) * (1 - yz**2)
    partial = (xy - xz * yz) / math.sqrt(rest) if rest > 1e-9 else 0.0
    return partial, xy, float(row[:-1].argmax() == other[:-1].argmax())


def collect(
    model_name: str, half: str, target: str = "importance", only: str = ""
) -> tuple[dict[str, dict], list]:
    """Return the agreement of each candidate by prompt number, and the prompts; `only` names one method."""
    found: dict[str, dict[int, tuple[float, float, float]]] = {}
    used = []
    for prompt in make():
        path = file_of(model_name, prompt)
        recipe = folder(f"{model_name} recipe") / path.name
        if prompt.half != half or not path.exists() or not (recipe.exists() or only):
            continue
        record = torch.load(path)
        positions = record["positions"]
        if len(positions) < 4 or target not in record:
            continue
        rows = {"position": torch.arange(len(record["tokens"]))}
        if not only:
            rows |= {f"ours: {name}": row for name, row in torch.load(recipe).items()}
        for made in (f"library {only}",) if only else ("published", "library"):
            more = folder(f"{model_name} {made}") / path.name
            if more.exists():
                rows |= torch.load(more)
        rows = {name: row[positions] for name, row in rows.items()}
        rows |= {name: record[key] for name, key in YARDSTICKS.items() if key in record}
        other, place = record[target].double().numpy(), positions.double().numpy()
        for name, row in rows.items():
            found.setdefault(name, {})[len(used)] = agreement(row.double().numpy(), other, place)
        used.append((prompt, len(record["tokens"])))
    return found, used


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the means of prompts that are drawn again."""
    draws = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return float(low), float(high)


def main(model_name: str, half: str, only: str = "") -> None:
    """Print the table, and the recipe by kind, by length and against other measures."""
    main_row = f"{only}, ratio, absolute" if only else "ours: copies, root of squares + direct"
    found, used = collect(model_name, half, only=only)
    against = found[main_row]
    print(f"{model_name}, {half}: {len(used)} prompts\n")
    print(f"| map | n | partial | 95 % | Spearman | top 1 | partial of {main_row} less this, 95 % |")
    print("|---|---|---|---|---|---|---|")
    means = {name: np.mean(list(rows.values()), axis=0) for name, rows in found.items()}
    for name in sorted(found, key=lambda name: -means[name][0]):
        partial, plain, top = means[name]
        values = np.array([value[0] for value in found[name].values()])
        paired = np.array([against[number][0] - value[0] for number, value in found[name].items()])
        low, high = interval(values)
        less, more = interval(paired)
        print(
            f"| {name} | {len(values)} | {partial:.2f} | {low:.2f} to {high:.2f} | {plain:.2f} | {top:.2f} "
            f"| {paired.mean():.2f} ({less:.2f} to {more:.2f}) |"
        )
    if only:
        return
    print("\nThe recipe by kind, and by length: partial / Spearman / Spearman of the position (prompts)")
    groups: dict[str, list[int]] = {}
    for number, (prompt, count) in enumerate(used):
        groups.setdefault(prompt.kind, []).append(number)
        groups.setdefault("20 tokens or fewer" if count <= 20 else "more than 20 tokens", []).append(number)
    for name, numbers in groups.items():
        mean = np.mean([against[number] for number in numbers], axis=0)
        place = np.mean([found["position"][number][1] for number in numbers])
        print(f"- {name}: {mean[0]:.2f} / {mean[1]:.2f} / {place:.2f} ({len(numbers)})")
    for target in ("divergence", "values_zeroed", "mean_embedding"):
        other, _ = collect(model_name, half, target)
        if main_row in other:
            mean = np.mean(list(other[main_row].values()), axis=0)
            place = np.mean([value[1] for value in other["position"].values()])
            print(f"- against {target}: {mean[0]:.2f} / {mean[1]:.2f} / {place:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
