"""Test that names that only one file uses have an underscore, and that other names have none."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import lens_mix as lm
from tests.source_tree import LIBRARY, ROOT

# Tests may use private names, so a use in a test does not make a name public.
READERS = ("lens_mix", "demos", "benchmarks", "hooks")
# Users call the functions of these modules: formulas of papers, tables, and their figures.
FOR_USERS = ("methods", "experiments", "tables")
CALLED_FROM_OUTSIDE = {
    "cli.serve": "a command",
    "_algebra.definitions.head_parts": "a definition, with which tests compare the algebra",
    "_algebra.logit_shares.through_unembedding": "returns the directions that two formulas take",
    "testing.CHECKS": "the conformance table runs them on more models",
    "testing.MethodCheck": "the conformance table runs it on unusual models",
    "testing.check_refusal": "the conformance table runs it on more models",
}


def test_what_a_file_keeps_to_itself_has_an_underscore():
    files = {
        path: ast.parse(path.read_text()) for folder in READERS for path in (ROOT / folder).rglob("*.py")
    }
    wanted = {path: set(_names_wanted(tree)) for path, tree in files.items()}
    readers = Counter(name for names in wanted.values() for name in names)
    kept = {
        f"{_module(path)}.{name}"
        for path, tree in files.items()
        if path.is_relative_to(LIBRARY)
        for name in _kept_to_itself(tree, lambda name, own=wanted[path]: readers[name] > (name in own))
        if name not in {*dir(lm), *dir(lm.hooks), *dir(lm.methods)}
        and not (str(path.relative_to(LIBRARY)).startswith(FOR_USERS) and name.islower())
        # Every row of the table of components has a name, whether another file uses it or not.
        and not (path.stem == "components" and name.isupper())
        # pyproject.toml names the adapters, and TransformerLens reads them there.
        and not (path.stem == "adapters" and name.endswith("ArchitectureAdapter"))
    }
    assert kept == set(CALLED_FROM_OUTSIDE)


def test_the_rule_finds_one():
    tree = ast.parse("Size = int\nShape = int\nLIMIT = 3\n_HIDDEN = 4\ndef area(shape: Shape) -> int: ...\n")
    assert list(_kept_to_itself(tree, lambda name: name == "area")) == ["Size", "LIMIT"]


def _module(path: Path) -> str:
    return ".".join(path.relative_to(LIBRARY).with_suffix("").parts)


def _kept_to_itself(tree: ast.Module, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    met = {*_in_signatures(tree), *_all_of(tree)}
    for name in _defined(tree):
        if not (name.startswith("_") or name in met or is_wanted(name)):
            yield name


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _names_wanted(tree: ast.Module) -> Iterator[str]:
    """Yield the names that are imported, read from a module, or named in a string (monkeypatch)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def _in_signatures(tree: ast.Module) -> Iterator[str]:
    """Yield the names in annotations and base classes of public names, because users see them."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield from _annotations(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (name for base in node.bases for name in _read(base))
            for part in node.body:
                if isinstance(part, ast.AnnAssign):
                    yield from _read(part.annotation)
                elif isinstance(part, ast.FunctionDef):
                    yield from _annotations(part)


def _annotations(function: ast.FunctionDef) -> Iterator[str]:
    arguments = function.args
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    hints = [each.annotation for each in every if each is not None] + [function.returns]
    yield from (name for hint in hints if hint is not None for name in _read(hint))


def _read(expression: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(expression) if isinstance(node, ast.Name))


def _all_of(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(each) == "__all__" for each in node.targets):
            yield from (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
            yield "__all__"
