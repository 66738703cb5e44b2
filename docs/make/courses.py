"""Run the courses and record them as notebooks, and write each record as a page.

    python -m docs.make.courses            run and record every course
    python -m docs.make.courses norms      one of them

A course is a jupytext source (py:percent) in docs/courses/. `NAME.ipynb` beside it is its record: the same
cells with their outputs. git keeps it, so that the site is built without running a model. `make docs` writes
`NAME.md` and the pictures in `NAME_files/` from it, in the folder of the site's pages.
"""

from __future__ import annotations

import base64
import html
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode

from docs.make.markdown import convert
from tests.release import read_repository

ROOT = Path(__file__).resolve().parents[2]
COURSES = ROOT / "docs" / "courses"
# A course should run within a minute; a cell that needs longer than this hangs.
SECONDS_PER_CELL = 600
# Courses that run side by side, each with one thread and about 1 GB.
KERNELS = 2
# Colab opens notebooks from a branch. The built site, which has the notebooks, is published on this one.
PUBLISHED_BRANCH = "gh-pages"

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_IMAGE = re.compile(
    r'<img alt="(?P<alt>[^"]*)" src="data:image/(?P<kind>svg|png)[^,"]*;base64,(?P<data>[^"]*)">'
)
_STYLE = re.compile(r"<style.*?</style>", re.DOTALL)
_LOOK = re.compile(r' (?:border="1"|class="dataframe"|style="text-align: right;")')
_HEADING = re.compile(r"^#+ .+", re.MULTILINE)


class CourseError(Exception):
    """Report a course that cannot be rendered: the cell and what happened in it."""


def render_courses(folder: Path = COURSES, *, into: Path) -> list[Path]:
    """Write the page of every recorded course in a folder, and return the pages.

    Args:
        folder: The folder with the sources and records.
        into: The folder of the pages.

    Raises:
        CourseError: A course has no record, or one of other cells, or a record has no source.
    """
    sources = find_sources(folder)
    for notebook in folder.glob("*.ipynb"):
        if notebook.stem not in sources:
            raise CourseError(
                f"{notebook}: expected a source {notebook.stem}.py beside it; add it, or delete the record"
            )
    return [write_page(source, read_record(source), into) for source in sources.values()]


def record_courses(folder: Path = COURSES, names: Sequence[str] = ()) -> None:
    """Run every course in a folder, or the named ones, and write their notebooks.

    Raises:
        CourseError: A name without a source, or a cell that raises an error or does not end.
    """
    sources = find_sources(folder)
    unknown = [name for name in names if name not in sources]
    if unknown:
        raise CourseError(f"expected names of courses ({', '.join(sources)}), got {', '.join(unknown)}")
    with ThreadPoolExecutor(KERNELS) as pool:
        list(pool.map(record, [sources[name] for name in names or sources]))


def find_sources(folder: Path) -> dict[str, Path]:
    """Return the sources of a folder by the names of their courses."""
    return {source.stem: source for source in sorted(folder.glob("*.py"))}


def record(source: Path) -> None:
    """Run a course and write its notebook.

    Raises:
        CourseError: A cell raises an error or does not end.
    """
    start = time.perf_counter()
    notebook = run_cells(source)
    print(f"{source.name}: run in {time.perf_counter() - start:.0f} s", flush=True)
    # An interrupted run must not leave half a record behind.
    unfinished = source.with_suffix(".unfinished")
    nbformat.write(notebook, unfinished)
    unfinished.replace(source.with_suffix(".ipynb"))


def read_record(source: Path) -> NotebookNode:
    """Return the recorded notebook of a course.

    Raises:
        CourseError: There is none, or the source has other cells by now.
    """
    recorded = source.with_suffix(".ipynb")
    if not recorded.exists():
        raise CourseError(f"{source}: expected a record in {recorded.name}; run `make courses`")
    notebook = nbformat.read(recorded, as_version=4)
    cells, now = (
        [(one.cell_type, one.source) for one in of.cells] for of in (notebook, jupytext.read(source))
    )
    if cells != now:
        raise CourseError(f"{recorded}: expected the cells of {source.name}, got others; run `make courses`")
    return notebook


def fetch_models() -> None:
    """Download the models of the courses, so that no page shows the messages of a first download."""
    from demos import models

    models.smollm2_folder()
    models.minilm_folder()
    models.dinov2_folder()


# ---------------------------------------------------------------------- execution


def run_cells(source: Path) -> NotebookNode:
    """Return the notebook of a course after running all its cells in a new kernel of this interpreter.

    Raises:
        CourseError: A cell raises an error or does not end.
    """
    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    # Without folders to search, the only kernel is that of the running interpreter.
    kernels = KernelSpecManager(kernel_dirs=[])
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=SECONDS_PER_CELL,
            interrupt_on_timeout=True,
            record_timing=False,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute(env=kernel_environment(), cleanup_kc=True)
        except (CellExecutionError, DeadKernelError) as error:
            raise CourseError(describe_failure(source, notebook, error)) from error
    for number, cell in enumerate(notebook.cells):
        # jupytext gives cells random names, and a second run should write the same file.
        cell.id = f"cell-{number}"
        if cell.cell_type == "code":
            cell.outputs = join_streams(cell.outputs)
    return notebook


