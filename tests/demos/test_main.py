"""Run the main demo on a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.demos.tiny_folder import save_tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("main")
    save_tiny_llama(folder / "llama")
    command = [
        sys.executable,
        "demos/main.py",
        "--model",
        str(folder / "llama"),
        "--outputs",
        str(folder / "out"),
    ]
    command += ["--prompt", "My grandmother was born in Italy"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "out"


def test_prints_the_paths_of_the_pictures_that_it_wrote(printed: tuple[str, Path]) -> None:
    text, folder = printed
    pictures = sorted(folder.glob("*.png"))
    names = ["attention_layers", "last_position", "sources", "value_zeroing_layers"]
    assert [picture.name for picture in pictures] == [f"prompt_{name}.png" for name in names]
    assert all(str(picture) in text for picture in pictures)
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert text.rstrip().endswith(str(folder / "page.html"))
    assert "<!DOCTYPE html>" in (folder / "page.html").read_text(encoding="utf-8")


def test_prints_the_top_sources_of_every_row(printed: tuple[str, Path]) -> None:
    lines = [
        line
        for line in printed[0].splitlines()
        if re.match(r"  (input map|attention|value zeroing)[ ,].* \d\.\d{3}", line)
    ]
    assert len(lines) == 13
    assert lines[0].startswith("  input map (")
    for line in lines:
        shares = [float(share) for share in re.findall(r" (\d\.\d{3})", line)]
        assert len(shares) == 5
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1.003
    dropped = [line for line in lines if "first token dropped" in line]
    assert len(dropped) == 4
    assert not any("<s>" in line for line in dropped)


def test_prints_the_largest_source_of_every_layer(printed: tuple[str, Path]) -> None:
    tail = printed[0].split("layer by layer")[1]
    for method in ("attention", "value zeroing"):
        entries = re.search(rf"^  {method} +(0.*)$", tail, re.MULTILINE)
        assert entries
        assert re.search(r"(^|–|  )2 ", entries[1])


def test_names_the_tokens_that_the_model_goes_on_with(printed: tuple[str, Path]) -> None:
    assert re.search(r"^  prediction after ' Italy': '.+' 0\.\d\d$", printed[0], re.MULTILINE)
