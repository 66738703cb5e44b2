"""Test the pages of the methods: they are as the classes and records are, and none lacks a part."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import lens_mix as lm
from docs.make import markdown, methods
from lens_mix import registry
from tests.demos.tiny_folder import save_tiny_llama
from tests.source_tree import ROOT

PROMPT = "My grandmother was born in Italy and she cooked the food of her"
NAMES = sorted(lm.METHODS)


@pytest.fixture(scope="module", name="pages")
def made() -> dict[str, str]:
    return methods.make_pages()


def test_the_pages_are_as_the_classes_and_the_records_are(pages):
    kept = {path.name: path.read_text(encoding="utf-8") for path in methods.FOLDER.glob("*.md")}
    assert kept.keys() == pages.keys(), "run `make stub`"
    assert [name for name in pages if kept[name] != pages[name]] == [], "run `make stub`"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_every_part(name, pages):
    page = pages[f"{name}.md"]
    assert f"# {name}\n" in page
    for heading in (
        "What does it compute?",
        "When should I use it?",
        "When not?",
        "Facts",
        "Scores",
        "Paper",
    ):
        assert f"\n## {heading}\n" in page
    assert re.search(rf"^!\[[^\]]{{40,}}\]\(images/{name}\.png\)$", page, re.MULTILINE)
    assert page.count("```python\n") == 1
    assert "```math\n" in page
    assert "{" not in re.sub(r"`[^`]*`|```.*?```|^\|.*$", "", page, flags=re.DOTALL | re.MULTILINE)
    # Accents of BibTeX are letters.
    assert not re.search(r"\\['\"^~]", page.partition("## Paper")[2])


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_a_page_are_few_and_the_lines_of_its_call_too(name, pages):
    page = re.sub(r"^\|.*$|```.*?```", "", pages[f"{name}.md"], flags=re.MULTILINE | re.DOTALL)
    assert 150 < len(page.split()) < 420
    assert 2 <= len(methods.TEXTS[name]["call"].strip().splitlines()) <= 4


@pytest.mark.parametrize("name", NAMES)
def test_equations_are_those_of_the_docstring(name, pages):
    documented = inspect.getdoc(lm.METHODS[name])
    for equation in re.findall(r"\b(?:eq\.|section) [\d\-]+", documented.partition("\nArgs:")[0]):
        assert equation in pages[f"{name}.md"]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_every_parameter_with_its_default(name, pages):
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", pages[f"{name}.md"], re.MULTILINE)
    parameters = {parameter: default for parameter, default, _ in rows if default != "yes"}
    fields = dataclasses.fields(lm.METHODS[name])
    assert [field.name for field in fields] == list(parameters)
    assert all(len(meaning) > 4 for _, _, meaning in rows)


@pytest.mark.parametrize("name", NAMES)
def test_every_formula_is_one_that_the_site_can_show(name):
    for formula in methods.TEXTS[name]["formula"]:
        converted = markdown.convert(f"```math\n{formula}\n```", ROOT / "docs" / "index.md", "index.md")
        # What the converter does not know is left as a command, or as a bare "&".
        assert "\\" not in converted
        assert "<mi>&</mi>" not in converted


@pytest.fixture(scope="module", name="model")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "demos")
        import models

        words = sorted({"home", *PROMPT.split()})
        return models.load(save_tiny_llama(tmp_path_factory.mktemp("llama"), words))


@pytest.mark.parametrize("name", NAMES)
def test_the_call_of_a_page_runs(name, pages, model, capsys):
    (call,) = re.findall(r"```python\n(.*?)```", pages[f"{name}.md"], re.DOTALL)
    assert PROMPT in (ROOT / "docs" / "cheat_sheet.md").read_text(encoding="utf-8")
    names = {"lm": lm, "model": model, "prompt": PROMPT}
    exec(compile(call, name, "exec"), names)
    assert names["m"].method == name
    assert capsys.readouterr().out or "graph" in names


def test_the_scores_are_those_of_the_recorded_tables(pages):
    tables = [ROOT / "benchmarks" / "LEADERBOARD.md"]
    for name in ("input_map", "traces"):
        tables += (ROOT / "benchmarks" / name / "results").glob("*.md")
    recorded = "".join(table.read_text(encoding="utf-8") for table in tables).replace("-", "−")
    recorded = re.sub(r"\(([−\d.]+) to ([−\d.]+)\)", r"[\1, \2]", recorded)
    text = "".join(pages.values())
    quoted = re.findall(r"([−\d.]+ \[[−\d.]+, [−\d.]+\])", text)
    assert len(quoted) > 120
    assert [figure for figure in quoted if figure not in recorded] == []
    assert "has no row for this method" in pages["attention_attribution.md"]


def test_no_figure_is_typed_by_hand():
    for name, texts in methods.TEXTS.items():
        written = methods._FIGURE.sub("", f"{texts['when']} {texts['when_not']}")
        assert re.findall(r"\d\.\d+", written) == [], name


def test_the_best_method_of_a_task_is_at_least_as_good_as_every_other(pages):
    row = r"\| ([−\d.]+) \[[^\]]+\] \| \d+ \| ([−\d.]+), \[`(\w+)`\]\(\3\.md\) \|"
    quoted = re.findall(row, "".join(pages.values()))
    assert len(quoted) > 80
    worse = [each for each in quoted if float(each[0].replace("−", "-")) > float(each[1].replace("−", "-"))]
    assert worse == []
    assert {leader for _, _, leader in quoted} > {"decompx", "token_patching"}
    assert max(page.count("SmolLM2-135M-Instruct |") for page in pages.values()) <= 3


def test_the_pictures_are_small_and_of_one_width():
    pictures = sorted((methods.FOLDER / "images").glob("*.png"))
    assert [path.stem for path in pictures] == NAMES
    assert len({Image.open(path).width for path in pictures}) == 1
    assert sum(path.stat().st_size for path in pictures) < 1_500_000
    assert methods.SEEN.keys() == set(NAMES)


def test_both_names_of_a_method_are_in_the_index(pages):
    listed = re.findall(
        r"^\| \[`(\w+)`\]\(\1\.md\) \| `lm\.methods\.(\w+)` \|", pages["index.md"], re.MULTILINE
    )
    assert sorted(listed) == sorted((name, method.__name__) for name, method in lm.METHODS.items())


def test_the_navigation_has_methods_in_the_order_of_lists():
    lines = [f"      - methods/{name}.md\n" for name in ("index", "removed", "alti")]
    written = methods.write_navigation(f"  - Methods:\n{''.join(lines)}  - Courses:\n")
    listed = re.findall(r"methods/(\w+)\.md", written)
    assert written.startswith(f"  - Methods:\n{lines[0]}      - methods/attention.md\n")
    assert written.endswith(".md\n  - Courses:\n")
    assert listed == ["index", *(name for name in registry.list_names() if name in lm.METHODS)]
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert methods.write_navigation(navigation) == navigation, "run `make stub`"


def test_pages_of_methods_that_are_gone_are_deleted(pages, tmp_path: Path):
    (tmp_path / "removed.md").write_text("# A method that was removed\n")
    methods.write_pages(tmp_path)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md")} == pages
