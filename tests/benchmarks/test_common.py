"""Test the sentences on machine and releases that every page of results has."""

from __future__ import annotations

from benchmarks import facts
from benchmarks.common import describe_machine, describe_measurement


def test_facts_finds_the_date_and_the_releases() -> None:
    found = facts._MEASURED.search(f"## A table\n\n{describe_measurement('2030-01-31')}\n\n| a |")
    assert found["date"] == "2030-01-31"
    assert found["release"].startswith("TransformerLens ")
    assert facts._MEASURED.search(describe_measurement())


def test_what_the_machine_does_not_have_is_left_out() -> None:
    assert describe_machine({"cpu": "one", "gpu": None, "cores": 0}) == "cpu one, cores 0"
    assert "torch 2" in describe_machine()
