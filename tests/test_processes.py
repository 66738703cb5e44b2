"""Test that equal calls in two processes have equal scores, to the last bit."""

import itertools
import json
import subprocess
import sys
import timeit

import pytest
import torch

import lens_mix as lm
from tests.tiny_models import bridge

METHODS = ["value_zeroing", "atb_ff_res_ln", "gim", lm.methods.Occlusion(replacements=[3])]


def find_scores() -> dict[str, list[float]]:
    """Return the last row of methods with large products, on a model whose products are large."""
    torch.set_num_threads(1)
    model = bridge("gpt2", n_embd=384, n_head=6, n_positions=128)
    prompt = torch.arange(64) % 30
    rows = lm.run(model, prompt, METHODS, queries=[-1], progress=None)
    whole = lm.run(model, prompt, "value_zeroing", progress=None)
    return {name: each.scores.flatten().tolist() for name, each in {**rows, "whole": whole}.items()}


@pytest.mark.once
def test_equal_calls_are_bit_equal_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    # No timing of the processor may choose an operation, so one process measures growing times and the other
    # one falling ones.
    command = (
        "import itertools, json, timeit; times = itertools.count(9, -1)\n"
        "timeit.repeat = lambda *args, **options: [next(times)]\n"
        "from tests.test_processes import find_scores; print(json.dumps(find_scores()))"
    )
    other = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert other.returncode == 0, other.stderr[-2000:]
    times = itertools.count(1)
    monkeypatch.setattr(timeit, "repeat", lambda *args, **options: [next(times)])
    assert json.loads(other.stdout.splitlines()[-1]) == find_scores()
