"""Test that a signal handler that raises leaves no change on the model (tests/_care/interrupts.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import lens_mix as lm
from lens_mix._care.changes import Changes
from lens_mix._care.signals import HeldSignals
from tests import tiny_models
from tests._care.interrupts import CALLS, LABELS, SIGNALS, Came, raise_came
from tests.matrix import cases, slow
from tests.source_tree import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")


HERE = [case.label for case in cases() if case.label in LABELS]


# A thousand interruptions of each kind, as in one measurement, take a quarter of an hour.
# The slow calls are in two cases, so that two processes can share them.
@pytest.mark.parametrize(
    ("count", "names"),
    [
        (8, ["run", "first_run"]),
        slow(20, ["run", "first_run"]),
        slow(25, [*CALLS][::2]),
        slow(25, [*CALLS][1::2]),
    ],
)
def test_nothing_is_left(count, names):
    labels = HERE[:1] if count < 1000 else HERE
    command = [sys.executable, "-W", "ignore", "-m", "tests._care.interrupts", str(count), ",".join(labels)]
    done = subprocess.run(
        [*command, *names], cwd=ROOT, capture_output=True, text=True, timeout=7200, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * len(names) * len(labels)
    for line in lines:
        called, _, found = line.partition(": ")
        way, left = found.split(", left ")
        assert left in ("0", "[]"), line
        assert int(way.split()[1]) > 0.9 * count, called


@pytest.fixture
def usual_handler():
    """Install Python's own handler, which is missing in a process that a shell starts in the background."""
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
    """Send a signal in the callback of a WeakSet, whose exceptions Python ignores."""
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


# ------------------------------------------------------------------ exceptions of handlers


@pytest.mark.parametrize("kind", [TimeoutError, RuntimeError, ValueError])
def test_what_a_handler_raises_is_no_error_of_the_model(kind):
    """Check that the call raises the handler's exception itself, with the place where the signal came."""

    def ring(number, frame):
        raise kind("too late")

    def fail_to_notice():
        try:
            signal.raise_signal(signal.SIGALRM)
        except Exception:
            done.append("swallowed")

    done, before = [], signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(kind, match=r"^too late$") as raised, Changes([]), Changes([]):
            fail_to_notice()
        assert not done
        assert [frame.name for frame in raised.traceback][-1] == "ring"
        assert "fail_to_notice" in [frame.name for frame in raised.traceback]
        with pytest.raises(kind, match=r"^too late$"), Changes([]):
            signal.raise_signal(signal.SIGALRM)
        # Outside a run it is an exception like any other.
        fail_to_notice()
        assert done == ["swallowed"]
        assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("place", ["inside a hook of a short pass", "where libraries catch errors"])
def test_a_timeout_in_a_run_is_a_timeout(place):
    model = next(case for case in cases() if case.label == HERE[0]).build()
    tokens = tiny_models.tokens(model, 1)
    expected = lm.run(model, tokens, "attention")
    method = "context_length" if place.startswith("inside") else "attention"

    def ring(number, frame):
        raise TimeoutError("too late")

    def hook(tensor, hook):
        if method == "attention" or tensor.shape[1] < tokens.shape[-1]:
            with contextlib.suppress(OSError):
                signal.raise_signal(signal.SIGALRM)
        return tensor

    before = signal.signal(signal.SIGALRM, ring)
    name = next(n for n in ("blocks.0.hook_in", "blocks.0.hook_resid_pre") if n in model.hook_dict)
    try:
        model.add_hook(name, hook)
        with pytest.raises(TimeoutError, match=r"^too late$"):
            lm.run(model, tokens, method, max_memory=60_000)
    finally:
        signal.signal(signal.SIGALRM, before)
        model.reset_hooks()
    assert torch.equal(lm.run(model, tokens, "attention").scores, expected.scores)


@pytest.mark.parametrize("module", ["torch.autograd.grad_mode", "weakref"])
def test_no_handler_comes_within_these(usual_handler, module):
    """Check modes of torch, which would stay on or end at a later time if their exit were interrupted."""
    names = {"__name__": module, "raise_signal": signal.raise_signal, "number": signal.SIGINT, "done": []}
    exec("def work():\n    raise_signal(number)\n    done.append('all of it')", names)
    with pytest.raises(KeyboardInterrupt), Changes([]):
        names["work"]()
    assert names["done"] == ["all of it"]


# ------------------------------------------------------------------ every signal


