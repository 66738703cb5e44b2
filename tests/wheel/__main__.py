"""Install the wheel in clean environments and use it there: `make test-wheel`.

    wheel -> an environment without extras -> for each extra, an environment on top with this extra alone

Torch and the other dependencies are installed once, in the first environment. The others see its packages
through a .pth file, and two are tried at a time. Everything is in a temporary folder outside the checkout.
Only the standard library is used, so that any Python can run this file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
# This extra is for work on a checkout: the tests are not in the wheel.
OF_THE_CHECKOUT = "dev"
# What smoke.py imports beside the installed library.
PROGRAM = ("tests/wheel/smoke.py", "tests/demos/tiny_folder.py", "demos/models.py")


def main() -> None:
    """Try the wheel, and exit with an error if a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.wheel")
    parser.add_argument("--wheel", type=Path, help="a wheel that was built before; default: build one")
    parser.add_argument("--constraints", type=Path, help="a file for pip; default: the newest releases")
    options = parser.parse_args()
    version = ".".join(map(str, sys.version_info[:3]))
    releases = options.constraints or "the newest releases"
    print(f"== the wheel on Python {version}, with {releases}", flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(Path(folder), options.wheel, options.constraints)
    print(f"The wheel works on Python {version} ({time.perf_counter() - start:.0f} s).")


def try_wheel(folder: Path, wheel: Path | None, constraints: Path | None) -> None:
    """Make the environments in a folder, and run smoke.py in each."""
    for name in PROGRAM:
        shutil.copy(ROOT / name, folder)
    base = make_environment(folder / "base")
    pip = (sys.executable, "-m", "pip")
    if wheel is None:
        run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
        (wheel,) = folder.glob("*.whl")
    wheel = wheel.resolve()
    pinned = ("--constraint", constraints.resolve()) if constraints else ()
    install(base, wheel, *pinned)
    print(run_smoke(base, folder), end="", flush=True)

    def try_extra(extra: str) -> str:
        environment = make_environment(folder / f"with_{extra}", below=base)
        # pip takes the wheel in the environment below for installed, and its script would run there.
        install(environment, "--no-deps", "--ignore-installed", wheel)
        install(environment, *pinned, f"lens_mix[{extra}] @ {wheel.as_uri()}")
        return run_smoke(environment, folder, extra)

    with ThreadPoolExecutor(2) as pool:
        for output in pool.map(try_extra, extras()):
            print(output, end="", flush=True)


def extras() -> list[str]:
    """Return the extras of pyproject.toml that are for users of the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [name for name in project["optional-dependencies"] if name != OF_THE_CHECKOUT]


def make_environment(folder: Path, below: Path | None = None) -> Path:
    """Return an environment, without pip. It also sees the packages of the environment `below`, if given."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    if below is not None:
        (packages_of(folder) / "below.pth").write_text(f"{packages_of(below)}\n", encoding="utf-8")
    return folder


def packages_of(environment: Path) -> Path:
    """Return the folder of an environment's packages."""
    paths = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", "venv", paths))


def python_of(environment: Path) -> Path:
    """Return the Python of an environment."""
    scripts = sysconfig.get_path("scripts", "venv", {"base": str(environment)})
    return Path(scripts) / ("python.exe" if os.name == "nt" else "python")


def install(environment: Path, *arguments: str | Path) -> None:
    """Run `pip install` for an environment."""
    quiet = ("--quiet", "--quiet", "--no-compile", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip", "--python", python_of(environment), "install", *quiet)
    run(*pip, *arguments, cwd=environment)


def run_smoke(environment: Path, folder: Path, *installed: str) -> str:
    """Run smoke.py in an environment with the extras that are installed in it, and return what it prints."""
    title = f"-- {' '.join(installed) or 'no extra'}\n"
    return title + run(python_of(environment), "smoke.py", *installed, cwd=folder)


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return its output. If it fails, print the output and exit."""
    # With the caller's PYTHONPATH, the checkout could be imported. Nothing here needs a model hub.
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=kept | {"HF_HUB_OFFLINE": "1"},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}failed: {' '.join(map(str, command))}")
    return done.stdout


if __name__ == "__main__":
    main()
