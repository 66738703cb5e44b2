"""Test the Space: its app starts, and its files name the same releases and the same model.

`make test-space` runs this file. Elsewhere gradio is not installed, and only the files are tested. The app
itself is tested in tests/test_app.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.demos.tiny_folder import save_tiny_llama

ROOT = Path(__file__).parents[2]
SPACE = ROOT / "demos" / "space"

pytestmark = pytest.mark.once


def test_the_app_of_the_space_starts_with_its_limits(tmp_path: Path) -> None:
    client = pytest.importorskip("gradio_client", reason="no gradio: make test-space")
    settings = {"LENS_MIX_MODEL": str(save_tiny_llama(tmp_path / "llama")), "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, SPACE / "app.py"],
        env={**os.environ, **settings, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as app:
        try:
            (address,) = re.findall(r"http://127\.0\.0\.1:\d+", "".join(_read_until_address(app)))
            asked = client.Client(address, verbose=False)
            frame, text = asked.predict("My grandmother was born in", "", [], False, api_name="/map")
            assert frame.startswith("<iframe ")
            assert "\ninput_map, by " in text
            with pytest.raises(client.exceptions.AppError, match="and the limit is 64"):
                asked.predict("My grandmother " * 40, "", [], False, api_name="/map")
        finally:
            app.terminate()


def _read_until_address(app: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines that the app prints, up to its address; all of them if it ends before."""
    assert app.stdout is not None
    for line in app.stdout:
        yield line
        if "http://" in line:
            return


def test_the_requirements_are_the_librarys_and_gradio() -> None:
    lines = [line for line in (SPACE / "requirements.txt").read_text().splitlines() if line[0] not in "#-"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = re.compile(r"[\w-]+")
    library = {d for d in project["dependencies"] if not d.startswith("transformer-lens")}
    assert library <= set(lines)
    assert {name.match(line)[0] for line in lines} == {
        "gradio",
        *(name.match(each)[0] for each in project["dependencies"]),
    }


def test_the_header_names_the_files_and_versions_of_the_space() -> None:
    header = (SPACE / "README.md").read_text(encoding="utf-8").split("---")[1]
    fields = dict(re.findall(r"^(\w+): (.+)$", header, re.MULTILINE))
    assert fields["sdk"] == "gradio"
    assert f"gradio=={fields['sdk_version']}\n" in (SPACE / "requirements.txt").read_text()
    assert f"gradio=={fields['sdk_version']}\n" in (ROOT / "constraints" / "space.txt").read_text()
    assert (SPACE / fields["app_file"]).exists()
    # The hub refuses longer ones.
    assert len(fields["short_description"]) <= 60
    (model,) = re.findall(r"^  - (.+)$", header, re.MULTILINE)
    assert f'MODEL = "{model}"' in (SPACE / "app.py").read_text(encoding="utf-8")