@pytest.fixture
def raising_handlers():
    """Install a handler that raises for every signal."""
    before = {number: signal.signal(number, raise_came) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_every_handler_waits_until_the_changes_are_taken_back(raising_handlers, number):
    done = []

    def change():
        signal.raise_signal(number)
        done.append("made")
        return undo

    def undo():
        signal.raise_signal(number)
        done.append("taken back")

    with pytest.raises(Came, match=number.name), Changes([change]):
        done.append("inside")
    assert done == ["made", "taken back"]
    assert all(signal.getsignal(number) is raise_came for number in SIGNALS)


def test_of_several_that_wait_none_is_lost(raising_handlers):
    came = []

    def note(number, frame):
        came.append((number, frame is not None))
        raise Came

    for number in SIGNALS:
        signal.signal(number, note)

    def change():
        for number in SIGNALS:
            signal.raise_signal(number)
        return lambda: None

    with pytest.raises(Came), Changes([change]):
        pass
    assert sorted(came) == sorted((number, True) for number in SIGNALS)
    assert all(signal.getsignal(number) is note for number in SIGNALS)


def test_a_handler_that_is_called_late_may_be_interrupted(raising_handlers):
    """Interrupt a handler that waited, as for a handler that opens a debugger."""
    done = []

    def handler(number, frame):
        signal.raise_signal(signal.SIGINT)
        done.append("not reached")

    signal.signal(signal.SIGUSR1, handler)

    def change():
        signal.raise_signal(signal.SIGUSR1)
        return lambda: None

    with pytest.raises(Came, match="SIGINT"), Changes([change]):
        pass
    assert not done


def test_a_handler_that_is_installed_inside_waits_too(raising_handlers):
    done = []

    def undo():
        signal.raise_signal(signal.SIGUSR2)
        done.append("taken back")

    before = signal.getsignal(signal.SIGUSR2)
    try:
        with pytest.raises(Came, match="SIGUSR2"), Changes([lambda: undo]):
            signal.signal(signal.SIGUSR2, raise_came)
        assert done == ["taken back"]
        assert signal.getsignal(signal.SIGUSR2) is raise_came
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_handler_that_somebody_read_inside_and_puts_back_later(raising_handlers):
    with Changes([]):
        read = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    signal.signal(signal.SIGALRM, read)
    with pytest.raises(Came, match="SIGALRM"):
        signal.raise_signal(signal.SIGALRM)
    with Changes([]):
        pass
    assert signal.getsignal(signal.SIGALRM) is raise_came


def test_handlers_that_are_not_written_in_python_stay(raising_handlers):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with Changes([]):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGALRM) is not raise_came


def test_off_the_main_thread_no_handler_is_touched(raising_handlers):
    found = []

    def enter():
        with Changes([]):
            found.extend(signal.getsignal(number) is raise_came for number in SIGNALS)

    other = threading.Thread(target=enter)
    other.start()
    other.join()
    assert found == [True] * len(SIGNALS)


def test_what_a_raising_handler_left_over_is_put_back_next_time(raising_handlers):
    held = HeldSignals()
    held.hold()
    for one in held._held:
        one.is_left_over = True
    assert signal.getsignal(signal.SIGALRM) is not raise_came
    with Changes([]):
        pass
    assert all(signal.getsignal(number) is raise_came for number in SIGNALS)


def test_handlers_that_raise_twice_while_they_are_put_back(raising_handlers, monkeypatch):
    """Raise after the first handler is put back, and where the repair of this begins."""
    put_back, came = signal.signal, []

    def raise_at_a_call(frame, event, argument):
        if event == "call":
            came.append(frame.f_code.co_name)
            raise Came

    def put_one_back(number, handler):
        put_back(number, handler)
        if not came:
            came.append("signal")
            # What a profiler raises when a function is called comes before the function's first line.
            sys.setprofile(raise_at_a_call)
            raise Came

    held = HeldSignals()
    held.hold()
    monkeypatch.setattr(signal, "signal", put_one_back)
    try:
        with pytest.raises(Came):
            held.release()
    finally:
        sys.setprofile(None)
        monkeypatch.undo()
    assert came[0] == "signal"
    assert len(came) == 2
    assert all(signal.getsignal(number) is raise_came for number in SIGNALS)


def test_signals_of_asyncio_arrive():
    async def wait_for_a_signal():
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, came.set)

        def change():
            os.kill(os.getpid(), signal.SIGUSR1)
            return lambda: None

        with Changes([change]):
            pass
        await asyncio.wait_for(came.wait(), 10)

    asyncio.run(wait_for_a_signal())
