"""Test that the tour runs from the first cell to the last, and can be converted to a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.demos.tiny_folder import save_tiny_llama

TOUR = Path(__file__).parents[2] / "demos" / "tour.py"


@pytest.mark.slow
def test_the_tour_runs_on_a_tiny_model(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "LENS_MIX_MODEL": str(save_tiny_llama(tmp_path / "llama", context=128)),
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(
        [sys.executable, str(TOUR)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    for said in (
        "predicts",
        "verification for",
        "MixingMap(value_zeroing",
        "by attention",
        "without '",
        "True",
        "annual report:",
        "@inproc",
    ):
        assert said in done.stdout
    assert "padding is masked" in done.stdout


def test_jupytext_reads_it_as_a_notebook() -> None:
    import jupytext

    notebook = jupytext.read(TOUR)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds.count("code") >= 10
    assert kinds.count("markdown") >= 8
    assert notebook.cells[0].source.startswith("# A tour of lens_mix")
