"""Make mutants of the core at random, and run the tests that `make test` has on each.

    python -m tests.mutants --number 40 --seed 0

A mutant is one change of the source: another comparison, operator, number or axis, or a `not` or statement
less. Each has its own copy of the source tree. The tests that mirror the changed file run first, then those
that mention it, the conformance table and the folder, until one fails. Each result is appended to a file of
JSON lines, from which a run that was stopped continues. Docstrings, annotations, errors and imports are not
changed.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    *("_algebra", "_blocks", "_passes", "_verification", "_inputs", "_model", "_care"),
    *("methods", "aggregation", "maps", "runner.py", "session.py", "map_prompts.py"),
)
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
AXES = {"query": "key", "key": "query", "head": "query", "layer": "head"}
# One process per test file would import torch each time. These are imported once, before a mutant's process.
COMMON = ("pytest", "torch", "transformers", "transformer_lens", "einops", "jaxtyping", "beartype", "pandas")
TABLE = "tests/test_conformance.py"
# These test what reads maps, not how they are computed.
OTHER_FOLDERS = ("view", "docs", "demos", "benchmarks", "serve", "corpus", "wheel")
# So many of the files that mention what was changed run.
MOST_FILES = 4


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: the file, the number of the change in it, the line, and the code before and after."""

    file: str
    index: int
    line: int
    kind: str
    before: str
    after: str

    @property
    def name(self) -> str:
        """The change in one line."""
        return f"{self.file}:{self.line} {self.kind}: {self.before} -> {self.after}"


# ---------------------------------------------------------------------------------------------------- changes


def changes_of(tree: ast.Module) -> Iterator[tuple[str, ast.AST, Callable[[], None]]]:
    """Yield the possible changes of a file: the kind, the node to show, and a function that changes it."""
    for parent in _running_nodes(tree):
        if isinstance(parent, ast.Compare) and type(parent.ops[0]) in COMPARISONS:
            yield "comparison", parent, _setter(parent.ops, 0, COMPARISONS[type(parent.ops[0])]())
        if isinstance(parent, ast.BinOp) and type(parent.op) in OPERATORS and not _is_of_types(parent):
            yield "operator", parent, _setter(parent, "op", OPERATORS[type(parent.op)]())
        if isinstance(parent, ast.BoolOp):
            other = ast.Or() if isinstance(parent.op, ast.And) else ast.And()
            yield "operator", parent, _setter(parent, "op", other)
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not | ast.USub):
            operand = parent.operand
            if not isinstance(operand, ast.Constant):
                without = ast.UnaryOp(ast.UAdd(), operand) if isinstance(parent.op, ast.USub) else None
                made = without or ast.Call(ast.Name("bool", ast.Load()), [operand], [])
                yield "sign or not", parent, _replacer(tree, parent, made)
        if isinstance(parent, ast.Constant) and type(parent.value) in (int, float, bool):
            value = not parent.value if isinstance(parent.value, bool) else parent.value + 1
            yield "constant", parent, _setter(parent, "value", value)
        if isinstance(parent, ast.Constant) and isinstance(parent.value, str):
            words = parent.value.split()
            if "->" in words or (len(words) > 1 and set(words) <= {*AXES, "batch", "..."}):
                place = next((i for i, word in reversed([*enumerate(words)]) if word in AXES), None)
                if place is not None:
                    words[place] = AXES[words[place]]
                    yield "axis", parent, _setter(parent, "value", " ".join(words))
        for body in [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]:
            for place, statement in enumerate(body if isinstance(body, list) else []):
                if isinstance(statement, ast.Expr | ast.AugAssign) and not _is_text(statement):
                    yield "statement", statement, _setter(body, place, ast.Pass())


