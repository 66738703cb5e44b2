"""The package: its names, its floors, what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lens_mix as lm

ROOT = Path(__file__).parents[1]
# Who may import whom (docs/development.md): a file imports from its own floor or lower.
FLOORS = {
    "hooks": 0,
    "lens": 1,
    "maps": 1,
    "targets": 1,
    "methods": 2,
    "aggregation": 2,
    "statistics": 2,
    "graphs": 2,
    "citations": 3,
    "batches": 3,
    "runner": 3,
    "evaluation": 4,
    "view": 4,
    "cli": 5,
}
# Conveniences of the record that hand over to a higher floor, imported when called.
UPWARD = {("maps", "view"), ("maps", "graphs")}


def floor_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def imports_of(path: Path) -> set[tuple[str, bool]]:
    """(module of lens_mix, whether it is imported only for type checking)."""
    found = set()
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lens_mix"):
            names = [node.module] if node.module != "lens_mix" else [f"lens_mix.{a.name}" for a in node.names]
            found |= {(name, id(node) in guarded) for name in names}
        elif isinstance(node, ast.Import):
            found |= {(a.name, id(node) in guarded) for a in node.names if a.name.startswith("lens_mix.")}
    return found


def test_no_file_imports_from_a_higher_floor():
    broken = []
    for path in sorted((ROOT / "lens_mix").rglob("*.py")):
        own = path.relative_to(ROOT / "lens_mix").parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in FLOORS, f"{own}: on no floor"
        for module, for_types in imports_of(path):
            other = floor_of(module)
            if for_types or (own, other) in UPWARD:
                continue
            if FLOORS[other] > FLOORS[own]:
                broken.append(
                    f"{path.relative_to(ROOT)} (floor {FLOORS[own]}) imports {module} ({FLOORS[other]})"
                )
    assert not broken, "\n".join(broken)


def test_hooks_need_nothing_else_of_lens_mix():
    for path in (ROOT / "lens_mix" / "hooks").glob("*.py"):
        assert all(module.startswith("lens_mix.hooks") for module, _ in imports_of(path)), path


def test_the_top_level_hooks_are_a_link():
    link = ROOT / "hooks"
    assert link.is_symlink()
    assert link.resolve() == (ROOT / "lens_mix" / "hooks").resolve()


def test_every_public_name_is_there_and_documented():
    for name in lm.__all__:
        thing = getattr(lm, name)
        assert thing.__doc__ or isinstance(thing, dict), name
    assert set(lm.__all__) <= set(dir(lm))


@pytest.mark.parametrize("name", sorted(lm.METHODS))
def test_every_method_cites_its_paper(name):
    text = lm.citation(name)
    assert text.startswith("@")
    assert "title" in text
    assert "year" in text
    assert lm.METHODS[name].__doc__


def test_aggregations_are_cited():
    assert "Abnar" in lm.citation("rollout")


def test_importing_lens_mix_costs_little_beside_transformer_lens():
    """The bound is 0.3 s; the modules that would break it are named too, since a clock alone is noisy."""
    code = (
        "import transformer_lens, torch, sys, time; before = set(sys.modules); t = time.perf_counter();"
        "import lens_mix; spent = time.perf_counter() - t;"
        "print(spent); print(','.join(sorted({m.split('.')[0] for m in set(sys.modules) - before})))"
    )
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        spent, new = done.stdout.strip().splitlines()[-2:]
        runs.append(float(spent))
        assert not {"matplotlib", "scipy", "networkx", "pandas", "xarray"} & set(new.split(","))
        if runs[-1] <= 0.3:
            break
    assert min(runs) <= 0.3, runs
