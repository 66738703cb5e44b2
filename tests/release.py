"""Say what is missing for a release, and write CITATION.cff: `python -m tests.release`.

    python -m tests.release           write CITATION.cff, and print what is missing
    python -m tests.release v0.1.0    check for the release with this tag; exit with 1 if something is missing

`pyproject.toml` has the authors and the repository's address, `lens_mix/version.py` the version, and
`CHANGELOG.md` the releases with their dates. Only the standard library is used, because the release workflow
runs this file before it installs anything.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# The authors in CITATION.cff until pyproject.toml names them: the format requires one.
UNNAMED = "The lens_mix developers"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write CITATION.cff, or check it for a tag. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.release")
    parser.add_argument("tag", nargs="?", help="the tag of the release, v and the version")
    tag = parser.parse_args(arguments).tag
    if tag is None:
        (root / "CITATION.cff").write_text(citation(root), encoding="utf-8")
    missing = list(find_missing(root, tag))
    print("\n".join(["Not ready for a release:", *missing]) if missing else "Ready for a release.")
    return 1 if missing and tag is not None else 0


def find_missing(root: Path, tag: str | None = None) -> Iterator[str]:
    """Yield a line for each thing that a release still needs, with what to do."""
    version = read_version(root)
    if not read_authors(root):
        yield "- pyproject.toml, [project] authors: expected at least one with a name, got none"
    if read_repository(root) is None:
        yield "- pyproject.toml, [project.urls] Repository: expected an address with https://, got none"
    if tag is not None and tag != f"v{version}":
        yield f"- the tag: expected v{version}, as in lens_mix/version.py, got {tag}"
    if read_date(root, version) is None:
        yield f"- CHANGELOG.md: expected the heading '## {version} - YYYY-MM-DD', found none"
    kept = root / "CITATION.cff"
    if not kept.exists() or kept.read_text(encoding="utf-8") != citation(root):
        yield "- CITATION.cff: expected one that agrees with the files above; run `python -m tests.release`"


def citation(root: Path) -> str:
    """Return the text of CITATION.cff."""
    project = _read_project(root)
    version = read_version(root)
    date, repository = read_date(root, version), read_repository(root)
    # A string of JSON is also a string of YAML.
    lines = [
        "# Written by `python -m tests.release` from pyproject.toml, lens_mix/version.py and CHANGELOG.md.",
        "cff-version: 1.2.0",
        "message: >-",
        "  Please cite the library with these data, and the paper of each method that you use:",
        '  lens_mix.citation("value_zeroing") returns its BibTeX.',
        "type: software",
        f"title: {json.dumps(project['name'])}",
        f"abstract: {json.dumps(project['description'], ensure_ascii=False)}",
        "authors:",
        *(f"  - name: {json.dumps(name, ensure_ascii=False)}" for name in read_authors(root) or [UNNAMED]),
        f"version: {version}",
        *([f"date-released: {date}"] if date else []),
        f"license: {project['license']}",
        *([f"repository-code: {json.dumps(repository)}"] if repository else []),
        "keywords:",
        *(f"  - {json.dumps(keyword, ensure_ascii=False)}" for keyword in project["keywords"]),
    ]
    return "\n".join(lines) + "\n"


def read_authors(root: Path) -> list[str]:
    """Return the names of the authors in pyproject.toml."""
    return [author["name"] for author in _read_project(root).get("authors", []) if author.get("name")]


def read_repository(root: Path) -> str | None:
    """Return the repository's address in pyproject.toml, or None as long as there is none."""
    address = _read_project(root).get("urls", {}).get("Repository", "")
    return address if re.fullmatch(r"https://[^/\s]+/\S+", address) else None


def read_version(root: Path) -> str:
    """Return the version, without an import of the library and so of torch."""
    text = (root / "lens_mix" / "version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(version)


def read_date(root: Path, version: str) -> str | None:
    """Return the date of a release in the changelog, or None if it has no heading with a date."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    dates = re.findall(rf"^## {re.escape(version)} - (\d{{4}}-\d{{2}}-\d{{2}})$", text, re.MULTILINE)
    return dates[0] if dates else None


def _read_project(root: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


if __name__ == "__main__":
    sys.exit(main())
