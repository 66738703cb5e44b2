"""Test a corpus on a local Ray cluster, where Ray is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lens_mix import corpus
from tests.corpus.conftest import build, contents, draw_texts
from tests.corpus.test_job import METHODS, REDUCE
from tests.source_tree import ROOT

ray = pytest.importorskip("ray")

DRIVER = """
import sys, ray
from tests.corpus.test_on_ray import run_actors
ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
run_actors(sys.argv[1])
"""


def run_actors(out):
    return corpus.run_on_ray(build, draw_texts(60), METHODS, REDUCE, out, actors=2, shard_size=4)


def test_two_actors_write_the_files_of_one_process_also_after_the_driver_was_killed(tmp_path):
    corpus.run(build, draw_texts(60), METHODS, REDUCE, tmp_path / "one", shard_size=4)
    expected, out = contents(tmp_path / "one"), tmp_path / "ray"
    command = [sys.executable, "-c", DRIVER, str(out)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    driver = subprocess.Popen(command, env=environment, cwd=ROOT)
    deadline = time.monotonic() + 400
    while len(list((out / "maps").glob("[0-9]*"))) < 3 and driver.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert not (out / "finished.json").exists()
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=400)
    found = contents(out)
    assert {name: data for name, data in found.items() if "/.lens_mix-" not in name} == expected
