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
needs_records = pytest.mark.skipif(
    not any(COURSES.glob("*.ipynb")), reason="a source distribution has no records of courses"
)
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


def test_a_source_becomes_a_notebook_with_outputs_and_a_page(tmp_path: Path) -> None:
    write_source(tmp_path, TOY)
    courses.record_courses(tmp_path)
    (page,) = courses.render_courses(tmp_path, into=tmp_path)
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
        courses.record_courses(tmp_path)
    said = str(raised.value)
    assert "toy.py: code cell 2 of 3 failed" in said
    assert "broken = fine / 0" in said
    assert "ZeroDivisionError: division by zero" in said
    assert "\x1b" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["toy.py"]


def test_a_cell_that_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courses, "SECONDS_PER_CELL", 3)  # an interrupt before the kernel is ready is lost
    write_source(tmp_path, "# %%\nwaited = __import__('time').sleep(60)\n")
    with pytest.raises(
        CourseError, match=r"code cell 1 of 1 failed(.|\n)*sleep\(60\)(.|\n)*KeyboardInterrupt"
    ):
        courses.record_courses(tmp_path)


def test_an_unknown_name_lists_the_courses(tmp_path: Path) -> None:
    write_source(tmp_path, TOY)
    with pytest.raises(CourseError, match=r"expected names of courses \(toy\), got no_such"):
        courses.record_courses(tmp_path, ["no_such"])


# ---------------------------------------------------------------------- the record


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the kernel by a function that notes which course it was called for."""
    called: list[str] = []

    def run_cells(source: Path) -> nbformat.NotebookNode:
        called.append(source.stem)
        return jupytext.read(source)

    monkeypatch.setattr(courses, "run_cells", run_cells)
    return called


def test_a_page_is_written_from_the_record_without_a_run(tmp_path: Path, runs: list[str]) -> None:
    for name in ("toy", "toy_two"):
        write_source(tmp_path, TOY, name)
    courses.record_courses(tmp_path)
    # They run side by side, in any order.
    assert sorted(runs) == ["toy", "toy_two"]
    courses.record_courses(tmp_path, ["toy_two"])
    assert [page.name for page in courses.render_courses(tmp_path, into=tmp_path)] == ["toy.md", "toy_two.md"]
    assert runs[2:] == ["toy_two"]


def test_a_course_without_a_record_of_its_cells_is_refused(tmp_path: Path, runs: list[str]) -> None:
    source = write_source(tmp_path, TOY)
    with pytest.raises(CourseError, match=r"expected a record in toy\.ipynb; run `make courses`"):
        courses.render_courses(tmp_path, into=tmp_path)
    courses.record_courses(tmp_path)
    source.write_text(source.read_text() + "# %%\nprint(2)\n")
    with pytest.raises(CourseError, match=r"expected the cells of toy\.py, got others; run `make courses`"):
        courses.render_courses(tmp_path, into=tmp_path)


def test_a_record_without_a_source_is_an_error(tmp_path: Path, runs: list[str]) -> None:
    gone = write_source(tmp_path, TOY, "gone")
    courses.record_courses(tmp_path)
    gone.unlink()
    with pytest.raises(CourseError, match=r"gone\.ipynb: expected a source gone\.py beside it"):
        courses.render_courses(tmp_path, into=tmp_path)


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
    courses.record_courses(tmp_path)
    courses.render_courses(tmp_path, into=tmp_path)
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
    text = courses.write_page(source, jupytext.read(source), tmp_path).read_text(encoding="utf-8")
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


@needs_records
@each_course
def test_a_course_is_recorded_without_a_warning(source: Path, tmp_path: Path) -> None:
    notebook = courses.read_record(source)
    assert_has_no_warning(source, notebook)
    page = courses.write_page(source, notebook, tmp_path)
    text = page.read_text(encoding="utf-8")
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (page.parent / picture).stat().st_size > 500
    assert str(ROOT) not in text


@pytest.mark.slow
@pytest.mark.skipif(
    transformer_lens_version() < (4,), reason="the courses are recorded with TransformerLens 4"
)
@each_course
def test_a_course_shows_today_what_its_record_shows(source: Path) -> None:
    """Last digits and pictures may differ on another processor; texts and the kinds of outputs may not."""
    notebook = courses.run_cells(source)
    assert_has_no_warning(source, notebook)
    now, recorded = (shown_by(each) for each in (notebook, courses.read_record(source)))
    assert now == recorded, f"{source.name}: run `make courses` if the change is intended"


def assert_has_no_warning(source: Path, notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        for shown in cell.get("outputs", []):
            assert shown.get("name") != "stderr", f"{source.name}: {shown.text}"


def shown_by(notebook: nbformat.NotebookNode) -> list[tuple[int, list[str], list[str]]]:
    """Return each output's cell, the forms that it has, and the words of its text, sorted."""
    return [
        (number, sorted(shown.get("data", {})), sorted(re.findall(r"[^\W\d]{2,}", shown.get("text", ""))))
        for number, cell in enumerate(notebook.cells)
        for shown in cell.get("outputs", [])
    ]
