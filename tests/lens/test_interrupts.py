"""Ctrl-C leaves nothing behind, whenever it comes (tests/lens/interrupts.py)."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from lens_mix.lens.changes import Changes
from tests.lens.interrupts import CALLS, LABELS, interrupted_everywhere
from tests.matrix import cases, slow
from tests.source_tree import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")
HERE = [case.label for case in cases() if case.label in LABELS]


@pytest.mark.parametrize("count", [60, slow(1000)])
@pytest.mark.parametrize("name", CALLS)
def test_at_moments_spread_over_the_call(name, count):
    came, left = interrupted_everywhere(name, HERE[0], count)
    assert left == []
    assert came > 0.9 * count


@pytest.mark.slow
@pytest.mark.parametrize("label", HERE)
@pytest.mark.parametrize("name", CALLS)
def test_real_signals(name, label):
    """In a process of its own: a signal may come after the call."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.lens.interrupts", name, "1000", label]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=True)
    assert "interrupted_by_signals 1000 0 " in done.stdout


def test_what_comes_while_a_change_is_made_waits_until_it_is_taken_back():
    done = []

    def change():
        signal.raise_signal(signal.SIGINT)
        done.append("made")
        return lambda: done.append("taken back")

    with pytest.raises(KeyboardInterrupt), Changes([change]):
        done.append("inside")
    assert done == ["made", "taken back"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_put_there_inside_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        with Changes([]):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
