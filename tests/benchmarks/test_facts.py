"""The JSON of measured facts, and the figures and tables of the pages, are what the recorded tables have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import facts

ANEW = "run: python -m benchmarks.leaderboard --facts"

# Pages whose prose has no measured figure without a source.
# tests/docs compares the figures of the tutorial and of the how-tos with what their code prints.
PROSE = [
    page
    for page in facts.PAGES
    if page.parent.name in {facts.ROOT.name, "docs", "guides", "evidence"} and page.name != "tutorial.md"
]
# What a decimal number may be the version, the section or the identifier of.
_VERSIONED = (
    r"TransformerLens|lens_mix|torch|PyTorch|transformers|Python|CUDA|numpy|pandas|networkx|matplotlib|gradio|"
    r"nnsight|inseq|captum|ferret|shap|pyvene|mkdocs|Zensical|CC BY|Apache|Version|version|release|releases"
)
_NUMBER = r"\d+(?:\.\d+)+"
_ON = r"(?:\s\(?(?:tested )?(?:on|from))?"
_NO_MEASUREMENT = re.compile(
    # TransformerLens 2.18, 3.9 and 4.3; 0.1.0; arXiv:2601.03089; the 95 % of an interval
    rf"(?:{_VERSIONED}){_ON}\s{_NUMBER}(?:(?:,|,? (?:and|or|to)){_ON}\s{_NUMBER})*"
    r"|\d+\.\d+\.\d+"
    r"|(?:arXiv:|[Ee]q\. |[Ee]quation |[Ss]ection |[Ff]igure |[Tt]able )\d+\.\d+"
    r"|95 ?%"
)
_MEASURED = re.compile(r"(?<![\w.-])[-−+]?\d+\.\d+\b|(?<![\w.-])\d+ ?%|(?<![\w.-])\d+ times\b")


_FENCED = re.compile(r"^( *)(```+|~~~+)(?P<language>[^\n]*)\n(?P<code>.*?)^\1\2", re.MULTILINE | re.DOTALL)


def typed_figures(text: str) -> list[str]:
    """Return what looks like a measured figure outside code, quoted facts, quoted tables and addresses.

    A figure that an example on the page prints may be repeated: the block with the output is its source.
    """
    text = facts._TABLE.sub("", text)
    outputs = [block["code"] for block in _FENCED.finditer(text) if block["language"] in ("", "text")]
    printed = {figure for output in outputs for figure in _MEASURED.findall(output)}
    text = _FENCED.sub("", text)
    text = facts._QUOTED.sub("", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`+[^`]*`+", "", text)
    text = re.sub(r"\]\([^)]*\)|https?://\S+", "", text)
    return [found for found in _MEASURED.findall(_NO_MEASUREMENT.sub("", text)) if found not in printed]


def test_the_json_is_what_the_recorded_tables_have() -> None:
    gathered = facts.gather()
    assert facts.FILE.read_text(encoding="utf-8") == facts.as_json(gathered), ANEW
    assert json.loads(facts.as_json(gathered)) == gathered


def test_the_json_has_what_the_library_quotes_and_nothing_else() -> None:
    kept = json.loads(facts.FILE.read_text(encoding="utf-8"))["facts"]
    assert set(kept) == set(facts.names_of_the_library())


@pytest.mark.parametrize("page", facts.PAGES, ids=lambda page: page.name)
def test_figures_and_tables_of_a_page_are_the_recorded_ones(page: Path) -> None:
    assert facts.render_page(page) == page.read_text(encoding="utf-8"), ANEW


def test_no_page_is_generated() -> None:
    assert not {page.parent.name for page in facts.PAGES} & {"reference", "methods"}
    assert [page.name for page in facts.PAGES if page.parent.name == "courses"] == ["index.md"]


@pytest.mark.parametrize("page", facts.PAGES, ids=lambda page: page.name)
def test_every_comment_in_a_page_is_rendered(page: Path) -> None:
    text = facts.annotate(page)
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    left = facts._QUOTED.sub("", facts._TABLE.sub("", re.sub(r"`+[^`]*`+", "", without_code)))
    keys = "|".join(facts.TABLES)
    assert re.findall(rf"<!-- (?:table .*|/table -->|[\w./-]+\.md#.*|(?:{keys}): .*)", left) == []


@pytest.mark.parametrize("page", facts.PAGES, ids=lambda page: page.name)
def test_no_page_has_a_comment_between_its_words(page: Path) -> None:
    """Check that all comments of a page are those of quoted tables, which have lines of their own."""
    text = facts._TABLE.sub("", page.read_text(encoding="utf-8"))
    assert re.findall(r"<!--.*", re.sub(r"^```.*?^```$|`+[^`]*`+", "", text, flags=re.M | re.S)) == []


def test_every_page_with_quoted_figures_is_there() -> None:
    pages = {page.relative_to(facts.ROOT).as_posix() for page in facts.PAGES}
    assert set(facts._quotations(facts.QUOTED)) <= pages


@pytest.mark.parametrize("page", PROSE, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_no_measured_figure_is_typed_by_hand(page: Path) -> None:
    found = typed_figures(facts.annotate(page))
    assert found == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It has 0.42 on 40 prompts.", ["0.42"]),
        ("It has 0.42 [0.35, 0.49]<!-- smollm2-importance: decompx --> on 40 prompts.", []),
        ("It has 0.42\n[0.35, 0.49]<!-- smollm2-importance:\ndecompx -->.", []),
        ("Between −0.07 and +1.25 nats", ["−0.07", "+1.25"]),
        ("In 12 % of the heads, 3% of the rows, 31 times as fast", ["12 %", "3%", "31 times"]),
        ("with a 95 % interval", []),
        ("`residual=0.5` and ``0.25``", []),
        ("```python\nx = 0.5\n```\nand 0.75", ["0.75"]),
        ("```python\nx = 0.5\n```\n```\n0.66\n```\nfrom 0.66 to 0.5", ["0.5"]),
        ("- a list\n\n  ```python\n  x = 0.5\n  ```\n", []),
        (
            "TransformerLens (tested on 2.18, 3.9 and 4.3), torch 2.13, lens_mix 0.1.0, Python 3.11 to 3.13",
            [],
        ),
        ("inseq 0.7.1 gave 0.71", ["0.71"]),
        ("arXiv:2601.03089, Section 3.2, [a link](page-1.2.md), https://x.org/1.5", []),
        ("SmolLM2-1.7B, Qwen2.5 and Llama-3.2", []),
        (
            "<!-- table LEADERBOARD.md#A\ncolumns: a\n-->\n\n| a |\n|---|\n| 0.42 |\n\n<!-- /table -->\n0.5",
            ["0.5"],
        ),
        ("| a |\n|---|\n| 0.42 |", ["0.42"]),
    ],
)
def test_what_counts_as_a_figure_typed_by_hand(text: str, found: list[str]) -> None:
    assert typed_figures(text) == found


def test_a_figure_is_written_anew_and_an_interval_stays_one() -> None:
    name = "smollm2-importance: decompx"
    text = f"9.99<!-- {name} --> and −9.99 [1, 2]<!-- {name} --> of 7<!-- {name} [n] -->"
    assert facts.render(text) == (
        f"0.42<!-- {name} --> and 0.42 [0.35, 0.49]<!-- {name} --> of 40<!-- {name} [n] -->"
    )
    assert facts.render(f"| 1 [0, 2]<!-- {name} --> |") == f"| 0.42\xa0[0.35,\xa00.49]<!-- {name} --> |"
    names = "smollm2-importance: attention, rollout; smollm2-importance: attn_res_ln, rollout"
    assert facts.render(f"1 to 2<!-- {names} -->") == f"−0.07 to 0.05<!-- {names} -->"


RECORDED = """# A run

