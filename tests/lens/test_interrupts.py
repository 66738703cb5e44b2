"""Ctrl-C leaves nothing behind, whenever it comes (tests/lens/interrupts.py)."""

from __future__ import annotations

import signal
import subprocess
import sys
import weakref

import pytest

from lens_mix.lens.changes import Changes
from tests.lens.interrupts import CALLS, LABELS
from tests.matrix import cases, slow
from tests.source_tree import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")


def builds(case):
    """Whether this release has the model."""
    try:
        case.build()
    except pytest.skip.Exception:
        return False
    return True


HERE = [case.label for case in cases() if case.label in LABELS and builds(case)]


# A thousand of each, as was measured once, takes a quarter of an hour.
@pytest.mark.parametrize("count", [slow(100)])
def test_nothing_is_left(count):
    labels = HERE[:1] if count < 1000 else HERE
    command = [sys.executable, "-W", "ignore", "-m", "tests.lens.interrupts", str(count), ",".join(labels)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7200, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(CALLS) * len(labels)
    for line in lines:
        called, _, found = line.partition(": ")
        way, left = found.split(", left ")
        assert left in ("0", "[]"), line
        assert int(way.split()[1]) > 0.9 * count, called


@pytest.fixture
def usual_handler():
    """Python's own, which a process that a shell starts in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_comes_while_a_change_is_made_waits_until_it_is_taken_back(usual_handler):
    done = []

    def change():
        signal.raise_signal(signal.SIGINT)
        done.append("made")
        return lambda: done.append("taken back")

    with pytest.raises(KeyboardInterrupt), Changes([change]):
        done.append("inside")
    assert done == ["made", "taken back"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_comes_where_python_drops_exceptions_is_not_lost(usual_handler):
    """As in the callback of a WeakSet, which is of this module."""
    names = {
        "__name__": weakref.WeakSet.__module__,
        "raise_signal": signal.raise_signal,
        "number": signal.SIGINT,
    }
    exec("def removed(reference): raise_signal(number)", names)
    held = [Changes([])]
    reference = weakref.ref(held[0], names["removed"])
    with pytest.raises(KeyboardInterrupt), Changes([]):
        held.clear()
    assert reference() is None


def test_a_handler_put_there_inside_stays(usual_handler):
    with Changes([]):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
