"""Write the names of all methods into `lens_mix/__init__.pyi` and `mkdocs.yml`, for `make stub`."""

from __future__ import annotations

import re
from pathlib import Path

from docs.make.methods import write_navigation
from lens_mix.methods import METHODS

ROOT = Path(__file__).parents[1]
STUB = ROOT / "lens_mix" / "__init__.pyi"
SETTINGS = ROOT / "mkdocs.yml"
_IMPORT = re.compile(r"^from \.methods\.\w+ import (.*)\n", re.MULTILINE)
_NAME = re.compile(r'^    "(\w+)",\n', re.MULTILINE)


def stub_text() -> str:
    """Return the stub with an import and a public name for every method."""
    text = STUB.read_text(encoding="utf-8")
    by_file: dict[str, list[str]] = {}
    for method in METHODS.values():
        by_file.setdefault(method.__module__.removeprefix("lens_mix"), []).append(method.__name__)
    imports = [f"from {module} import {', '.join(sorted(by_file[module]))}\n" for module in sorted(by_file)]
    before = {name for listed in _IMPORT.findall(text) for name in listed.split(", ")}
    names = set(_NAME.findall(text)) - before | {method.__name__ for method in METHODS.values()}
    text = _IMPORT.sub("", text).replace("from .recommended", "".join(imports) + "from .recommended", 1)
    listed = "".join(f'    "{name}",\n' for name in sorted(names, key=_as_ruff_sorts))
    return re.sub(r'(?<=__all__ = \[\n)(?:    "\w+",\n)*', listed, text)


def _as_ruff_sorts(name: str) -> tuple[bool, bool, str]:
    return not name.isupper(), not name[0].isupper(), name


if __name__ == "__main__":
    STUB.write_text(stub_text(), encoding="utf-8")
    SETTINGS.write_text(write_navigation(SETTINGS.read_text(encoding="utf-8")), encoding="utf-8")
