"""Write the folder from which the site is built: `python -m docs.make`.

`outputs/pages` gets a copy of the pages and pictures of docs/, the pages of the recorded courses, the
reference, and the records outside docs/ that a page links to. docs/ itself has only what git has.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from docs.make import courses, markdown, reference

PAGES = markdown.ROOT / "outputs" / "pages"
# A record can be found from the page that quotes it. The search would show its tables first.
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
# Who searches for the name of a method wants its page before those that mention it.
_METHOD = "---\nsearch:\n  boost: 3\n---\n\n"


def main(folder: Path = PAGES) -> None:
    """Write all pages, and delete those of an earlier run.

    Args:
        folder: The folder to write to.
    """
    shutil.rmtree(folder, ignore_errors=True)
    records: set[Path] = set()
    for source in list_sources():
        head = _METHOD if source.parent.name == "methods" else ""
        records |= _copy(source, folder / source.relative_to(markdown.DOCS), head)
    reference.write(folder / "reference")
    courses.render_courses(into=folder / "courses")
    written: set[Path] = set()
    while records - written:
        record = min(records - written)
        written.add(record)
        records |= _copy(record, folder / str(markdown.place_of(record)), _NOT_SEARCHED)


def list_sources() -> list[Path]:
    """Return the pages, pictures and styles of docs/."""
    files = [path for path in sorted(markdown.DOCS.rglob("*")) if path.suffix in markdown.COPIED]
    return [path for path in files if not path.is_relative_to(markdown.DOCS / "make")]


def _copy(source: Path, page: Path, head: str = "") -> set[Path]:
    """Copy a file, with the site's links and formulas if it is a page. Return the records it links to."""
    page.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix != ".md":
        shutil.copy(source, page)
        return set()
    text = source.read_text(encoding="utf-8")
    place = str(markdown.place_of(source))
    page.write_text(head + markdown.convert(text, source, place), encoding="utf-8")
    return {path for path in markdown.find_records(text, source) if path.exists()}


if __name__ == "__main__":
    main()
