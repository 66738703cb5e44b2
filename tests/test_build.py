"""Test the source distribution, and the wheel that is made from it alone.

    checkout -> sdist -> wheel made from the unpacked sdist -> a clean environment -> one map

A .pth file makes torch and TransformerLens of the tests' environment available in the clean environment.
lens_mix itself is installed there only from the wheel, and the result contains the path of its import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sysconfig.get_path("purelib")

pytestmark = pytest.mark.slow

# This runs in the clean environment. The tiny model is from the cookbook of the source distribution.
PROGRAM = """
import json, sys
import torch
import lens_mix as lm
from tiny import tiny_model

model = tiny_model(dtype=torch.float64)
mixing_map = lm.run(model, torch.tensor([[1, 7, 3, 9, 5]]), "value_zeroing")
print(json.dumps({
    "origin": lm.__file__,
    "hooks": sys.modules["lens_mix.hooks"].__file__,
    "shape": list(mixing_map.scores.shape),
    "row_sums": mixing_map.normalized().scores.sum(-1).flatten().tolist(),
    "causal": bool((mixing_map.scores.triu(1) == 0).all()),
    "page": lm.page(mixing_map).html.count("</script>"),
}))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Return the output of a command, or raise an error with everything that it printed."""
    # With the caller's PYTHONPATH, the checkout could be imported.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("build")


@pytest.fixture(scope="module")
def sdist(folder: Path) -> Path:
    """Return the folder of the checkout's source distribution, unpacked."""
    build = (sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", folder / "sdist")
    run(*build, ROOT, cwd=folder)
    (archive,) = (folder / "sdist").iterdir()
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(folder: Path, sdist: Path) -> Path:
    """Return the wheel, made from the unpacked source distribution in a folder outside the checkout."""
    build = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder / "wheel")
    run(*build, sdist, cwd=folder)
    (made,) = (folder / "wheel").iterdir()
    return made


def sources(root: Path, part: str) -> set[str]:
    """Return every source file of one folder, relative to the root; executed notebooks are records."""
    return {
        path.relative_to(root).as_posix()
        for path in (root / part).rglob("*")
        if path.is_file()
        and path.suffix != ".ipynb"
        and not any(part == "__pycache__" or part.startswith(".") for part in path.parts)
    }


@pytest.mark.parametrize("part", ["lens_mix", "hooks", "tests", "demos", "benchmarks", "docs/make"])
def test_the_sdist_holds_every_source_file(sdist: Path, part: str) -> None:
    assert sources(ROOT, part)
    assert sources(sdist, part) == sources(ROOT, part)


def test_the_sdist_holds_no_caches_and_no_links(sdist: Path) -> None:
    paths = list(sdist.rglob("*"))
    folders = [ROOT / part for part in ("lens_mix", "hooks", "tests", "demos", "docs", "benchmarks")]
    checkout = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    assert not [path for path in (*paths, *checkout) if path.is_symlink()]
    assert not [path for path in paths if path.name in ("__pycache__", "outputs", "dist")]
    hidden = {path.name for path in paths if path.name.startswith(".")}
    assert hidden <= {".gitignore", ".pre-commit-config.yaml"}
    assert sum(path.stat().st_size for path in paths if path.is_file()) < 13e6


def test_the_wheel_holds_the_library_and_nothing_beside_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert names == sources(ROOT, "lens_mix")


def test_the_wheel_runs_a_map_in_a_clean_environment(folder: Path, sdist: Path, wheel: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", folder / "clean", cwd=folder)
    python = folder / "clean" / "bin" / "python"
    (clean_packages,) = (folder / "clean").glob("lib/python*/site-packages")
    (clean_packages / "environment.pth").write_text(PACKAGES + "\n")
    # With --target, pip neither reads nor removes packages that are installed elsewhere.
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", "--target", clean_packages, wheel, cwd=folder)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    # With -P, Python searches neither the program's folder nor the working directory for modules.
    printed = run(python, "-P", program, cwd=folder, PYTHONPATH=str(sdist / "hooks"), HF_HUB_OFFLINE="1")
    result = json.loads(printed.splitlines()[-1])
    assert Path(result["origin"]) == clean_packages / "lens_mix" / "__init__.py"
    assert Path(result["hooks"]) == clean_packages / "lens_mix" / "hooks" / "__init__.py"
    assert result["shape"] == [3, 5, 5]
    assert result["row_sums"] == pytest.approx([1.0] * 15, abs=1e-12)
    assert result["causal"]
    assert result["page"] == 4
