"""The JSON of measured facts, and the figures of the pages, are what the recorded tables have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import facts

pytestmark = pytest.mark.once

ANEW = "run: python -m benchmarks.leaderboard --facts"
# Pages that record experiments of their own: their figures are typed there once, or in tables that are kept.
RECORDS = {
    *("alignment", "attention_attribution", "constructed_models", "encoder_decoder", "flow", "input_map"),
    *("leaderboard", "norms", "number_agreement", "receptive_field", "scales", "speed"),
}
OTHERS = [page for page in facts.PAGES if page.stem not in RECORDS and page.parent.name != "how_to"]
# Numbers of two decimals that are no figures: thresholds.
THRESHOLDS = {"graphs": {"0.01"}, "information_flow_routes": {"0.04"}}


@pytest.fixture(scope="module")
def gathered() -> dict:
    return facts.gather()


def test_the_json_is_what_the_recorded_tables_have(gathered: dict) -> None:
    assert facts.FILE.read_text(encoding="utf-8") == facts.as_json(gathered), ANEW
    assert json.loads(facts.as_json(gathered)) == gathered


@pytest.mark.parametrize("page", facts.PAGES, ids=lambda page: page.name)
def test_figures_of_a_page_are_those_of_the_json(page: Path, gathered: dict) -> None:
    text = page.read_text(encoding="utf-8")
    assert facts.render(text, gathered) == text, ANEW


def test_every_comment_in_a_page_is_after_a_figure() -> None:
    for page in facts.PAGES:
        text = page.read_text(encoding="utf-8")
        asked = re.findall(rf"<!-- ((?:{'|'.join(facts.TABLES)}): .*?) -->", text)
        assert len(asked) == len(facts._QUOTED.findall(text)), page.name


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.name)
def test_other_pages_quote_no_figure_of_their_own(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    left = re.findall(r"(?<![\d.])[-−]?[01]\.\d\d\b", facts._QUOTED.sub("", text))
    assert set(left) <= THRESHOLDS.get(page.stem, set())


def test_tables_of_the_leaderboard_page_have_recorded_figures() -> None:
    recorded = facts.RECORD.read_text(encoding="utf-8")
    page = (facts.ROOT / "docs" / "evidence" / "leaderboard.md").read_text(encoding="utf-8").replace("−", "-")
    quoted = re.findall(r"-?\d\.\d\d \[-?\d\.\d\d, -?\d\.\d\d\]", page)
    assert len(quoted) > 50
    assert [figure for figure in quoted if figure not in recorded] == []


def test_a_figure_is_written_anew_and_an_interval_stays_one(gathered: dict) -> None:
    name = "smollm2-importance: decompx"
    text = f"9.99<!-- {name} --> and −9.99 [1, 2]<!-- {name} --> of 7<!-- {name} [n] -->"
    assert facts.render(text, gathered) == (
        f"0.42<!-- {name} --> and 0.42 [0.35, 0.49]<!-- {name} --> of 40<!-- {name} [n] -->"
    )
    names = "smollm2-importance: attention, rollout; smollm2-importance: attn_res_ln, rollout"
    assert facts.render(f"1 to 2<!-- {names} -->", gathered) == f"−0.07 to 0.05<!-- {names} -->"


def test_the_best_row_of_a_method_is_one_of_its_own_and_of_the_trained_model() -> None:
    found = facts.look_up("smollm2-importance: best of alti")
    assert found["row"].startswith("alti,")
    rows, _ = facts.rows(facts.TABLES["smollm2-importance"], "partial_spearman")
    own = [cell for label, (cell, _) in rows.items() if re.fullmatch(r"alti, (?!random).*", label)]
    values = [facts._figures(cell)[0] for cell in own]
    assert found["value"] == max(values)


@pytest.mark.parametrize(
    "name",
    ["no name", "nowhere: decompx", "smollm2-importance: nobody", "smollm2-importance: decompx [nothing]"],
)
def test_a_name_without_a_figure_is_an_error(name: str) -> None:
    with pytest.raises(LookupError):
        facts.look_up(name)


def test_a_finished_run_takes_the_place_of_the_recorded_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "LEADERBOARD.md"
    before = facts.RECORD.read_text(encoding="utf-8")
    copy.write_text(before, encoding="utf-8")
    monkeypatch.setattr(facts, "RECORD", copy)
    header = "| method | aggregation | closeness | cases |\n|---|---|---|---|"
    fresh = f"{header}\n| alti | raw | -1.00 [-2.00, 0.00] | 3 |"
    facts.record("gemma3-cells", fresh, "Measured 2030-01-01 with TransformerLens 9.")
    after = copy.read_text(encoding="utf-8")
    sections = {text.split("\n")[0]: text for text in after.split("\n## ")}
    olds = {text.split("\n")[0]: text for text in before.split("\n## ")}
    changed = [title for title in olds if sections[title] != olds[title]]
    assert [title[:20] for title in changed] == ["Cells kept on Gemma "]
    assert fresh in sections[changed[0]]
    assert "Measured 2030-01-01 with TransformerLens 9." in sections[changed[0]]
    assert "| random |" not in sections[changed[0]]
