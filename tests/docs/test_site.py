"""Test the site: its checks, its navigation, and a small build that is opened in a browser."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from benchmarks import facts
from docs.make import check, reference
from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401
from tests.source_tree import ROOT

# mkdocs is in an environment of its own, which `make docs` makes.
MKDOCS = ROOT / ".environments" / "docs" / "bin" / "mkdocs"
WIDE = "| " + " | ".join(f"a column with number {n}" for n in range(12)) + " |"
PAGE = f"""# A page

Text with `code`.

- A list below its sentence

{WIDE}
|{"---|" * 12}
{WIDE}

```python
logits, cache = model.run_with_cache(tokens, names_filter=lambda name: "pattern" in name, return_type=None)
```
"""


def navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r"^ +- (?:[\w -]+: )?(\S+\.md)$", text, re.MULTILINE)


def test_every_page_is_in_the_navigation_once():
    docs = ROOT / "docs"
    written = [page.relative_to(docs).as_posix() for page in facts.PAGES if page.parent != ROOT]
    courses = [f"courses/{path.stem}.md" for path in (docs / "courses").glob("*.py")]
    listed = [page for page in navigation() if not page.startswith("reference/")]
    assert sorted(listed) == sorted([*written, *courses])


def test_links_lead_somewhere():
    pages = [*facts.PAGES, *ROOT.glob("*.md")]
    pages += [page for name in ("benchmarks", "demos", "hooks") for page in (ROOT / name).rglob("*.md")]
    assert [f"{page.name}: {target}" for page in pages for target in broken_links(page)] == []


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead neither to a file nor to a generated page."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    here = [target for target in targets if "://" not in target]
    return [target for target in here if not leads_somewhere((page.parent / target).resolve())]


def leads_somewhere(path: Path) -> bool:
    generated = ROOT / "docs" / "reference"
    if path.is_relative_to(generated):
        return path.relative_to(generated).as_posix() in reference.list_pages()
    return path.exists() or (path.parent.name == "courses" and path.with_suffix(".py").exists())


def test_links_that_lead_nowhere_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("[one](page.md) [two](none.md#part) [three](https://a.example) [four](#here)\n")
    assert broken_links(page) == ["none.md"]


@pytest.mark.parametrize("page", facts.PAGES, ids=lambda page: page.name)
def test_lists_are_lists_on_the_site_too(page):
    assert list(check.find_glued_lists(page)) == []


def test_what_a_site_fetches_is_found(tmp_path: Path):
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="https://fonts.example/a.css"><img src="picture.png">'
        '<link rel="canonical" href="https://a.example/"><a href="https://a.example">A link</a>'
        '<script src="//cdn.example/a.js"></script>'
        "<style>p { background: url(https://a.example/b.png) }</style>"
    )
    (tmp_path / "extra.css").write_text('@import "https://a.example/c.css"; p { background: url(own.png) }')
    found = [problem.rpartition(" ")[2] for problem in check.find_fetched(tmp_path)]
    assert found == [
        "https://fonts.example/a.css",
        "//cdn.example/a.js",
        "https://a.example/b.png",
        "https://a.example/c.css",
    ]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Three things:\n- one\n- two\n", [2]),
        ("Three things:\n\n- one\n  goes on\n- two\n\nThen:\n1. a\n", [8]),
        ("## Heading\n- one\n", []),
        ("- one\n\n- two\n", []),
        ("```\ntext\n- one\n```\n", []),
        ("---\nhide:\n  - toc\n---\n\nOne:\n- two\n", [7]),
    ],
)
def test_a_list_needs_an_empty_line_above(text: str, lines: list[int], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(check, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    found = [int(re.search(r"line (\d+)", problem)[1]) for problem in check.find_glued_lists(page)]
    assert found == lines


@pytest.fixture(scope="module", name="site")
def served(tmp_path_factory: pytest.TempPathFactory):
    """Build a site of one page with the look of the whole one, and return its address."""
    if not MKDOCS.exists():
        pytest.skip("no mkdocs: `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    (folder / "docs" / "stylesheets").mkdir(parents=True)
    (folder / "docs" / "index.md").write_text(PAGE)
    style = ROOT / "docs" / "stylesheets" / "extra.css"
    (folder / "docs" / "stylesheets" / "extra.css").write_text(style.read_text())
    shutil.copytree(ROOT / "docs" / "make" / "theme", folder / "docs" / "make" / "theme")
    # The settings of the site, without its pages.
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[0]
    (folder / "mkdocs.yml").write_text(f"{settings}\nnav:\n  - index.md\n")
    built = subprocess.run([MKDOCS, "build", "--strict"], cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    handler = functools.partial(QuietHandler, directory=folder / "outputs" / "site")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@NEEDS_CHROMIUM
@pytest.mark.parametrize("width", [1300, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_the_screen_follows_the_system_and_fetches_nothing(browser, site, width, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(site)
    measured = browser.execute_script(
        "const page = document.documentElement;"
        "const loaded = performance.getEntriesByType('resource').map(entry => entry.name);"
        "return [page.scrollWidth - page.clientWidth, document.body.dataset.mdColorScheme, loaded]"
    )
    over, chosen, loaded = measured
    assert over == 0
    assert chosen == {"light": "default", "dark": "slate"}[scheme]
    assert loaded
    assert [address for address in loaded if not address.startswith(site)] == []
