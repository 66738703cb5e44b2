"""Measured facts that the library quotes, and costs of methods, read from `measured.json` beside this file.

`python -m benchmarks.leaderboard --facts` writes that file from the recorded tables, and the figures of the
pages with it. Neither is edited by hand.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Fact:
    """One measured figure with what it is of.

    Attributes:
        value: The figure, in the unit of `score`.
        low, high: Its 95 % interval over the cases; None where none was recorded.
        n: The number of cases.
        cases: What the cases are, in the plural.
        score: What was scored.
        model: The model that it was measured on.
        date, release: When it was measured, and with which releases.
        command: What measures it again.
        recorded_in: The file of the repository with the table that it was read from.
        digits: The number of decimals that were recorded.
        row: The row of that table, where the fact is the best of several.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    cases: str
    score: str
    model: str
    date: str
    release: str
    command: str
    recorded_in: str
    digits: int
    row: str = ""

    def __str__(self) -> str:
        """Return the value, followed by its interval in brackets if there is one."""
        value, *ends = (f"{x:.{self.digits}f}" for x in (self.value, self.low, self.high) if x is not None)
        return f"{value} [{', '.join(ends)}]" if ends else value


def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (importlib.resources.files("lens_mix") / "measured.json").read_text(encoding="utf-8")
    )
    return found


def recorded_costs() -> dict[str, dict[str, Any]]:
    """Return the costs of the built-in methods and `input_map`, as fields of `lens_mix._blocks.cost.Cost`."""
    costs: dict[str, dict[str, Any]] = _read().get("costs", {})
    return costs


def _read_facts() -> dict[str, Fact]:
    """Return all facts, by "table: row [column]"."""
    found = _read()
    return {name: Fact(**found["tables"][name.split(":")[0]] | fact) for name, fact in found["facts"].items()}


def sentence(*names: str) -> str:
    """Return one sentence about facts with the same score and model, each with its cases and interval."""
    facts = _read_facts()
    first = facts[names[0]]
    figures = (f"{facts[name].n} {facts[name].cases}: {facts[name]}" for name in names)
    return f"{first.score}; {first.model}; {'; '.join(figures)}"


def precision_of(verdict: str) -> list[Fact]:
    """Return how often a verdict of an audit is right, on the planted claims of each model and group."""
    return [fact for name, fact in _read_facts().items() if re.fullmatch(rf"\w+-audit-\w+: {verdict}", name)]


def best_of_methods() -> dict[str, Fact]:
    """Return the leaderboard's score of each method's best input map, by the method's name."""
    start = "smollm2-importance: best of "
    return {name.removeprefix(start): fact for name, fact in _read_facts().items() if name.startswith(start)}
