"""Run jobs one after another in the main thread, each with a time limit."""

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

_WAIT_SECONDS = 0.1  # the longest wait for a job before `until` is called again


class TimeLimitError(KeyboardInterrupt):
    """Report that a job took longer than its limit, and was stopped as by Ctrl-C.

    The model is as before, because lens_mix restores it after Ctrl-C.
    """


class JobQueue(Generic[T]):
    """Accept jobs from any thread and run them in the main thread.

    Python delivers signals to the main thread only, so a job there can be stopped at any time by the signal
    of Ctrl-C. lens_mix restores the model after it (`lens_mix.lens.changes`). A single operation of torch
    cannot be stopped: the job ends after it.

    Args:
        waiting: The largest number of waiting jobs, 1 or more.
        seconds: The time limit of one job.
    """

    def __init__(self, waiting: int, seconds: float) -> None:
        self._jobs: queue.Queue[tuple[Future[T], Callable[[], T]]] = queue.Queue(waiting)
        self._seconds = seconds
        self._running: Future[T] | None = None
        self._late: Future[T] | None = None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Add a job to the queue, and return a future of its result.

        The future's exception is that of the job, or a TimeLimitError.

        Raises:
            queue.Full: The largest number of jobs is waiting already.
        """
        future: Future[T] = Future()
        self._jobs.put_nowait((future, job))
        return future

    def run_jobs(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run jobs until `until` returns True. Must be called in the main thread.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        before = signal.signal(signal.SIGINT, self._handle_signal)
        try:
            while not until():
                try:
                    future, job = self._jobs.get(timeout=_WAIT_SECONDS)
                except queue.Empty:
                    continue
                if future.set_running_or_notify_cancel():
                    self._run(future, job)
        finally:
            signal.signal(signal.SIGINT, before)

    def _run(self, future: Future[T], job: Callable[[], T]) -> None:
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
            # The job has ended, so the time limit must not interrupt anything from here on.
            self._running = None
        except KeyboardInterrupt as interrupt:
            self._running, problem = None, interrupt
        timer.cancel()
        if problem is None:
            future.set_result(result)
        else:
            future.set_exception(problem)
        if isinstance(problem, KeyboardInterrupt) and not isinstance(problem, TimeLimitError):
            raise problem

    def _stop(self, future: Future[T]) -> None:
        """Interrupt the main thread if the job is still running; called in the timer's thread."""
        if future is self._running:
            self._late = future
            _thread.interrupt_main()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        late, self._late = self._late, None
        if late is None:
            raise KeyboardInterrupt
        # The late job may have ended in the meantime; then nothing is to be stopped.
        if late is self._running:
            raise TimeLimitError
