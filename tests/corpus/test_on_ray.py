"""Test a corpus on a local Ray cluster of two actors, where Ray is installed: `make test-ray`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from lens_mix import corpus
from tests.corpus.conftest import build, contents, draw_texts
from tests.corpus.test_job import METHODS, REDUCE
from tests.source_tree import ROOT

# A driver of its own, which can be killed. On a busy machine a worker needs long to import torch.
DRIVER = """
import sys, ray
from tests.corpus.test_on_ray import run
ray.init(address="local", num_cpus=2, object_store_memory=100_000_000, include_dashboard=False)
print(run(sys.argv[1], actors=2))
"""
LONGEST = 400


def run(out, **options):
    return corpus.run(build, draw_texts(120), METHODS, REDUCE, out, shard_size=3, **options)


def start(out):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "RAY_worker_register_timeout_seconds": str(LONGEST)}
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(out)], env=environment, cwd=ROOT)


def finished(out):
    return {path.name: path.stat().st_mtime_ns for path in (out / "maps").glob("[0-9]*")}


def test_two_actors_write_the_files_of_one_process_although_the_driver_was_killed(tmp_path):
    pytest.importorskip("ray.data")
    run(tmp_path / "one")
    out = tmp_path / "ray"
    driver, deadline = start(out), time.monotonic() + LONGEST
    while len(finished(out)) < 3:
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    before = finished(out)
    assert not (out / "finished.json").exists()
    assert start(out).wait(LONGEST) == 0
    after = finished(out)
    assert {name: after[name] for name in before} == before, "a finished shard was computed again"
    # A killed actor may leave a file under another name.
    found = {name: data for name, data in contents(out).items() if "/.lens_mix-" not in name}
    expected = contents(tmp_path / "one")
    assert found.keys() == expected.keys()
    for (number, method, one), (*same, two) in zip(
        corpus.maps(tmp_path / "one"), corpus.maps(out), strict=True
    ):
        assert [number, method] == same
        torch.testing.assert_close(one.scores, two.scores, atol=1e-5, rtol=0)
    if torch.get_num_threads() == 1:
        # Ray gives each actor one thread.
        assert found == expected
