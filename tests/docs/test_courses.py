"""Test the courses' machinery on small sources, and every course of docs/courses/."""

from __future__ import annotations

import base64
import re
import textwrap
from pathlib import Path

import jupytext
import nbformat
import pytest

from docs.make import courses
from docs.make.courses import COURSES, ROOT, CourseError
from lens_mix._classes.model_classes import transformer_lens_version

SOURCES = sorted(COURSES.glob("*.py"))
each_course = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
COLAB = "https://colab.research.google.com/github"
PIXEL = base64.b64encode(b"\x89PNG a picture").decode()

TOY = """
    # %% [markdown]
    # # A toy
    #
    # Level: everyone. Time: 1 minute.

    # %%
    import os
    import demos.models
    from tqdm.auto import tqdm
    print("printed", *tqdm([os.environ["HF_HUB_OFFLINE"], os.listdir()]))

    # %% [markdown]
    # ## A picture and a table

    # %%
    class Shown:
        def __init__(self, kind, content):
            self.kind, self.content = kind, content

        def _repr_mimebundle_(self, include=None, exclude=None):
            return {self.kind: self.content, "text/plain": "not shown"}

    Shown("image/png", b"\\x89PNG a picture")

    # %%
    Shown("text/html", "<table border='1'>\\n\\n<tr><td>4</td></tr></table>")
"""


def write_source(folder: Path, text: str, name: str = "toy") -> Path:
    source = folder / f"{name}.py"
    source.write_text(textwrap.dedent(text).lstrip(), encoding="utf-8")
    return source


def output(data: dict[str, str]) -> nbformat.NotebookNode:
    return nbformat.v4.new_output("display_data", data=data)


# ---------------------------------------------------------------------- a source becomes a page


def test_a_source_becomes_a_page_with_outputs_and_a_notebook(tmp_path: Path) -> None:
    write_source(tmp_path, TOY)
    (page,) = courses.render_courses(tmp_path, cache=tmp_path / "cache")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# A toy\n\n[Download the notebook](toy.ipynb)")
    assert "```python\nimport os" in text
    # The working folder is a new one, and demos can be imported there.
    assert "```text\nprinted 1 []\n```" in text
    # A progress bar is not part of a page.
    assert "2/2" not in text
    assert "## A picture and a table" in text
    picture = re.search(r"!\[Figure: A picture and a table\]\((toy_files/\w+\.png)\)", text)
    assert picture
    assert (tmp_path / picture[1]).read_bytes() == b"\x89PNG a picture"
    assert "<tr><td>4</td></tr></table>" in text
    assert "```text\nnot shown" not in text
    notebook = nbformat.read(tmp_path / "toy.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    assert any(cell.get("outputs") for cell in notebook.cells)


def test_an_error_names_the_course_the_cell_and_the_reason(tmp_path: Path) -> None:
    text = """
        # %%
        fine = 1

        # %%
        broken = fine / 0

        # %%
        print("never run")
    """
    write_source(tmp_path, text)
    with pytest.raises(CourseError) as raised:
        courses.render_courses(tmp_path, cache=tmp_path / "cache")
    said = str(raised.value)
    assert "toy.py: code cell 2 of 3 failed" in said
    assert "broken = fine / 0" in said
    assert "ZeroDivisionError: division by zero" in said
    assert "\x1b" not in said
    assert not list((tmp_path / "cache").glob("*"))
    assert not (tmp_path / "toy.md").exists()


def test_a_cell_that_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courses, "SECONDS_PER_CELL", 3)  # an interrupt before the kernel is ready is lost
    write_source(tmp_path, "# %%\nwaited = __import__('time').sleep(60)\n")
    with pytest.raises(
        CourseError, match=r"code cell 1 of 1 failed(.|\n)*sleep\(60\)(.|\n)*KeyboardInterrupt"
    ):
        courses.render_courses(tmp_path, cache=tmp_path / "cache")


