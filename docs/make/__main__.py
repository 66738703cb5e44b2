"""Write the pages that are made from the source: `python -m docs.make`.

The reference goes to `docs/reference`, the executed pages to `docs/courses`. git ignores both.
"""

from __future__ import annotations

from pathlib import Path

from docs.make import courses, reference

DOCS = Path(__file__).parents[1]


def main() -> None:
    """Write the reference and the executed pages."""
    reference.write(DOCS / "reference")
    courses.fetch_models()
    courses.render_courses()


if __name__ == "__main__":
    main()
