"""Write what is made from the classes of the methods and kept by git, for `make stub`.

It is `lens_mix/methods/__init__.pyi`, `lens_mix/methods/listed.json`, the navigation in `mkdocs.yml`, and the
pages of docs/methods.
"""

from __future__ import annotations

import json
from pathlib import Path

from docs.make.methods import write_navigation, write_pages
from lens_mix.methods import METHODS
from lens_mix.registry import describe, list_names

ROOT = Path(__file__).parents[1]
STUB = ROOT / "lens_mix" / "methods" / "__init__.pyi"
LISTED = STUB.with_name("listed.json")
SETTINGS = ROOT / "mkdocs.yml"


def stub_text() -> str:
    """Return the stub with an import and a public name for every method."""
    by_file: dict[str, list[str]] = {}
    for method in METHODS.values():
        by_file.setdefault(method.__module__.removeprefix("lens_mix.methods"), []).append(method.__name__)
    imports = [f"from {module} import {', '.join(sorted(by_file[module]))}\n" for module in sorted(by_file)]
    names = "".join(f'    "{name}",\n' for name in sorted(method.__name__ for method in METHODS.values()))
    head = "from lens_mix.method import Method\n\n" + "".join(imports)
    return f'{head}\nMETHODS: dict[str, type[Method]]\n\n__all__ = [\n    "METHODS",\n{names}]\n'


def listed_text() -> str:
    """Return what lists say of `input_map` and of each method, in their order, as JSON: name, group, line."""
    names = [name for name in list_names() if name in METHODS or name == "input_map"]
    rows = [json.dumps([name, *describe(name)[:2]], ensure_ascii=False) for name in names]
    return "[\n  " + ",\n  ".join(rows) + "\n]\n"


if __name__ == "__main__":
    STUB.write_text(stub_text(), encoding="utf-8")
    LISTED.write_text(listed_text(), encoding="utf-8")
    SETTINGS.write_text(write_navigation(SETTINGS.read_text(encoding="utf-8")), encoding="utf-8")
    write_pages()
