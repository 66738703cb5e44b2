"""Signals while a model is being changed: their handlers wait, so that none of them can raise halfway.

Python calls a handler between any two steps of the main thread. One that raises (Ctrl-C, the timeout of a
test, a scheduler's SIGTERM) would leave a hook on the model, or its lock taken, if it came while these are
put on or taken off.

What a handler raises meanwhile is on its way as an `Interrupted` until the model is as it was: lens_mix and
the libraries below expect errors of a model, and would take a `TimeoutError` for one of them.
"""

from __future__ import annotations

import _signal  # `signal.getsignal` is much slower
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]

# No handler runs while a function of these modules is being executed, or anything that it calls.
_CHANGING = frozenset({"lens_mix.lens.changes", __name__})
# Nor between two steps of these: an exception there would leave a context manager half exited, and Python
# swallows those that are raised in callbacks of weak references. A `torch.inference_mode` that is not exited
# switches it on or off at any later time.
_UNINTERRUPTED = frozenset(
    {
        "contextlib",
        "tqdm.std",
        "weakref",
        "_weakrefset",
        "torch.autograd.grad_mode",
        "torch.amp.autocast_mode",
        "lens_mix.lens.raw_errors",
    }
)

_NUMBERS = tuple(map(int, signal.valid_signals()))

# What takes the place of handlers whose signals came at a bad moment, by the signals' numbers.
_waiting: dict[int, _Held] = {}


class Interrupted(BaseException):
    """What a handler raised, as its `original`, on its way out of the `Changes` that hold it back."""

    def __init__(self, original: Exception, held: _Held) -> None:
        super().__init__(original)
        self.original, self.held = original, held


def pass_on(problem: BaseException | None) -> None:
    """Raise what a handler has raised: itself, with where it came, once the handler is held no more."""
    if not isinstance(problem, Interrupted):
        return
    if not problem.held.is_left_over:
        raise problem
    original, trace = problem.original, problem.__traceback__
    last = trace
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is not None:
        last.tb_next = original.__traceback__
    raise original.with_traceback(trace) from original.__cause__


class HeldSignals:
    """The handlers that wait for one `Changes`: all that are written in Python and wait for no other."""

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def hold(self) -> None:
        """Make the handlers that are installed now wait. Python calls handlers in the main thread only."""
        if not _is_main_thread():
            return
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if not callable(handler):
                continue  # as most are, and a run asks for all of them some dozen times
            if isinstance(handler, _Held):
                if handler.is_left_over:
                    handler.is_left_over = False
                    self._held.append(handler)
            else:
                held = _Held(number, handler)
                # Before it is installed, as another signal's handler may raise from within `signal.signal`.
                self._held.append(held)
                signal.signal(number, held)

    def release(self) -> None:
        """Call the handlers that wait, and put all back, unless somebody has installed others meanwhile."""
        try:
            deliver()
        finally:
            for held in self._held:
                held.is_left_over = True
            self._put_back()
            deliver()

    def _put_back(self) -> None:
        try:
            while self._held:
                held = self._held[-1]
                if _signal.getsignal(held.number) is held:
                    signal.signal(held.number, held.handler)
                self._held.pop()
        except BaseException:
            # A handler that is back already has raised. If it raises again, the next `hold` finds the others.
            self._put_back()
            raise


class _Held:
    """Takes the place of one signal's handler; a signal that comes at a bad moment waits.

    Attributes:
        number, handler: the signal's number, and the handler whose place this takes.
        is_left_over: whether whoever installed this is done with it.
    """

    def __init__(self, number: int, handler: _Handler) -> None:
        self.number, self.handler = number, handler
        self.is_left_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_bad_moment(frame):
            _waiting[number] = self
        else:
            _waiting.pop(number, None)
            self.call(frame)

    def call(self, frame: FrameType | None) -> None:
        """Call the handler."""
        try:
            self.handler(self.number, frame)
        except Exception as problem:
            if self.is_left_over:
                raise
            raise Interrupted(problem, self) from problem


def deliver() -> None:
    """Call the handlers of the signals that wait, in the main thread."""
    if not _waiting or not _is_main_thread():
        return
    _, held = _waiting.popitem()
    try:
        held.call(sys._getframe())
    finally:
        deliver()


def forget() -> None:
    """Drop what waits: a child process gets none of its parent's signals."""
    _waiting.clear()


def _is_bad_moment(frame: FrameType | None) -> bool:
    """Return whether a change is being made or taken back, or a module in which signals wait is running."""
    if frame is not None and frame.f_globals.get("__name__") in _UNINTERRUPTED:
        return True
    inner = None
    while frame is not None and frame.f_globals.get("__name__") not in _CHANGING:
        inner, frame = frame, frame.f_back
    # A handler may be interrupted by the next one, as any handler.
    return frame is not None and not (inner is not None and frame.f_code is _Held.call.__code__)


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