def test_an_unknown_name_lists_the_courses(tmp_path: Path) -> None:
    write_source(tmp_path, TOY)
    with pytest.raises(CourseError, match=r"expected names of courses \(toy\), got no_such"):
        courses.render_courses(tmp_path, ["no_such"], tmp_path / "cache")


# ---------------------------------------------------------------------- the cache


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the kernel by a function that notes which course it was called for."""
    called: list[str] = []

    def run_cells(source: Path) -> nbformat.NotebookNode:
        called.append(source.stem)
        return jupytext.read(source)

    monkeypatch.setattr(courses, "run_cells", run_cells)
    return called


def test_a_second_build_runs_nothing(tmp_path: Path, runs: list[str]) -> None:
    source = write_source(tmp_path, TOY)
    write_source(tmp_path, TOY, "toy_two")
    cache = tmp_path / "cache"
    for _ in range(2):
        courses.render_courses(tmp_path, cache=cache)
    # They run side by side, in any order.
    assert sorted(runs) == ["toy", "toy_two"]
    source.write_text(source.read_text() + "# %%\nprint(2)\n")
    courses.render_courses(tmp_path, cache=cache)
    assert runs[2:] == ["toy"]
    # One entry is kept for each course.
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("lens_mix/graphs/files.py", True),
        ("lens_mix/measured.json", True),
        ("demos/data/blimp/one.jsonl", True),
        ("benchmarks/number_agreement/encoder.py", True),
        # A course reads no recorded table, and Python writes its own files.
        ("benchmarks/results/table.md", False),
        ("lens_mix/__pycache__/files.pyc", False),
    ],
)
def test_the_key_covers_what_a_course_can_import_or_read(
    file: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courses, "ROOT", tmp_path)
    source = write_source(tmp_path, TOY)
    key = courses.cache_key(source)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("1")
    assert (courses.cache_key(source) != key) == counts


def test_the_key_covers_how_a_course_is_run_and_the_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path, TOY)
    keys = [courses.cache_key(source)]
    monkeypatch.setattr(courses, "__file__", str(source))
    keys.append(courses.cache_key(source))
    monkeypatch.setattr(courses.importlib.metadata, "version", lambda name: "99")
    keys.append(courses.cache_key(source))
    assert len(set(keys)) == 3


def test_the_page_of_a_course_that_is_gone_is_removed(tmp_path: Path, runs: list[str]) -> None:
    gone = write_source(tmp_path, TOY, "gone")
    write_source(tmp_path, TOY)
    (tmp_path / "index.md").write_text("# Courses")
    courses.render_courses(tmp_path, cache=tmp_path / "cache")
    (tmp_path / "gone_files").mkdir()
    gone.unlink()
    courses.render_courses(tmp_path, cache=tmp_path / "cache")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == [
        *("index.md", "toy.ipynb", "toy.md", "toy.py")
    ]


# ---------------------------------------------------------------------- outputs


def test_pictures_in_html_become_files_and_markdown(tmp_path: Path) -> None:
    text = f'<div>a</div><img alt="x [&lt;s&gt;]" src="data:image/svg+xml;base64,{PIXEL}"><div>b</div>'
    files = tmp_path / "toy_files"
    assert list(courses.render_html(text, files / "one")) == [
        "<div>a</div>",
        "![x  <s> ](toy_files/one_0.svg)",
        "<div>b</div>",
    ]
    assert (files / "one_0.svg").read_bytes() == base64.b64decode(PIXEL)


def test_a_table_has_no_look_of_its_own_and_no_empty_line() -> None:
    text = '<div>\n<style scoped>\n .a {}\n\n</style>\n<table border="1" class="dataframe">\n\n</table></div>'
    assert courses.tidy_html(text) == "<div>\n<table>\n</table></div>"


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ({"text/plain": "3"}, "```text\n3\n```"),
        ({"text/plain": "3", "text/markdown": "**3**"}, "**3**"),
        ({"text/plain": "3", "text/html": "<b>3</b>", "text/markdown": "**3**"}, "<b>3</b>"),
        ({"text/plain": "```\n\x1b[31mred\x1b[0m"}, "````text\n```\nred\n````"),
    ],
)
def test_the_richest_form_of_an_output_is_shown(data: dict[str, str], shown: str, tmp_path: Path) -> None:
    assert list(courses.render_output(output(data), tmp_path / "one", "")) == [shown]


def test_texts_of_one_stream_are_joined() -> None:
    streams = [
        nbformat.v4.new_output("stream", name=name, text=text) for name, text in ("a1", "a2", "b3", "a4")
    ]
    joined = courses.join_streams([*streams, output({"text/plain": "5"})])
    assert [one.get("text") for one in joined] == ["12", "3", "4", None]


def test_old_pictures_are_removed(tmp_path: Path, runs: list[str]) -> None:
    write_source(tmp_path, TOY)
    (tmp_path / "toy_files").mkdir()
    (tmp_path / "toy_files" / "old.png").write_text("old")
    courses.render_courses(tmp_path, cache=tmp_path / "cache")
    assert not (tmp_path / "toy_files" / "old.png").exists()


# ---------------------------------------------------------------------- the repository's address


@pytest.mark.parametrize(
    ("address", "link"),
    [
        (None, None),
        ("https://gitlab.example/a/b", None),
        ("https://github.com/a/b", f"{COLAB}/a/b/blob/gh-pages/courses/toy.ipynb"),
        ("https://github.com/a/b.git", f"{COLAB}/a/b/blob/gh-pages/courses/toy.ipynb"),
    ],
)
def test_colab_is_linked_once_the_address_is_known(
    address: str | None, link: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courses, "read_repository", lambda root: address)
    source = write_source(tmp_path, TOY)
    text = courses.write_page(source, jupytext.read(source)).read_text(encoding="utf-8")
    assert courses.colab_link(source, address) == link
    assert ("Open in Colab" in text) == (link is not None)
    assert link is None or f"]({link})" in text


# ---------------------------------------------------------------------- the courses themselves


@each_course
def test_a_course_begins_with_its_title_level_and_time(source: Path) -> None:
    notebook = jupytext.read(source)
    header, *rest = notebook.cells
    assert header.cell_type == "markdown"
    assert re.match(r"# \w.+\n", header.source)
    for word in ("Level", "Time"):
        assert re.search(rf"\b{word}\b", header.source), f"{source.name}: the first cell has no {word!r}"
    assert any("## Exercises" in cell.source for cell in rest if cell.cell_type == "markdown")


@each_course
def test_the_code_of_a_course_compiles(source: Path) -> None:
    for number, cell in enumerate(jupytext.read(source).cells):
        if cell.cell_type == "code":
            compile(cell.source, f"{source.name}, cell {number}", "exec")


@each_course
def test_the_text_of_a_course_has_no_measured_figure(source: Path) -> None:
    """The code prints every figure, so that no text can differ from what a reader sees."""
    for cell in jupytext.read(source).cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"`[^`\n]*`|```.*?```|https?://\S+", "", cell.source, flags=re.DOTALL)
            assert not re.findall(r"(?<![\d.])[-−]?0\.\d{2,}|\d+(?:\.\d+)? ?%", prose)


@pytest.mark.slow
@pytest.mark.skipif(transformer_lens_version() < (4,), reason="the site is made with TransformerLens 4")
@each_course
def test_a_course_runs_without_a_warning(source: Path, tmp_path: Path) -> None:
    notebook = courses.execute(source)
    for cell in notebook.cells:
        for shown in cell.get("outputs", []):
            assert shown.get("name") != "stderr", f"{source.name}: {shown.text}"
    page = courses.write_page(tmp_path / source.name, notebook)
    text = page.read_text(encoding="utf-8")
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (page.parent / picture).stat().st_size > 500
    assert str(ROOT) not in text
