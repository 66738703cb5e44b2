"""Test that the generated reference has every public name once."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

import lens_mix as lm
from docs.make import reference
from tests.source_tree import ROOT

# No constant: two public names have the same object only if one is imported from the other.
CONSTANTS = (str, dict)


@pytest.fixture(scope="module", name="pages")
def written() -> dict[str, str]:
    return reference.write_pages()


def public_paths() -> dict[str, object]:
    """Return all public names, with their full path, once per object."""
    modules = {name: getattr(lm, name) for name in lm.__all__ if inspect.ismodule(getattr(lm, name))}
    paths = {f"lens_mix.{name}": getattr(lm, name) for name in lm.__all__ if name not in modules}
    known = {id(thing) for thing in paths.values()}
    for name, module in modules.items():
        things = {f"lens_mix.{name}.{each}": getattr(module, each) for each in module.__all__}
        paths |= {path: thing for path, thing in things.items() if id(thing) not in known}
    return paths


def directives(pages: dict[str, str]) -> list[str]:
    return re.findall(r"^::: (\S+)$", "\n".join(pages.values()), re.MULTILINE)


def test_every_public_name_is_in_the_reference_once(pages):
    found = directives(pages)
    assert sorted(set(found)) == sorted(found)
    objects = [reference.find(path) for path in found]
    described = [id(thing) for thing in objects if not isinstance(thing, CONSTANTS)]
    assert len(set(described)) == len(described)
    missing = [
        path for path, thing in public_paths().items() if path not in found and id(thing) not in described
    ]
    assert missing == []


def test_a_function_with_the_name_of_its_module_is_not_taken_for_the_module(pages):
    assert [path for path in directives(pages) if path in sys.modules] == []
    (options,) = re.findall(
        r"^::: lens_mix\.experiments\.head_importance\.head_importance\n((?: .*\n)+)",
        "\n".join(pages.values()),
        re.MULTILINE,
    )
    assert 'heading: "lens_mix.experiments.head_importance"' in options


def test_the_index_has_every_name_with_its_first_line(pages):
    row = r"^\| \[`[\w.]+`\]\((\w+\.md)#([\w.]+)\) \| .+ \|$"
    listed = re.findall(row, pages["index.md"], re.MULTILINE)
    assert len(listed) > 100
    for page, path in listed:
        assert f"::: {path}\n" in pages[page]
    others = {path for name, text in pages.items() if "/" not in name for path in directives({name: text})}
    assert others - {path for _, path in listed} == set()


def test_a_public_name_on_no_page_is_an_error(monkeypatch):
    monkeypatch.setattr(lm, "__all__", [*lm.__all__, "brand_new"])
    with pytest.raises(LookupError, match="got none of \\['brand_new'\\]"):
        reference.write_pages()


def test_the_navigation_has_every_page(pages):
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"- reference/(\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(pages) == sorted(reference.list_pages())


def test_the_generator_writes_the_same_again_and_deletes_what_is_no_page(pages, tmp_path: Path):
    (tmp_path / "removed.md").write_text("# A page that was removed\n")
    reference.write(tmp_path)
    files = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*.md")}
    assert {name: path.read_text(encoding="utf-8") for name, path in files.items()} == pages
    times = {name: path.stat().st_mtime_ns for name, path in files.items()}
    reference.write(tmp_path)
    assert {name: path.stat().st_mtime_ns for name, path in files.items()} == times
