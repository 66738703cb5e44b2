"""Run jobs one after another in the main thread; a job can be cancelled, and has a time limit."""

from __future__ import annotations

import _thread
import dataclasses
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Generic, TypeVar

T = TypeVar("T")

_WAIT_SECONDS = 0.1  # the longest wait for a job before `until` is called again


class StoppedError(KeyboardInterrupt):
    """Report that a job was stopped as by Ctrl-C.

    The model is as before, because lens_mix restores it after Ctrl-C.
    """


class TimeLimitError(StoppedError):
    """Report that a job took longer than its limit."""


class CancelledJobError(StoppedError):
    """Report that a job was cancelled while it ran."""


@dataclasses.dataclass(eq=False)
class QueuedJob(Generic[T]):
    """Contain a job, and what is known about it.

    Attributes:
        work: The function that computes the result.
        future: The future of the result. Its exception is that of the job, or a StoppedError.
        submitted: When the job was added to the queue, in seconds of `time.monotonic`.
        started: When it began to run; None: not yet.
        ended: When it ended; None: not yet.
    """

    work: Callable[[], T]
    future: Future[T] = dataclasses.field(default_factory=Future)
    submitted: float = dataclasses.field(default_factory=time.monotonic)
    started: float | None = None
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """Return for how long the job has run; before it runs, for how long it has waited."""
        start = self.submitted if self.started is None else self.started
        return (time.monotonic() if self.ended is None else self.ended) - start


class JobQueue(Generic[T]):
    """Accept jobs from any thread and run them in the main thread.

    Python delivers signals to the main thread only, so a job there can be stopped at any time by the signal
    of Ctrl-C. lens_mix restores the model after it (`lens_mix._care.changes`). A single operation of torch
    cannot be stopped: the job ends after it.

    Args:
        waiting: The largest number of waiting jobs, 1 or more.
        seconds: The time limit of one job.
    """

    def __init__(self, waiting: int, seconds: float) -> None:
        self._most, self._seconds = waiting, seconds
        self._waiting: list[QueuedJob[T]] = []
        self._changed = threading.Condition()
        self._running: QueuedJob[T] | None = None
        # The job that is to be stopped, and the error that it gets.
        self._to_stop: tuple[QueuedJob[T], type[StoppedError]] | None = None

    def submit(self, work: Callable[[], T]) -> QueuedJob[T]:
        """Add a job to the queue, and return it.

        Raises:
            queue.Full: The largest number of jobs is waiting already.
        """
        job = QueuedJob(work)
        with self._changed:
            if len(self._waiting) >= self._most:
                raise queue.Full
            self._waiting.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: QueuedJob[T]) -> None:
        """Remove a waiting job, or stop it if it is running; a job that has ended stays as it is."""
        with self._changed:
            if job.future.cancel():
                job.ended = time.monotonic()
                if job in self._waiting:
                    self._waiting.remove(job)
                return
        self._stop(job, CancelledJobError)

    def count_before(self, job: QueuedJob[T]) -> int:
        """Return how many jobs end before this one starts; 0 if it has started."""
        with self._changed:
            return self._waiting.index(job) + (self._running is not None) if job in self._waiting else 0

    @property
    def is_idle(self) -> bool:
        """Return whether no job runs or waits."""
        return self._running is None and not self._waiting

    def run_jobs(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run jobs until `until` returns True. Must be called in the main thread.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        before = signal.signal(signal.SIGINT, self._handle_signal)
        try:
            while not until():
                job = self._take()
                if job is not None and job.future.set_running_or_notify_cancel():
                    self._run(job)
        finally:
            signal.signal(signal.SIGINT, before)

    def _take(self) -> QueuedJob[T] | None:
        """Return the next job; None if there is none for a while."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(_WAIT_SECONDS)
            return self._waiting.pop(0) if self._waiting else None

    def _run(self, job: QueuedJob[T]) -> None:
        timer = threading.Timer(self._seconds, self._stop, [job, TimeLimitError])
        timer.daemon = True
        problem: BaseException | None = None
        try:
            try:
                job.started, self._running = time.monotonic(), job
                timer.start()
                result = job.work()
            except Exception as raised:
                problem = raised
            # The job has ended, so nothing must interrupt anything from here on.
            self._running = None
        except KeyboardInterrupt as interrupt:
            self._running, problem = None, interrupt
        timer.cancel()
        job.ended = time.monotonic()
        if problem is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(problem)
        if isinstance(problem, KeyboardInterrupt) and not isinstance(problem, StoppedError):
            raise problem

    def _stop(self, job: QueuedJob[T], error: type[StoppedError]) -> None:
        """Interrupt the main thread if the job is still running; called in another thread."""
        if job is self._running:
            self._to_stop = job, error
            _thread.interrupt_main()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        to_stop, self._to_stop = self._to_stop, None
        if to_stop is None:
            raise KeyboardInterrupt
        job, error = to_stop
        # The job may have ended in the meantime; then nothing is to be stopped.
        if job is self._running:
            raise error