def join_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Return outputs with neighboring texts of one stream joined; the kernel sends them in pieces."""
    joined: list[NotebookNode] = []
    for output in outputs:
        above = joined[-1] if joined else None
        if above and output.output_type == "stream" and above.get("name") == output.name:
            above.text += output.text
        else:
            joined.append(output)
    return joined


def kernel_environment() -> dict[str, str]:
    """Return the variables of a kernel: the repository can be imported, and nothing is fetched."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # A page has no use for progress bars: they are off, and tqdm warns that their widgets are not installed.
    quiet = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:IProgress not found"]))
    return {
        **os.environ,
        **{"PYTHONPATH": path, "PYTHONWARNINGS": quiet, "PYTHONIOENCODING": "utf-8"},
        **{"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
    }


def describe_failure(source: Path, notebook: NotebookNode, error: Exception) -> str:
    """Return the source and the error of the cell that failed, which is the last one that was started."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    started = [cell for cell in cells if cell.execution_count or cell.outputs] or cells[:1]
    failed = next((cell for cell in cells if _has_error(cell)), started[-1])
    reason = f"{type(error).__name__}: {error}"
    for output in failed.outputs:
        if output.output_type == "error":
            reason = _ANSI.sub("", "\n".join(output.traceback)) or f"{output.ename}: {output.evalue}"
    number = cells.index(failed) + 1
    return f"{source}: code cell {number} of {len(cells)} failed.\n\n{failed.source}\n\n{reason}"


def _has_error(cell: NotebookNode) -> bool:
    return any(output.output_type == "error" for output in cell.outputs)


# ---------------------------------------------------------------------- pages


def write_page(source: Path, notebook: NotebookNode, into: Path) -> Path:
    """Write the page and the pictures of a recorded course into a folder, and return the page."""
    page = into / f"{source.stem}.md"
    files = into / f"{source.stem}_files"
    shutil.rmtree(files, ignore_errors=True)
    into.mkdir(parents=True, exist_ok=True)
    first, *rest = notebook.cells
    heading, _, text = convert(first.source, source, f"courses/{page.name}").partition("\n")
    links = [f"[Download the notebook]({source.stem}.ipynb)"]
    colab = colab_link(source, read_repository(ROOT))
    if colab:
        links.append(f"[Open in Colab]({colab})")
    blocks = [heading, " · ".join(links), text.strip()]
    for number, cell in enumerate(rest, 1):
        if cell.cell_type == "markdown":
            heading = (_HEADING.findall(cell.source) or [heading])[-1]
            blocks.append(convert(cell.source, source, f"courses/{page.name}"))
            continue
        blocks += render_cell(cell, files / f"cell_{number}", f"Figure: {heading.strip('# ')}")
    page.write_text("\n\n".join(block for block in blocks if block) + "\n", encoding="utf-8")
    return page


def render_cell(cell: NotebookNode, picture: Path, alt: str) -> Iterator[str]:
    """Yield the Markdown of a cell of code and its outputs.

    Args:
        cell: The cell.
        picture: The beginning of the paths of its pictures.
        alt: A text for readers who do not see the pictures.
    """
    if cell.source:
        yield fence(cell.source, "python")
    for number, output in enumerate(cell.outputs):
        yield from render_output(output, picture.with_name(f"{picture.name}_{number}"), alt)


def render_output(output: NotebookNode, picture: Path, alt: str) -> Iterator[str]:
    """Yield the Markdown of one output: a picture, HTML or text."""
    if output.output_type == "stream":
        yield fence(output.text, "text")
        return
    data = output.data
    if "image/svg+xml" in data:
        yield write_picture(picture.with_suffix(".svg"), data["image/svg+xml"].encode(), alt)
    elif "image/png" in data:
        yield write_picture(picture.with_suffix(".png"), base64.b64decode(data["image/png"]), alt)
    elif "text/html" in data:
        yield from render_html(data["text/html"], picture)
    elif "text/markdown" in data:
        yield data["text/markdown"]
    elif "text/plain" in data:
        yield fence(data["text/plain"], "text")


def render_html(text: str, picture: Path) -> Iterator[str]:
    """Yield the HTML of an output, with its pictures as files.

    The pictures become Markdown images, because the site rewrites relative links in Markdown and not in HTML.
    """
    start = 0
    for number, image in enumerate(_IMAGE.finditer(text)):
        yield tidy_html(text[start : image.start()])
        file = picture.with_name(f"{picture.name}_{number}.{image['kind']}")
        yield write_picture(file, base64.b64decode(image["data"]), html.unescape(image["alt"]))
        start = image.end()
    yield tidy_html(text[start:])


def tidy_html(text: str) -> str:
    """Return HTML as one block of Markdown: without styles and empty lines.

    Without the class of pandas, the site shows its tables like all others.
    """
    text = _LOOK.sub("", _STYLE.sub("", text))
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def write_picture(file: Path, content: bytes, alt: str) -> str:
    """Write a picture, and return the Markdown that shows it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    quiet = re.sub(r"[\[\]\n]", " ", alt)
    return f"![{quiet}]({file.parent.name}/{file.name})"


def fence(text: str, language: str) -> str:
    """Return text in a code block whose fence is longer than any in the text."""
    ticks = "`" * max([3, *(len(run) + 1 for run in re.findall(r"^`{3,}", text, re.MULTILINE))])
    return f"{ticks}{language}\n{_ANSI.sub('', text).rstrip()}\n{ticks}"


# ---------------------------------------------------------------------- the repository's address


def colab_link(source: Path, address: str | None) -> str | None:
    """Return the link that opens the published notebook in Colab; None without an address on GitHub."""
    found = re.fullmatch(r"https://github\.com/([^/]+/[^/]+?)(?:\.git)?/?", address or "")
    if found is None:
        return None
    place = f"{found[1]}/blob/{PUBLISHED_BRANCH}/courses/{source.stem}.ipynb"
    return f"https://colab.research.google.com/github/{place}"


def main() -> None:
    """Run and record the courses that the command line names, or all."""
    fetch_models()
    try:
        record_courses(names=sys.argv[1:])
    except CourseError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
