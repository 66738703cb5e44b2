"""Run the demo of attention flow on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lens_mix.graphs import load_graph
from tests.demos.tiny_folder import save_tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_prints_what_it_found_and_writes_what_it_says(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "llama")
    command = [
        sys.executable,
        "demos/flow.py",
        "--model",
        str(tmp_path / "llama"),
        "--outputs",
        str(tmp_path / "out"),
    ]
    command += ["--prompt", "My grandmother was born in Italy"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    written = [Path(line.strip()) for line in done.stdout.split("Written:")[1].splitlines() if line.strip()]
    assert sorted(path.name for path in written) == [
        "flow_graph_attention.graphml",
        "flow_graph_attention.png",
        "flow_graph_value_zeroing.graphml",
        "flow_graph_value_zeroing.png",
        "flow_sources.png",
    ]
    assert all(path.stat().st_size > 500 for path in written)
    assert load_graph(tmp_path / "out" / "flow_graph_attention.graphml").graph["target"]
    for text in ("attention: flow of", "value zeroing, flow, receptive field", "on the first token"):
        assert text in done.stdout
