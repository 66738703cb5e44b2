"""Score every layer and head of cross-attention maps as an aligner against gold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import lens_mix as lm
from lens_mix import MixingMap
from lens_mix.evaluation import Interval, bootstrap
from lens_mix.experiments import AlignmentErrors, GoldAlignment, align, alignment_errors

ROWS = ("AWI", "AWO")
# The maps that need only a clean pass.
FORWARD_METHODS: dict[str, Any] = {
    "weights": lm.methods.AttentionWeights(per_head=True),
    "norms": lm.methods.ValueNorms(),
    "norms by head": lm.methods.ValueNorms(per_head=True),
    "value_zeroing": lm.methods.ValueZeroing(),
    "attn_res": lm.methods.AttnRes(),
    "alti": lm.methods.Alti(),
}
# The counts of one pair: links, sure, sure_found, possible_found of `AlignmentErrors`.
Counts = tuple[int, int, int, int]


class Cell(NamedTuple):
    """One aligner.

    Attributes:
        map: The name of the map.
        rows: "AWI" or "AWO".
        end: Whether the end of the sentence competes (the paper's rule) or is left out.
        layer: The label of the layer.
        head: The number of the head. None: all heads together.
    """

    map: str
    rows: str
    end: bool
    layer: int
    head: int | None = None


def count_cells(
    maps: Mapping[str, MixingMap],
    source_words: Sequence[Sequence[int]],
    target_words: Sequence[Sequence[int]],
    end: int,
    gold: GoldAlignment,
    ends: Iterable[bool] = (True, False),
) -> dict[Cell, Counts]:
    """Return the counts of each layer and head of one pair's maps.

    Args:
        maps: The maps by name. A map with heads is read head by head, and so is its mean over heads, unless
            its name ends in "by head".
        source_words: As in `lens_mix.experiments.align`.
        target_words: As in `lens_mix.experiments.align`.
        end: The key position of the end of the sentence.
        gold: The gold alignment of the pair.
        ends: Whether the end of the sentence competes; every value is counted.
    """
    found = {}
    for name, cross in maps.items():
        readings: list[tuple[int | None, MixingMap]] = []
        if not name.endswith("by head"):
            readings.append((None, cross.merge_heads() if cross.has_heads else cross))
        if cross.has_heads:
            readings += [(head, cross) for head in range(cross.scores.shape[1])]
        for head, read in readings:
            for rows in ROWS:
                for competes in ends:
                    for layer in cross.layer_labels:
                        options = {"layer": layer, "head": head, "null_keys": [end] if competes else []}
                        links = align(read, source_words, target_words, rows=rows, **options)
                        cell = Cell(name.removesuffix(" by head"), rows, competes, layer, head)
                        found[cell] = counts_of(links, gold)
    return found


def counts_of(links: Iterable[tuple[int, int]], gold: GoldAlignment) -> Counts:
    """Return the counts of one pair."""
    errors = alignment_errors([links], [gold])
    return errors.links[0], errors.sure[0], errors.sure_found[0], errors.possible_found[0]


def errors_of(counts: Iterable[Counts]) -> AlignmentErrors:
    """Return the counts of a corpus, pair by pair."""
    return AlignmentErrors(*map(list, zip(*counts, strict=True)))


class Table:
    """The alignment errors of a corpus, for every cell.

    Attributes:
        errors: The errors by cell.
    """

    def __init__(self, pairs: Sequence[Mapping[Cell, Counts]]) -> None:
        self.errors = {cell: errors_of(pair[cell] for pair in pairs) for cell in pairs[0]}

    def select(self, name: str, rows: str, end: bool, heads: bool = False) -> dict[Cell, AlignmentErrors]:
        """Return the layers of a map, or with `heads` the heads of all its layers."""
        return {
            cell: errors
            for cell, errors in self.errors.items()
            if (cell.map, cell.rows, cell.end) == (name, rows, end) and (cell.head is not None) == heads
        }

    def best(self, name: str, rows: str, end: bool, heads: bool = False) -> tuple[Cell, AlignmentErrors]:
        """Return the layer or head with the lowest error rate."""
        return min(self.select(name, rows, end, heads).items(), key=lambda item: item[1].error_rate)

    def best_elsewhere(self, name: str, rows: str, end: bool, heads: bool = False) -> float:
        """Return the error rate, on half of the pairs, of the layer or head that is best on the others."""
        cells = self.select(name, rows, end, heads)
        chosen = min(cells, key=lambda cell: every_second(cells[cell], 0).error_rate)
        return every_second(cells[chosen], 1).error_rate

    def layer_mean(self, name: str, rows: str, end: bool) -> np.ndarray:
        """Return the mean over layers, for each pair, of the terms whose mean is a layer's error rate."""
        return np.mean([errors.per_pair() for errors in self.select(name, rows, end).values()], 0)


def every_second(errors: AlignmentErrors, first: int) -> AlignmentErrors:
    """Return half of the pairs."""
    halves = (errors.links, errors.sure, errors.sure_found, errors.possible_found)
    return AlignmentErrors(*(values[first::2] for values in halves))


def percent(interval: Interval) -> str:
    """Return an interval in percent."""
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def compared(table: Table, ends: Iterable[bool] = (True, False), heads: bool = True) -> list[dict[str, str]]:
    """Return the paper's table: mean of the layers, best layer and best head, of weights and of norms."""
    lines = []
    for end in ends:
        for rows in ROWS:
            weights, norms = (table.layer_mean(name, rows, end) for name in ("weights", "norms"))
            line = {"end of sentence": "competes" if end else "left out", "rows": rows}
            means = {"weights": bootstrap(weights), "norms": bootstrap(norms)}
            means["norms − weights"] = bootstrap(norms, weights)
            lines.append(
                {**line, "aligner": "mean of the layers", **{k: percent(v) for k, v in means.items()}}
            )
            for each in (False, True) if heads else (False,):
                (a, left), (b, right) = (table.best(name, rows, end, each) for name in ("weights", "norms"))
                line |= {"aligner": "best head" if each else "best layer"}
                line |= {"weights": f"{percent(left.interval())} ({_describe_place(a)})"}
                line |= {"norms": f"{percent(right.interval())} ({_describe_place(b)})"}
                line |= {"norms − weights": percent(right.interval(left))}
                elsewhere = (table.best_elsewhere(name, rows, end, each) for name in ("weights", "norms"))
                line |= {"chosen on the other half": ", ".join(f"{100 * rate:.1f}" for rate in elsewhere)}
                lines.append(dict(line))
    return lines


def by_layer(table: Table, names: Sequence[str], end: bool) -> list[dict[str, str]]:
    """Return the error rates of all maps in every layer."""
    return [
        {"map": name, "rows": rows}
        | {
            f"layer {cell.layer}": f"{100 * errors.error_rate:.1f}"
            for cell, errors in table.select(name, rows, end).items()
        }
        for name in names
        for rows in ROWS
    ]


def by_head(table: Table, name: str, rows: str, end: bool) -> list[dict[str, str]]:
    """Return the error rates of a map, with a row per layer and a column per head."""
    lines: dict[int, dict[str, str]] = {}
    for cell, errors in table.select(name, rows, end, heads=True).items():
        line = lines.setdefault(cell.layer, {"layer": str(cell.layer)})
        line[f"head {cell.head}"] = f"{100 * errors.error_rate:.1f}"
    return list(lines.values())


def _describe_place(cell: Cell) -> str:
    return f"layer {cell.layer}" + ("" if cell.head is None else f", head {cell.head}")
