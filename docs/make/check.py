"""Check what the builders do not: what the built site fetches, and lists that only GitHub shows as lists.

`make docs` runs it: `python -m docs.make.check`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITES = (ROOT / "outputs" / "site", ROOT / "outputs" / "zensical")

# The attributes by which a page loads something. Only the reader follows an `a`, and a `link` loads something
# only if its `rel` says so.
_LOADS = {
    "img": ("src", "srcset"),
    "script": ("src",),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "object": ("data",),
    "embed": ("src",),
}
_LOADING_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch", "manifest"}
_IN_STYLES = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class _Loaded(HTMLParser):
    """Collect the addresses outside the site that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self._is_style = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        names = _LOADS.get(tag, ())
        if tag == "link" and _LOADING_LINKS & set(given.get("rel", "").split()):
            names = ("href",)
        self.addresses += [given[name] for name in names if _is_outside(given.get(name, ""))]
        self.addresses += _IN_STYLES.findall(given.get("style", ""))
        self._is_style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._is_style:
            self.addresses += _IN_STYLES.findall(data)
            self._is_style = False


def find_fetched(site: Path) -> Iterator[str]:
    """Yield a sentence for everything that the pages and styles of a built site load from elsewhere.

    Scripts are not read: tests/docs/test_site.py opens the pages in a browser and looks at its requests.
    """
    for path in sorted(site.rglob("*.html")):
        page = _Loaded()
        page.feed(path.read_text(encoding="utf-8"))
        for address in page.addresses:
            yield f"{path.relative_to(site)}: expected nothing from outside the site, got {address}"
    for path in sorted(site.rglob("*.css")):
        for address in _IN_STYLES.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: expected nothing from outside the site, got {address}"


def find_glued_lists(page: Path) -> Iterator[str]:
    """Yield a sentence for every list that follows its sentence without an empty line.

    GitHub shows such lines as a list, but Python-Markdown, which builds the site, as one paragraph.
    """
    # Code, and the settings of a page at its head, are not text.
    aside = re.compile(r"\A---\n.*?^---$|^```.*?^```$", re.MULTILINE | re.DOTALL)
    lines = aside.sub(_blank, page.read_text(encoding="utf-8"))
    is_item = re.compile(r"\s*(?:[-*+]|\d+[.)]) ")
    above, in_list = "", False
    for number, line in enumerate(lines.splitlines(), 1):
        if is_item.match(line):
            # Below a heading, a list needs no empty line.
            if above.strip() and not above.startswith("#") and not in_list:
                place = f"{page.relative_to(ROOT)}, line {number}"
                yield f"{place}: expected an empty line above the list, got {above.strip()!r}"
            in_list = True
        elif not line.strip() or not line.startswith(" "):
            # A line that continues an item is indented; after an empty line a new list can begin.
            in_list = in_list and bool(line.strip()) and not line.startswith("#")
        above = line


def _is_outside(address: str) -> bool:
    return re.match(r"\s*(?:https?:)?//", address) is not None


def _blank(block: re.Match[str]) -> str:
    return "\n" * block[0].count("\n")


def main() -> None:
    """Print what is wrong, and exit with 1 if there is anything."""
    problems = [problem for site in SITES if site.exists() for problem in find_fetched(site)]
    for page in sorted((ROOT / "docs").rglob("*.md")):
        problems += find_glued_lists(page)
    print("\n".join(problems) or "The site fetches nothing, and all lists are lists.")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