## Rows: the first

| method | part | score | error | n |
|---|---|---|---|---|
| `alti` | mean | **0.50 [0.40, 0.60]** | 1,234 | 12 |
| gim | - | -0.10 (-0.2 to 0.0) | 1.5e-06 | 12 |
| 3 | x | 0.25 ± 0.05 | 7 | 12 |

## Rows: the second, of lengths

| model | length | time | [a] |
|---|---|---|---|
| small | 64 | 0.862 | 1 |
| small | 128 | 1.20 | 2 |
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the path, below a folder benchmarks/, of a page with two recorded tables."""
    (tmp_path / "benchmarks" / "a run").mkdir(parents=True)
    (tmp_path / "benchmarks" / "a run" / "of it.md").write_text(RECORDED, encoding="utf-8")
    (tmp_path / "benchmarks" / "run.md").write_text(RECORDED, encoding="utf-8")
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    monkeypatch.setattr(facts, "QUOTED", tmp_path / "figures.toml")
    return "run.md"


@pytest.mark.parametrize(
    ("figure", "name", "expected"),
    [
        ("9", "#Rows: the first: alti, mean [score]", "0.50"),
        ("9 [1, 2]", "#Rows: the first: alti, mean [score]", "0.50 [0.40, 0.60]"),
        ("9 [1, 2]", "#Rows: the first: gim [score]", "−0.10 [−0.2, 0.0]"),
        ("9 ± 1", "#Rows: the first: 3, x [score]", "0.25 ± 0.05"),
        ("9", "#Rows: the first: alti, mean [error]", "1,234"),
        ("9", "#Rows: the first: gim [error]", "1.5e−06"),
        ("9", "#Rows: the second, of: small, 128 [time]", "1.20"),
    ],
)
def test_a_figure_is_found_by_path_and_heading(run: str, figure: str, name: str, expected: str) -> None:
    comment = f"<!-- {run}{name} -->"
    assert facts.render(f"It has {figure}{comment}.") == f"It has {expected}{comment}."


def test_a_table_is_copied_with_its_columns_and_rows(run: str) -> None:
    opening = (
        f"<!-- table {run}#Rows: the first\ncolumns: method as Name of it | score\nrows: gim |\n 3, x\n-->"
    )
    gim, other = "−0.10\xa0(−0.2\xa0to\xa00.0)", "0.25\xa0±\xa00.05"
    body = f"| Name of it | score |\n| --- | --- |\n| gim | {gim} |\n| 3 | {other} |"
    page = f"Before.\n\n{opening}\n<!-- /table -->\n\nAfter."
    written = facts.render(page)
    assert written == f"Before.\n\n{opening}\n\n{body}\n\n<!-- /table -->\n\nAfter."
    assert facts.render(written) == written


def test_a_table_without_rows_has_all_and_a_name_may_be_that_of_several(run: str) -> None:
    for rows in ("", "rows: small\n"):
        page = f"<!-- table {run}#Rows: the second\ncolumns: length | time\n{rows}-->\nold\n<!-- /table -->"
        assert facts.render(page).count("\n| ") == 4


COMPARED = """# Compared

