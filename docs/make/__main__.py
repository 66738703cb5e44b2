"""Write the pages that are made from the source: `python -m docs.make`.

The reference goes to `docs/reference`, and the pages of recorded courses to `docs/courses`. git ignores both.
"""

from __future__ import annotations

from pathlib import Path

from docs.make import courses, reference

DOCS = Path(__file__).parents[1]


def main() -> None:
    """Write the reference and the pages of courses."""
    reference.write(DOCS / "reference")
    courses.render_courses()


if __name__ == "__main__":
    main()