def _running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run and are not of an error, in the order of the source."""
    yield tree
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        if isinstance(tree, ast.ClassDef) and field == "keywords":
            continue
        for child in value if isinstance(value, list) else [value]:
            skipped = ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert
            if isinstance(child, ast.AST) and not isinstance(child, skipped) and not _is_text(child):
                yield from _running_nodes(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_of_types(node: ast.BinOp) -> bool:
    """Return whether it is a union of classes, as in `int | None`."""
    return isinstance(node.op, ast.BitOr) and any(
        isinstance(side, ast.Constant) or (isinstance(side, ast.Name) and side.id[:1].isupper())
        for side in (node.left, node.right)
    )


def _setter(owner: Any, place: Any, value: Any) -> Callable[[], None]:
    def change() -> None:
        if isinstance(owner, list):
            owner[place] = value
        else:
            setattr(owner, place, value)

    return change


def _replacer(tree: ast.AST, old: ast.AST, new: ast.AST) -> Callable[[], None]:
    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is old else self.generic_visit(node)

    return lambda: Replace().visit(tree)


def mutate(source: str, index: int, file: str = "") -> tuple[Mutant, str]:
    """Return one mutant of a file, and its source."""
    tree = ast.parse(source)
    kind, node, change = list(changes_of(tree))[index]
    before = ast.unparse(node)
    line = getattr(node, "lineno", 0)
    change()
    ast.fix_missing_locations(tree)
    after = "pass" if kind == "statement" else ast.unparse(node)
    after = after if after != before else "without it"
    return Mutant(file, index, line, kind, before, after), ast.unparse(tree)


def draw(number: int, seed: int) -> list[Mutant]:
    """Return mutants of the core, each possible change with the same probability."""
    files = sorted(file for room in ROOMS for file in _python_files(ROOT / "lens_mix" / room))
    places = []
    for file in files:
        count = sum(1 for _ in changes_of(ast.parse(file.read_text(encoding="utf-8"))))
        places += [(file, index) for index in range(count)]
    chosen = random.Random(seed).sample(places, number)
    names = [(file, str(file.relative_to(ROOT)), index) for file, index in chosen]
    return [mutate(file.read_text(encoding="utf-8"), index, name)[0] for file, name, index in names]


def _python_files(place: Path) -> list[Path]:
    return [place] if place.is_file() else list(place.rglob("*.py"))


# ------------------------------------------------------------------------------------------------------- runs


def stages_of(mutant: Mutant) -> list[list[str]]:
    """Return the tests to run: files that mirror the changed one or mention it, the table, the folder."""
    path = Path(mutant.file).relative_to("lens_mix")
    source = ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))
    scopes = [node for node in ast.walk(source) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    around = [node.name for node in scopes if node.lineno <= mutant.line <= (node.end_lineno or 0)]
    words = [*around, *(node.name for node in scopes if isinstance(node, ast.ClassDef)), path.stem]
    mirror = ROOT / "tests" / path.parent / f"test_{path.name}"
    mentions = {file: _count_mentions(file, words) for file in sorted((ROOT / "tests").rglob("test_*.py"))}
    files = sorted((file for file in mentions if mentions[file]), key=mentions.__getitem__)
    chosen = [file for file in dict.fromkeys([mirror, *files[::-1]]) if file.exists()][:MOST_FILES]
    own = [str(file.relative_to(ROOT)) for file in chosen]
    folder = f"tests/{path.parent}"
    return [[file for file in own if file != TABLE], [TABLE], [folder] * (folder != "tests/.")]


def _count_mentions(file: Path, words: Sequence[str]) -> int:
    """Return how often a file of tests mentions what was changed; the innermost names count most."""
    if file.relative_to(ROOT / "tests").parts[0] in OTHER_FOLDERS:
        return 0
    found = Counter(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    return sum(found[word] for word in dict.fromkeys(words) if not word.startswith("__"))


def run_tests(copy: Path, tests: list[str], seconds: int, report: Any) -> None:
    """Run tests on a copy of the tree in this process, and send the name of the first that fails."""
    import pytest

    failed: list[str] = []

    class Reporter:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.append(report.nodeid)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                failed.append(report.nodeid)

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    os.chdir(copy)
    # The tests and the library are those of the copy, here and in the processes that a test starts.
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(place for place in sys.path if place not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "lens_mix")]:
        del sys.modules[name]
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        code = pytest.main(["-x", "-q", "-m", "not slow", *tests], plugins=[Reporter()])
    import lens_mix

    assert lens_mix.__file__ is not None
    assert Path(lens_mix.__file__).is_relative_to(copy)
    report.send((int(code), failed[:1]))


def examine(mutant: Mutant, seconds: int) -> dict[str, str]:
    """Return what the tests say of one mutant."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        kept_out = shutil.ignore_patterns(".*", "outputs", "site", "__pycache__", "shared")
        shutil.copytree(ROOT, copy, ignore=kept_out, symlinks=True)
        _, source = mutate((ROOT / mutant.file).read_text(encoding="utf-8"), mutant.index, mutant.file)
        (copy / mutant.file).write_text(source, encoding="utf-8")
        for tests in stages_of(mutant):
            if not tests:
                continue
            # A fork has the imports of this process, which has none of the library.
            context = multiprocessing.get_context("fork")
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=run_tests, args=(copy, tests, seconds, sender))
            process.start()
            sender.close()
            try:
                code, failed = receiver.recv()
            except EOFError:
                process.join()
                return {"result": "stopped", "by": f"exit code {process.exitcode} in {' '.join(tests[:3])}"}
            process.join()
            # Code 2 says that tests could not be collected.
            if code in (1, 2):
                return {"result": "killed", "by": failed[0] if failed else f"pytest's code {code}"}
            # Code 5 says that the fast tier has no test of these files.
            if code not in (0, 5):
                return {"result": "stopped", "by": f"pytest's code {code} in {' '.join(tests[:3])}"}
    return {"result": "survived", "by": ""}


def main() -> None:
    """Examine the mutants that a file of results does not have, and print a table of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=40, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="the seed with which they are drawn")
    parser.add_argument("--seconds", type=int, default=600, help="the processor time of one run of tests")
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "mutants.jsonl")
    parser.add_argument("--list", action="store_true", help="print the mutants without running tests")
    options = parser.parse_args()
    mutants = draw(options.number, options.seed)
    if options.list:
        print("\n".join(mutant.name for mutant in mutants))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    lines = options.results.read_text(encoding="utf-8").splitlines() if options.results.exists() else []
    results = {entry["name"]: entry for entry in map(json.loads, lines)}
    for name in COMMON:
        __import__(name)
    for mutant in mutants:
        if mutant.name not in results:
            results[mutant.name] = {"name": mutant.name, **examine(mutant, options.seconds)}
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(results[mutant.name]) + "\n")
        entry = results[mutant.name]
        print(f"{entry['result']:<9} {entry['name']}  {entry['by']}", flush=True)
    found = [results[mutant.name]["result"] for mutant in mutants]
    print(f"{found.count('killed')} of {len(found)} killed")


if __name__ == "__main__":
    main()
