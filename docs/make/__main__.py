"""Write the pages that are made from the source: `python -m docs.make`.

The reference goes to `docs/reference`, the executed pages to `docs/courses`. git ignores both.
"""

from __future__ import annotations

from pathlib import Path

from docs.make import courses, reference

DOCS = Path(__file__).parents[1]


def write_reference(folder: Path) -> None:
    """Write the pages of the reference, and delete those of an earlier run.

    A page that is already as it should be keeps its time, so that a build knows that it is unchanged.
    """
    pages = reference.write_pages()
    for path in folder.rglob("*.md"):
        if str(path.relative_to(folder)) not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def main() -> None:
    """Write the reference and the executed pages."""
    write_reference(DOCS / "reference")
    courses.render_courses()


if __name__ == "__main__":
    main()
