"""Make signal handlers wait while a model is being changed, so that they cannot interrupt a change.

Python may call a signal handler between any two steps of the main thread. A handler may raise an exception,
for Ctrl-C, a test's timeout or a scheduler's SIGTERM, for example. If it did so while hooks are added or
removed, a hook might stay on the model, or its lock might never be released.

An exception of a handler is wrapped in an `Interrupted` until the model is restored. Otherwise lens_mix and
the libraries below might take a `TimeoutError`, for example, for an error of the model.
"""

from __future__ import annotations

import _signal  # The public `signal.getsignal` is much slower.
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SignalHandler = Callable[[int, FrameType | None], Any]

# No handler runs during a call of a function in these modules, which includes the functions that it calls.
_CHANGING = frozenset({"lens_mix._care.changes", __name__})
# No handler runs between two steps of these modules. An exception there would interrupt the exit of a context
# manager, and Python ignores exceptions in callbacks of weak references. A `torch.inference_mode` whose exit
# is interrupted would change the mode at some later time.
_UNINTERRUPTED = frozenset(
    {
        "contextlib",
        "tqdm.std",
        "weakref",
        "_weakrefset",
        "torch.autograd.grad_mode",
        "torch.amp.autocast_mode",
        "lens_mix._care.raw_errors",
    }
)

_NUMBERS = tuple(map(int, signal.valid_signals()))

# These are the handlers that have to be called later, by the numbers of their signals.
_waiting: dict[int, _Held] = {}


class Interrupted(BaseException):
    """An exception of a signal handler, until the `Changes` that it interrupts are undone.

    Args:
        original: The exception of the handler.
        held: The handler.
    """

    def __init__(self, original: Exception, held: _Held) -> None:
        super().__init__(original)
        self.original, self.held = original, held


def pass_on(problem: BaseException | None) -> None:
    """Raise an `Interrupted` again, or its original exception if the handler no longer waits for changes.

    Args:
        problem: Any exception, or None. Only an `Interrupted` is raised.
    """
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
    """The handlers that wait for one `Changes`: all handlers in Python that wait for no other one."""

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def hold(self) -> None:
        """Make the handlers that are installed now wait."""
        # Python calls handlers only in the main thread.
        if not _is_main_thread():
            return
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            # Most signals have no handler in Python, and a run reads all of them about a dozen times.
            if not callable(handler):
                continue
            if isinstance(handler, _Held):
                if handler.is_left_over:
                    handler.is_left_over = False
                    self._held.append(handler)
            else:
                held = _Held(number, handler)
                # The list comes first, because another signal's handler may raise inside `signal.signal`.
                self._held.append(held)
                signal.signal(number, held)

    def release(self) -> None:
        """Call the handlers whose signals came, and install all again.

        A handler is not installed again if somebody has installed another one meanwhile.
        """
        try:
            deliver()
        finally:
            for held in self._held:
                held.is_left_over = True
            self._restore()
            deliver()

    def _restore(self) -> None:
        try:
            while self._held:
                held = self._held[-1]
                if _signal.getsignal(held.number) is held:
                    signal.signal(held.number, held.handler)
                self._held.pop()
        except BaseException:
            # A handler that is installed again has raised. It may raise once more at the start of the next
            # call, before its `try`. If it raises a third time, the next `hold` finds the others.
            try:
                self._restore()
            finally:
                self._restore()
            raise


class _Held:
    """A handler that replaces the user's and calls it later if the signal comes at a bad moment.

    Attributes:
        number: The number of the signal.
        handler: The user's handler.
        is_left_over: Whether the `HeldSignals` that installed it has ended.
    """

    def __init__(self, number: int, handler: _SignalHandler) -> None:
        self.number, self.handler = number, handler
        self.is_left_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_bad_moment(frame):
            _waiting[number] = self
        else:
            _waiting.pop(number, None)
            self.call(frame)

    def call(self, frame: FrameType | None) -> None:
        """Call the user's handler.

        Raises:
            Interrupted: If the user's handler raises an exception while changes have to be undone.
        """
        try:
            self.handler(self.number, frame)
        except Exception as problem:
            if self.is_left_over:
                raise
            raise Interrupted(problem, self) from problem


def deliver() -> None:
    """Call the handlers of the signals that wait, if this is the main thread."""
    if not _waiting or not _is_main_thread():
        return
    _, held = _waiting.popitem()
    try:
        held.call(sys._getframe())
    finally:
        deliver()


def forget() -> None:
    """Forget the signals that wait, because a child process must not handle its parent's signals."""
    _waiting.clear()


def _is_bad_moment(frame: FrameType | None) -> bool:
    """Return whether a change is being made or undone, or an uninterrupted module is running."""
    if frame is not None and frame.f_globals.get("__name__") in _UNINTERRUPTED:
        return True
    inner = None
    while frame is not None and frame.f_globals.get("__name__") not in _CHANGING:
        inner, frame = frame, frame.f_back
    # A handler of the user may be interrupted by the next signal, as usual in Python.
    return frame is not None and not (inner is not None and frame.f_code is _Held.call.__code__)


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
