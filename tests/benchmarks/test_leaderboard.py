"""The rows of one method that are measured alone, and put into the recorded leaderboard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import facts, leaderboard

pytestmark = pytest.mark.once

RECORDED = """# The leaderboard

## Score: two prompts

Measured 2026-11-23 (token_patching: 2026-11-24) with TransformerLens 4.3, torch 2.13.

| method | aggregation | score | score above position | cases |
|---|---|---|---|---|
| gim(gate_up=1) | - | 0.90 [0.80, 1.00] | 0.70 [0.60, 0.80] | 2 |
| gim | - | 0.60 [0.60, 0.60] | 0.40 [0.40, 0.40] | 2 |
| random | - | 0.50 [0.50, 0.50] | 0.30 [0.30, 0.30] | 2 |
| alti | mean | 0.40 [0.40, 0.40] | 0.20 [0.20, 0.20] | 2 |
| position | - | 0.20 [0.20, 0.20] | 0.00 [0.00, 0.00] | 2 |
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a recorded page beside a finished run of `gim`."""
    page, folder = tmp_path / "benchmarks" / "LEADERBOARD.md", tmp_path / "outputs"
    for path in (page.parent, folder):
        path.mkdir()
    page.write_text(RECORDED, encoding="utf-8")
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    monkeypatch.setattr(facts, "RECORD", page)
    table = facts.Table("benchmarks/LEADERBOARD.md", "Score", "score")
    monkeypatch.setitem(facts.TABLES, "tiny-score", table)
    monkeypatch.setattr(leaderboard, "FOLDER", folder)
    return page


def write_run(**scores: tuple[float, float]) -> None:
    records = [
        [{"case": i, "method": name, "aggregation": "-", "score": each[i]} for name, each in scores.items()]
        for i in range(2)
    ]
    lines = [{"task": "tiny"}, *({"case": i, "records": each} for i, each in enumerate(records))]
    text = "\n".join(json.dumps(line) for line in lines)
    (leaderboard.FOLDER / "tiny-score-gim.jsonl").write_text(text, encoding="utf-8")


def test_the_rows_of_one_method_are_replaced_and_no_others(record: Path) -> None:
    write_run(random=(0.5, 0.5), position=(0.2, 0.2), gim=(0.1, 0.5))
    leaderboard.merge("tiny-score", "gim")
    text = record.read_text(encoding="utf-8")
    rows = [line for line in text.split("\n") if line.startswith("| ")][1:]
    before = [line for line in RECORDED.split("\n") if line.startswith("| ")][1:]
    assert rows == [before[0], before[2], before[3], rows[3], before[4]]
    assert rows[3] == "| gim | - | 0.30 [0.10, 0.50] | 0.10 [-0.10, 0.30] | 2 |"
    assert "Measured 2026-11-23 (token_patching: 2026-11-24; gim: " in text
    leaderboard.merge("tiny-score", "gim")
    assert record.read_text(encoding="utf-8") == text


def test_other_prompts_are_an_error(record: Path) -> None:
    write_run(random=(0.5, 0.4), position=(0.2, 0.2), gim=(0.1, 0.5))
    with pytest.raises(ValueError, match=r"tiny-score: expected the recorded .*random"):
        leaderboard.merge("tiny-score", "gim")
    assert record.read_text(encoding="utf-8") == RECORDED
