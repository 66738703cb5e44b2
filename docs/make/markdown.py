"""Convert Markdown that is written for GitHub to Markdown that the site's builders read.

Links lead to where the site has what they lead to, and formulas become MathML. Code stays as it is.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path, PurePosixPath

from latex2mathml.converter import convert as convert_latex

from tests.release import read_repository

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# What the site has of docs/, apart from docs/make. Sources of generated pages are of other kinds.
COPIED = {".css", ".ipynb", ".md", ".png", ".svg"}
# Pages that the site has under another name.
_MOVED = {ROOT / "README.md": "index.md", ROOT / "CHANGELOG.md": "reference/changelog.md"}

# What comes first counts: a formula in code is code, and so is a link.
_MARKUP = re.compile(
    r"^(?P<fence> *(?:`{3,}|~{3,}))(?P<language>[^\n]*)\n(?P<fenced>.*?)^(?P=fence) *$"
    r"|(?P<comment><!--.*?-->)"
    r"|^\$\$(?P<block>.+?)\$\$ *$"
    r"|\$`(?P<quoted>[^`]+)`\$"
    r"|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
    r"|(?<![\\\w$])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\w$])"
    r"|(?P<image>!?)\[(?P<text>(?:[^\[\]`]|`[^`]*`|\[[^\]]*\](?:\([^)]*\))?)*)\]"
    r"\((?P<target>[^)\s]+)(?P<title> \"[^\"]*\")?\)",
    re.MULTILINE | re.DOTALL,
)


def convert(text: str, source: Path, page: str) -> str:
    """Return the text of a page of the site.

    Args:
        text: The Markdown.
        source: The file that its links begin at.
        page: The path of the page in the site's folder.
    """

    def replace(found: re.Match[str]) -> str:
        if found["fenced"] is not None and found["language"].strip() == "math":
            return _write_formula(found["fenced"], "block")
        if found["block"]:
            return _write_formula(found["block"], "block")
        if found["quoted"] or found["inline"]:
            return _write_formula(found["quoted"] or found["inline"], "inline")
        if found["target"]:
            inner = convert(found["text"], source, page) if "](" in found["text"] else found["text"]
            return _write_link(found["image"], inner, found["target"], found["title"] or "", source, page)
        return found[0]

    return _MARKUP.sub(replace, text)


def find_links(text: str) -> list[str]:
    """Return the targets of all links and images, without those in code."""
    targets = []
    for found in _MARKUP.finditer(text):
        if found["target"]:
            targets += [*find_links(found["text"]), found["target"]]
    return targets


def find_records(text: str, source: Path) -> set[Path]:
    """Return the Markdown files outside docs/ that a page links to."""
    paths = {_resolve(target, source) for target in find_links(text)}
    return {path for path in paths if path and (place_of(path) or "").startswith("records/")}


def place_of(path: Path) -> str | None:
    """Return the path in the site's folder of a file of the repository; None if the site does not have it."""
    if path in _MOVED:
        return _MOVED[path]
    if path.is_relative_to(DOCS):
        place = path.relative_to(DOCS)
        if place.parts[0] == "courses" and path.suffix in (".ipynb", ".py"):
            place = place.with_suffix(".md")
        return place.as_posix() if place.suffix in COPIED and place.parts[0] != "make" else None
    return f"records/{path.relative_to(ROOT).as_posix()}" if path.suffix == ".md" else None


def _resolve(target: str, source: Path) -> Path | None:
    """Return the file of the repository that a link leads to; None if it leads elsewhere."""
    name = target.partition("#")[0]
    if not name or re.match(r"[a-z]+:", name):
        return None
    path = Path(os.path.normpath(source.parent / name))
    if not path.is_relative_to(ROOT):
        return None
    return path / "README.md" if (path / "README.md").exists() else path


def _write_link(image: str, text: str, target: str, title: str, source: Path, page: str) -> str:
    path = _resolve(target, source)
    if path is None:
        return f"{image}[{text}]({target}{title})"
    place, anchor = place_of(path), "".join(target.partition("#")[1:])
    if place is not None:
        relative = os.path.relpath(place, PurePosixPath(page).parent).replace(os.sep, "/")
        return f"{image}[{text}]({relative}{anchor}{title})"
    repository = read_repository(ROOT)
    if repository and not image:
        return f"[{text}]({repository}/blob/main/{path.relative_to(ROOT).as_posix()}{anchor})"
    return text


def _write_formula(latex: str, display: str) -> str:
    mathml = convert_latex(latex.strip(), display=display)
    # Python-Markdown would read these signs as marks of emphasis, of code or of a table.
    escaped = re.sub(r"(?<=>)[*_`|\\](?=<)", lambda sign: f"&#{ord(sign[0])};", mathml)
    return f'<div class="formula">{escaped}</div>' if display == "block" else f"<span>{escaped}</span>"


def plain_text(text: str) -> str:
    """Return a heading without marks of code, links and emphasis."""
    text = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)
    return html.unescape(re.sub(r"[`*]|<[^>]+>", "", text)).strip()
