"""Read the library's files with `ast`: their imports, and what they store at module level."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "lens_mix"

# An import runs with the file, or when a function is called, or it is for type checkers only.
When = Literal["module", "function", "types"]


@dataclasses.dataclass(frozen=True)
class Import:
    """An import of one of the library's files in another, as module names ("_verification.verify")."""

    importer: str
    imported: str
    when: When
    function: str = ""

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}" + (f" in {self.function}()" if self.function else "")


def module_name(path: Path) -> str:
    """Return a module's name in lens_mix ("_verification.verify"); the package's for `__init__.py`."""
    parts = path.relative_to(LIBRARY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the parsed file of each module by the module's name."""
    return {module_name(path): ast.parse(path.read_text()) for path in sorted(LIBRARY.rglob("*.py"))}


@functools.cache
def imports() -> tuple[Import, ...]:
    """Return all imports between files of the library."""
    return tuple(
        Import(importer, imported, when, function)
        for importer, tree in trees().items()
        for node, when, function in _import_statements(tree, "module", "")
        for imported in _files_of(node)
    )


def _import_statements(
    parent: ast.AST, when: When, function: str
) -> Iterator[tuple[ast.Import | ast.ImportFrom, When, str]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, when, function
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and when == "module":
            yield from _import_statements(node, "function", node.name)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _import_statements(node, "types", function)
        else:
            yield from _import_statements(node, when, function)


def _files_of(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Return the files of one statement: maps.words for `from lens_mix.maps import words`."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    else:
        modules = [
            f"{node.module}.{alias.name}" if _below(f"{node.module}.{alias.name}") in trees() else node.module
            for alias in node.names
            if node.module
        ]
    for module in dict.fromkeys(modules):
        if module.split(".")[0] == "lens_mix":
            yield _below(module)


def _below(module: str) -> str:
    return module.removeprefix("lens_mix").removeprefix(".")


_MUTATORS = frozenset(
    "add append appendleft clear discard extend insert pop popitem remove setdefault update".split()
)


_CACHES = frozenset({"cache", "lru_cache"})


def module_level_stores(tree: ast.Module) -> list[str]:
    """Return the names at module level whose values the file's code changes later, and so outlive a call.

    Functions that cache their results are included, and instances of the file's classes that change.
    """
    assigned = dict(_assignments(tree.body))
    cached = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _is_cached(node)}
    changing = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and _changes_itself(node)}
    stores = changing | _CACHES
    changed = {name for name, value in assigned.items() if _is_weak(value) or _called(value) in stores}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                changed |= set(node.names)
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                changed |= {ast.unparse(node.value)}
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _MUTATORS
            ):
                changed |= {ast.unparse(node.func.value)}
    return sorted((assigned.keys() & changed) | cached)


def _assignments(statements: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    for statement in statements:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement.value


def _is_weak(value: ast.expr | None) -> bool:
    """Return whether a value is a weak dictionary or set, which is a store by its nature."""
    return "Weak" in _called(value)


def _called(value: ast.expr | None) -> str:
    """Return the last name of a called function, "cache" for `functools.cache(f)`; "" if it is no call."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Call):  # As in lru_cache(maxsize=8)(f).
        value = value.func
    return ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""


def _is_cached(function: ast.FunctionDef) -> bool:
    names = {_called(each) or ast.unparse(each).split(".")[-1] for each in function.decorator_list}
    return bool(names & _CACHES)


def _changes_itself(node: ast.ClassDef) -> bool:
    """Return whether a method other than `__init__` assigns to an attribute."""
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name != "__init__"]
    parts = (part for method in methods for part in ast.walk(method))
    return any(isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load) for part in parts)
