"""Jobs, done one after another in the main thread, each within a time limit."""

from __future__ import annotations

import _thread
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Generic, TypeVar

T = TypeVar("T")

_WAIT_SECONDS = 0.1  # how often somebody who waits for a job looks whether the work is over


class OutOfTime(KeyboardInterrupt):
    """A job took longer than it may; it was stopped as by Ctrl-C, which leaves the model as it was."""


class Desk(Generic[T]):
    """Takes jobs from any thread and does them in the main thread.

    Python hands signals to the main thread alone, so a job there can be stopped at any moment by the signal
    of Ctrl-C, which lens_mix survives everywhere (`lens_mix.lens.changes`). What can't be stopped is one step
    of torch: the job ends with it.

    Args:
        waiting: so many jobs may wait, 1 or more.
        seconds: what one job may take.
    """

    def __init__(self, waiting: int, seconds: float) -> None:
        self._jobs: queue.Queue[tuple[Future[T], Callable[[], T]]] = queue.Queue(waiting)
        self._seconds = seconds
        self._running: Future[T] | None = None
        self._late: Future[T] | None = None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """What the job will give: its result, its exception, or OutOfTime.

        Raises:
            queue.Full: so many wait already.
        """
        future: Future[T] = Future()
        self._jobs.put_nowait((future, job))
        return future

    def work(self, until: Callable[[], bool] = lambda: False) -> None:
        """Do jobs until `until` says so, or until Ctrl-C, a KeyboardInterrupt. In the main thread only."""
        before = signal.signal(signal.SIGINT, self._interrupted)
        try:
            while not until():
                try:
                    future, job = self._jobs.get(timeout=_WAIT_SECONDS)
                except queue.Empty:
                    continue
                if future.set_running_or_notify_cancel():
                    self._do(future, job)
        finally:
            signal.signal(signal.SIGINT, before)

    def _do(self, future: Future[T], job: Callable[[], T]) -> None:
        timer = threading.Timer(self._seconds, self._stop, [future])
        timer.daemon = True
        problem: BaseException | None = None
        try:
            try:
                self._running = future
                timer.start()
                result = job()
            except Exception as raised:
                problem = raised
            # From here on the limit interrupts nothing.
            self._running = None
        except KeyboardInterrupt as interrupt:
            self._running, problem = None, interrupt
        timer.cancel()
        if problem is None:
            future.set_result(result)
        else:
            future.set_exception(problem)
        if isinstance(problem, KeyboardInterrupt) and not isinstance(problem, OutOfTime):
            raise problem

    def _stop(self, future: Future[T]) -> None:
        """The limit has come, in the timer's thread."""
        if future is self._running:
            self._late = future
            _thread.interrupt_main()

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        late, self._late = self._late, None
        if late is None:
            raise KeyboardInterrupt
        # Else it has ended in the meantime.
        if late is self._running:
            raise OutOfTime
