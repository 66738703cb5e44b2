"""Test the site: its checks, its navigation, and a small build that is opened in a browser."""

from __future__ import annotations

import functools
import http.server
import io
import re
import shutil
import subprocess
import threading
from pathlib import Path

import jupytext
import pytest
from PIL import Image

from benchmarks import facts
from docs.make import __main__ as site
from docs.make import check, courses, markdown, reference
from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401
from tests.source_tree import ROOT

# mkdocs is in an environment of its own, which `make docs` makes.
MKDOCS = ROOT / ".environments" / "docs" / "bin" / "mkdocs"
WIDE = "| " + " | ".join(f"a column with number {n}" for n in range(12)) + " |"
FORMULA = r"\text{score}_{l,i,j} = " + r" + ".join([r"\sum_h a_{hij}"] * 8)
PAGE = f"""# A page

Text with `code`.

- A list below its sentence

{WIDE}
|{"---|" * 12}
{WIDE}

![A square](scheme.svg)

```math
{FORMULA}
```

```python
logits, cache = model.run_with_cache(tokens, names_filter=lambda name: "pattern" in name, return_type=None)
```
"""
# As in the plots of the evidence, the colors depend on the scheme.
PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40">
<style>rect { fill: #ff0000 } @media (prefers-color-scheme: dark) { rect { fill: #0000ff } }</style>
<rect width="40" height="40"/></svg>
"""


def navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r"^ +- (?:[\w -]+: )?(\S+\.md)$", text, re.MULTILINE)


def test_every_page_is_in_the_navigation_once():
    pages = [source for source in site.list_sources() if source.suffix in (".md", ".ipynb")]
    listed = [page for page in navigation() if not page.startswith("reference/")]
    assert sorted(listed) == sorted(markdown.place_of(page) for page in pages)


# ---------------------------------------------------------------------- the folder of the site's pages


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small repository with a page, a record that a page links to, and one that none links to."""
    files = {
        "docs/index.md": "# Home\n\n[Page](guides/page.md#part) ![A dot](images/dot.png)\n",
        "docs/guides/page.md": "[Course](../courses/toy.ipynb) [`scores`](../../benchmarks/scores.md) "
        "[all](../../benchmarks/) [code](../../lens/run.py) [out](https://a.example) `[no](link.md)` "
        "[![A dot](../images/dot.png)](../index.md)\n\n```text\n[no](link.md) $`x`$\n```\n",
        "docs/images/dot.png": "",
        "docs/make/page.md": "",
        "benchmarks/README.md": "# All\n\n[Scores](scores.md) [changes](../CHANGELOG.md)\n",
        "benchmarks/scores.md": "# Scores\n\n[Page](../docs/guides/page.md) [data](scores.json)\n",
        "benchmarks/other.md": "# Other\n",
        "lens/run.py": "",
        "CHANGELOG.md": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(markdown, "ROOT", tmp_path)
    monkeypatch.setattr(markdown, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(markdown, "_MOVED", {tmp_path / "CHANGELOG.md": "reference/changelog.md"})
    monkeypatch.setattr(markdown, "read_repository", lambda root: None)
    monkeypatch.setattr(reference, "write", lambda folder: None)
    monkeypatch.setattr(courses, "render_courses", lambda into: None)
    return tmp_path


def test_the_folder_has_pages_pictures_and_the_records_that_they_link_to(repository: Path):
    folder = repository / "outputs" / "pages"
    (folder / "removed").mkdir(parents=True)
    site.main(folder)
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    pages = {"index.md", "guides/page.md", "images/dot.png"}
    assert written == {*pages, "records/benchmarks/README.md", "records/benchmarks/scores.md"}
    assert (folder / "index.md").read_text() == (repository / "docs" / "index.md").read_text()
    page = (folder / "guides" / "page.md").read_text()
    assert page.startswith(
        "[Course](../courses/toy.md) [`scores`](../records/benchmarks/scores.md) "
        "[all](../records/benchmarks/README.md) code [out](https://a.example) `[no](link.md)` "
        "[![A dot](../images/dot.png)](../index.md)\n"
    )
    assert page.endswith("```text\n[no](link.md) $`x`$\n```\n")
    record = (folder / "records" / "benchmarks" / "scores.md").read_text()
    assert record.startswith("---\nsearch:\n  exclude: true\n---\n\n# Scores\n")
    assert record.endswith("[Page](../../guides/page.md) data\n")
    readme = (folder / "records" / "benchmarks" / "README.md").read_text()
    assert readme.endswith("[Scores](scores.md) [changes](../../reference/changelog.md)\n")


def test_links_to_code_lead_to_the_repository_if_its_address_is_known(repository: Path, monkeypatch):
    monkeypatch.setattr(markdown, "read_repository", lambda root: "https://a.example/b")
    source = repository / "docs" / "index.md"
    converted = markdown.convert("[code](../lens/run.py#L3)", source, "index.md")
    assert converted == "[code](https://a.example/b/blob/main/lens/run.py#L3)"


@pytest.mark.parametrize(
    ("text", "display", "has"),
    [
        ("```math\n\\frac{a}{b}\n```", "block", "<mfrac>"),
        ("$$\na_{ij}\n$$", "block", "<msub>"),
        ("so $a_{ij}$, too", "inline", "<msub>"),
        ("so $`a * b`$ too", "inline", "&#x0002A;"),
    ],
)
def test_formulas_become_mathml(text: str, display: str, has: str):
    converted = markdown.convert(text, ROOT / "docs" / "index.md", "index.md")
    assert f'display="{display}"' in converted
    assert has in converted
    assert "$" not in converted


@pytest.mark.parametrize(
    "text", ["`$x$` and ``$`x`$``", "```python\ncost = '$x$'\n```", "it costs $5 or $6 a day", "\\$x$"]
)
def test_code_and_dollars_are_no_formulas(text: str):
    assert markdown.convert(text, ROOT / "docs" / "index.md", "index.md") == text


# ---------------------------------------------------------------------- links, as GitHub resolves them


@functools.cache
def list_tracked() -> frozenset[Path]:
    """Return the files that git has, and their folders; those that exist in a source distribution."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        files = [ROOT / name for name in listed.split("\0") if name]
        files = [path for path in files if path.exists()]
    else:
        files = [path for path in ROOT.rglob("*") if path.is_file()]
        # A source distribution has the courses without their records.
        files += [source.with_suffix(".ipynb") for source in (ROOT / "docs" / "courses").glob("*.py")]
    return frozenset(files) | {folder for path in files for folder in path.parents}


def list_pages() -> list[Path]:
    """Return all Markdown that git has, and the sources of the courses, which are Markdown and code."""
    pages = [path for path in list_tracked() if path.suffix == ".md"]
    return sorted([*pages, *(ROOT / "docs" / "courses").glob("*.py")])


def read_markdown(page: Path) -> str:
    if page.suffix == ".md":
        return page.read_text(encoding="utf-8")
    return "\n\n".join(cell.source for cell in jupytext.read(page).cells if cell.cell_type == "markdown")


def list_anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page by GitHub's rule."""
    without_code = re.sub(r"^( *)(```+|~~~+).*?^\1\2", "", text, flags=re.MULTILINE | re.DOTALL)
    anchors: dict[str, int] = {}
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', without_code))
    for heading in re.findall(r"^#{1,6} +(.+?)(?: +#+)? *$", without_code, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", markdown.plain_text(heading).lower()).replace(" ", "-")
        number = anchors[slug] = anchors.get(slug, -1) + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found


def find_dead_links(page: Path) -> list[str]:
    """Return the links of a page that lead to no file of git, or to no heading of it."""
    text = read_markdown(page)
    without_code = re.sub(r"^( *)(```+|~~~+).*?^\1\2|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = [*markdown.find_links(text), *re.findall(r'(?:src|href)="([^"]+)"', without_code)]
    dead = []
    for target in targets:
        name, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / name).resolve() if name else page
        # An anchor of a file that is not Markdown has no heading.
        headings = list_anchors(read_markdown(path)) if anchor and path.suffix == ".md" else set()
        if path not in list_tracked() or (anchor and anchor not in headings):
            dead.append(target)
    return dead


@pytest.mark.once
@pytest.mark.parametrize("page", list_pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_a_file_of_git_and_to_a_heading(page: Path):
    assert find_dead_links(page) == []


def test_dead_links_are_found(tmp_path: Path):
    page = ROOT / "docs" / "page.md"
    texts = {
        "[a](index.md) [b](none.md#part) [c](https://a.example) [d](#here) ![e](none.png)": 3,
        "[a](make/) [b](../README.md) `[c](none.md)` [`d`](none.md) [![e](f.png)](g.md)": 3,
    }
    for text, count in texts.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "read_markdown", lambda path, text=text: text)
            assert len(find_dead_links(page)) == count, text


def test_anchors_are_those_of_github():
    text = "# A `b_c`, [d](e.md)?\n\n## What's *new* & old\n\n```\n# no\n```\n\n## Twice\n\n## Twice\n"
    assert list_anchors(text) == {"a-b_c-d", "whats-new--old", "twice", "twice-1"}


# ---------------------------------------------------------------------- what the builders do not check


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


@pytest.fixture(scope="module", name="address")
def served(tmp_path_factory: pytest.TempPathFactory):
    """Build a site of one page with the look of the whole one, and return its address."""
    if not MKDOCS.exists():
        pytest.skip("no mkdocs: `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    pages = folder / "outputs" / "pages"
    shutil.copytree(ROOT / "docs" / "stylesheets", pages / "stylesheets")
    (pages / "index.md").write_text(markdown.convert(PAGE, ROOT / "docs" / "index.md", "index.md"))
    (pages / "scheme.svg").write_text(PICTURE)
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
def test_a_page_fits_the_screen_follows_the_system_and_fetches_nothing(browser, address, width, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(address)
    measured = browser.execute_script(
        "const page = document.documentElement;"
        "const loaded = performance.getEntriesByType('resource').map(entry => entry.name);"
        "return [page.scrollWidth - page.clientWidth, document.body.dataset.mdColorScheme, loaded]"
    )
    over, chosen, loaded = measured
    assert over == 0
    assert chosen == {"light": "default", "dark": "slate"}[scheme]
    assert loaded
    assert [one for one in loaded if not one.startswith(address)] == []


@NEEDS_CHROMIUM
def test_pictures_follow_the_scheme_of_the_page_and_formulas_are_drawn(browser, address):
    light = [{"name": "prefers-color-scheme", "value": "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": light})
    browser.get(address)
    colors = []
    for scheme in ("default", "slate"):
        browser.execute_script(f"document.body.dataset.mdColorScheme = '{scheme}'")
        drawn = browser.find_element("css selector", "img[src*=scheme]").screenshot_as_png
        colors.append(Image.open(io.BytesIO(drawn)).convert("RGB").getpixel((20, 20)))
    assert colors == [(255, 0, 0), (0, 0, 255)]
    measure = "return document.querySelector('.formula math').getBoundingClientRect().height"
    assert browser.execute_script(measure) > 20
