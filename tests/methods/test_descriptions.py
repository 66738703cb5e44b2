from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest

import lens_mix as lm
from lens_mix import registry
from lens_mix.lens.cost import COSTS, Cost
from lens_mix.methods.descriptions import DESCRIPTIONS, GROUPS, describe


def test_every_built_in_method_is_described():
    assert set(DESCRIPTIONS) == {*lm.METHODS, "input_map"}
    for name, description in DESCRIPTIONS.items():
        assert description.group in GROUPS, name
        assert description.cost == COSTS.get(name), name
        assert 15 < len(description.line) <= 110, name
        assert not description.line.endswith("."), name
        assert description.line.isascii(), name


def test_the_groups_are_in_order():
    listed = [description.group for description in DESCRIPTIONS.values()]
    assert list(dict.fromkeys(listed)) == list(GROUPS[:-1])
    assert listed == sorted(listed, key=GROUPS.index)


def test_a_registered_method_is_described_by_its_docstring():
    @dataclasses.dataclass(frozen=True)
    class Largest(lm.Method):
        """Return the largest weight of any head.

        More.
        """

        name: ClassVar[str] = "largest_described"
        residual: ClassVar[float] = 0.5
        engines: ClassVar[tuple[str, ...]] = ("recorded",)

        def __call__(self, block):
            return block.pattern

    @dataclasses.dataclass(frozen=True)
    class Plain(Largest):
        size: int = 3

    @dataclasses.dataclass(frozen=True)
    class Priced(Largest):
        @classmethod
        def default_cost(cls):
            return Cost(2, per_row=5)

    assert describe("largest", Largest) == (GROUPS[-1], "Return the largest weight of any head", None)
    assert describe("plain", Plain).line == ""
    assert describe("theirs", Priced).cost == Cost(2, per_row=5)
    assert describe("by hand") == (GROUPS[-1], "", None)
    lm.register(Largest)
    try:
        assert registry.describe("largest_described").line == "Return the largest weight of any head"
    finally:
        del registry._registered["largest_described"]
    assert registry.describe("attention") is DESCRIPTIONS["attention"]


def read_records() -> dict[tuple[str, int, str], tuple[int, float]]:
    """Return the layers of the model and the recorded forward passes, by method, tokens and rows."""
    text = (Path(__file__).parents[2] / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    found = {}
    for section, layers, first in (("Every method, gpt2-like", 3, 2), ("What calls cost", 30, 0)):
        lines = text.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
        header, _, *rows = (
            [cell.strip() for cell in line[1:-1].split("|")] for line in lines if line[:1] == "|"
        )
        tokens, passes = (
            header.index(name) for name in ("tokens" if first == 0 else "positions", "÷ forward")
        )
        for row in rows:
            name, _, which = row[first].removeprefix("lm.").partition(", ")
            if name in DESCRIPTIONS and row[passes] and which in ("", "last row", "all rows"):
                which = "last row" if name == "input_map" else which or "all rows"
                found[name, int(row[tokens]), which] = (layers, float(row[passes]))
    newer = {name for (name, _, _), (layers, _) in found.items() if layers == 30}
    return {key: value for key, value in found.items() if key[0] not in newer or value[0] == 30}


@pytest.mark.once
def test_every_cost_is_within_a_factor_of_two_of_its_record():
    records = read_records()
    assert {name for name, _, _ in records} == set(COSTS)
    for (name, tokens, which), (layers, recorded) in records.items():
        rows = 1 if which == "last row" else tokens
        said = DESCRIPTIONS[name].cost.passes(tokens, rows, layers)
        assert 0.5 <= said / recorded <= 2, (name, tokens, which, said, recorded)
