"""Test a corpus on a local Ray cluster of two actors, where Ray is installed: `make test-ray`."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pytest
import torch

from lens_mix import corpus
from lens_mix.corpus import job, on_ray
from tests.corpus.conftest import build, contents, draw_texts
from tests.corpus.test_job import METHODS, REDUCE
from tests.source_tree import ROOT

# A driver of its own, which can be killed.
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
    # By default, the workers give way to all other processes, and may need minutes to import torch.
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "RAY_worker_niceness": "0"}
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(out)], env=environment, cwd=ROOT)


def finished(out):
    return {path.name: path.stat().st_mtime_ns for path in (out / "maps").glob("[0-9]*")}


def ask(out, prompts, methods="attention", reduce=None):
    """Return what an actor answers about the first shard, in this process."""
    made = job._make_job(build, prompts, methods, reduce, out)
    made.start()
    (shard,) = made.shards()
    actor = on_ray._Actor(pickle.loads(pickle.dumps(made.work)))
    (row,) = actor(pa.table({"shard": [pickle.dumps(shard)]})).to_pylist()
    return row


def test_an_actor_computes_a_shard(tmp_path):
    assert ask(tmp_path, draw_texts(5)) == {"prompts": 5, "problem": b""}
    assert len(list((tmp_path / "maps").iterdir())) == 1


def test_an_actor_returns_the_error_of_a_shard(tmp_path):
    reduce = {"heads": corpus.Mean(by=("layer", "head"))}
    problem = pickle.loads(ask(tmp_path, draw_texts(5), "attention", reduce)["problem"])
    with pytest.raises(ValueError, match=r"shard 0: every prompt failed .* with heads for 'head'"):
        raise problem


def test_wrong_arguments_of_a_cluster_are_errors(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="actors: expected a whole number, 1 or more, got 0"):
        run(tmp_path / "new", actors=0)
    with pytest.raises(ValueError, match="resources: expected None without actors="):
        run(tmp_path / "new", resources={"num_gpus": 1})
    with pytest.raises(TypeError, match=r'resources: expected options of map_batches.*, got "?1'):
        run(tmp_path / "new", actors=2, resources=1)
    with pytest.raises(ValueError, match="resources: expected no batch_size, compute, which lens_mix sets"):
        run(tmp_path / "new", actors=2, resources={"compute": 1, "batch_size": 4, "num_cpus": 1})
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'lens_mix\[ray\]'"):
        run(tmp_path / "new", actors=2)
    assert not (tmp_path / "new").exists()


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


def test_an_error_that_cannot_be_sent_becomes_text():
    class OfTheDriver(Exception):
        pass

    error = pickle.loads(on_ray._pickle_error(OfTheDriver("no memory")))
    assert isinstance(error, RuntimeError)
    assert str(error) == "OfTheDriver: no memory"
    assert isinstance(pickle.loads(on_ray._pickle_error(KeyError("name"))), KeyError)