## Small

| method | part | score |
|---|---|---|
| alti | mean | 0.5 |
| alti, shuffled | mean | 0.1 |
| random | - | 0.0 |

## Large

| method | part | score |
|---|---|---|
| random | - | 0.2 |
| alti, shuffled | mean | 0.3 |
| alti | mean | 0.7 |
"""


def test_a_column_may_be_of_other_rows_and_of_another_table(run: str) -> None:
    (facts.ROOT / "benchmarks" / "c.md").write_text(COMPARED, encoding="utf-8")
    columns = "method | score as Small | score + shuffled as Control | score + shuffled @ c.md#Large as Large"
    page = f"<!-- table c.md#Small\ncolumns: {columns}\nrows: random | alti, mean\n-->\n<!-- /table -->"
    body = "| random | 0.0 |  |  |\n| alti | 0.5 | 0.1 | 0.3 |"
    assert f"| method | Small | Control | Large |\n| --- | --- | --- | --- |\n{body}" in facts.render(page)
    same = page.replace("score + shuffled @", "score @")
    assert "| random | 0.0 |  | 0.2 |\n| alti | 0.5 | 0.1 | 0.7 |" in facts.render(same)
    with pytest.raises(
        LookupError, match=r"c\.md#Small: expected one of the rows random, other; alti, other"
    ):
        facts.render(page.replace("score + shuffled as", "score + other as"))


def test_paths_may_contain_spaces_in_tables(run: str) -> None:
    page = "<!-- table a run/of it.md#Rows: the second\ncolumns: time\n-->\n<!-- /table -->"
    assert "| 0.862 |" in facts.render(page)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no name", "expected 'TABLE: row [column]', got 'no name'"),
        ("nowhere: decompx", "expected PATH#HEADING or one of smollm2-importance"),
        ("smollm2-importance: nobody", "expected a row 'nobody', found for example"),
        (
            "smollm2-importance: decompx [nothing]",
            "expected a table with the columns 'nothing', found method",
        ),
        ("nothing.md#A: b [c]", "expected a file below benchmarks/, got 'nothing.md'"),
        ("LEADERBOARD.md#Importance: decompx [cases]", "found Importance: 40"),
        ("LEADERBOARD.md#Nothing: decompx [cases]", "found none of: The leaderboard"),
        ("LEADERBOARD.md#Planted facts on: random", "with a column"),
        ("LEADERBOARD.md#Importance: 40: decompx [aggregation]", "a cell that begins with a figure, got '-'"),
    ],
)
def test_a_name_without_a_figure_is_an_error(name: str, said: str) -> None:
    with pytest.raises(LookupError, match=re.escape(said)):
        facts.look_up(name)


@pytest.mark.parametrize(
    ("quoted", "said"),
    [
        (
            "7<!-- run.md#Rows: the second: small [time] -->",
            "expected one row, found 2; add more of its cells",
        ),
        (
            "7 [1, 2]<!-- run.md#Rows: the second: small, 64 [time] -->",
            "expected an interval in the recorded",
        ),
        ("7<!-- run.md#Rows: the second: small, 64 [time]; x: y -->", "expected PATH#HEADING"),
        ("<!-- table run.md#Rows: the first\nrows: gim\n-->\n<!-- /table -->", "expected 'columns:'"),
        ("<!-- table run.md#Rows: the first\ncolumns: no\n-->\n<!-- /table -->", "with the columns 'no'"),
        ("<!-- table run.md#Rows: the first\ncolumns: n\nrows: no\n-->\n<!-- /table -->", "a row 'no'"),
        (
            "<!-- table run.md#Rows\ncolumns: n\n-->\n<!-- /table -->",
            "found Rows: the first; Rows: the second",
        ),
    ],
)
def test_an_error_names_the_page_and_what_was_expected(run: str, quoted: str, said: str) -> None:
    page = facts.ROOT / "page.md"
    page.write_text(facts._NAMES.sub("", quoted), encoding="utf-8")
    if not quoted.startswith("<!-- table"):
        _quote(page, "{}", facts._NAMES.search(quoted)["names"])
    with pytest.raises(LookupError, match=rf"^page\.md: .*{re.escape(said)}"):
        facts.render_page(page)


def _quote(page: Path, text: str, *names: str) -> None:
    """Add an entry to the list of quoted figures below the root."""
    with facts.QUOTED.open("a", encoding="utf-8") as file:
        file.write(f"[{json.dumps(page.name)}]\n{json.dumps(text)} = {json.dumps(names)}\n")
    facts._quotations.cache_clear()


def test_a_quoted_text_may_be_on_two_lines_and_has_several_figures(run: str) -> None:
    page = facts.ROOT / "page.md"
    page.write_text("One has 1 on\n2 prompts, and 7 on others.", encoding="utf-8")
    name = f"{run}#Rows: the first: gim"
    _quote(page, "has {} on {} prompts", f"{name} [score]", f"{name} [n]")
    assert facts.render_page(page) == "One has −0.10 on\n12 prompts, and 7 on others."
    assert typed_figures(facts.annotate(page)) == []


@pytest.mark.parametrize(("text", "names"), [("nothing {}", ["a: b"]), ("has {}", ["a: b"]), ("One {}", [])])
def test_a_quoted_text_that_is_not_once_in_the_page_is_an_error(
    run: str, text: str, names: list[str]
) -> None:
    page = facts.ROOT / "page.md"
    page.write_text("One 1 has 1. Another has 2.", encoding="utf-8")
    _quote(page, text, *names)
    with pytest.raises(LookupError, match=r"^page\.md: docs/figures\.toml: expected the text '.*' once"):
        facts.render_page(page)


def test_one_page_with_an_error_does_not_keep_the_others_from_being_written(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [facts.ROOT / name for name in ("a.md", "b.md", "c.md")]
    for page, name in zip(
        pages, ("x.md#y: z [n]", f"{run}#Rows: the first: gim [n]", "nowhere: z"), strict=True
    ):
        page.write_text("It has 1.", encoding="utf-8")
        _quote(page, "has {}.", name)
    monkeypatch.setattr(facts, "PAGES", pages)
    monkeypatch.setattr(facts, "FILE", facts.ROOT / "measured.json")
    monkeypatch.setattr(facts, "gather", dict)
    with pytest.raises(LookupError, match=r"(?s)a\.md: .*c\.md: "):
        facts.write()
    assert pages[1].read_text(encoding="utf-8") == "It has 12."


def test_the_best_row_of_a_method_is_one_of_its_own_and_of_the_trained_model() -> None:
    found = facts.look_up("smollm2-importance: best of alti")
    assert found["row"].startswith("alti,")
    table = facts.recorded(facts.TABLES["smollm2-importance"], "partial_spearman")
    place = table.column("partial_spearman")
    own = [cells[place] for cells in table.body if re.fullmatch(r"alti, (?!random).*", facts.label(cells))]
    assert float(found["texts"][0]) == max(float(cell.split()[0]) for cell in own)


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
