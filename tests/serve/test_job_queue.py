"""Test jobs in the main thread: their order, their time limit, cancelling, and Ctrl-C."""

from __future__ import annotations

import queue
import signal
import threading
import time

import pytest

from lens_mix.serve.job_queue import CancelledJobError, JobQueue, TimeLimitError


def endless():
    while True:
        time.sleep(0.001)


def run_until_done(queued, *jobs):
    queued.run_jobs(until=lambda: all(job.future.done() for job in jobs))


def test_jobs_run_in_order_in_this_thread():
    queued, done = JobQueue(3, 60), []

    def work(number):
        done.append((number, threading.current_thread() is threading.main_thread()))
        return number

    jobs = [queued.submit(lambda number=number: work(number)) for number in range(3)]
    assert [queued.count_before(job) for job in jobs] == [0, 1, 2]
    with pytest.raises(queue.Full):
        queued.submit(endless)
    run_until_done(queued, *jobs)
    assert done == [(0, True), (1, True), (2, True)]
    assert jobs[2].future.result() == 2
    assert queued.is_idle


def test_a_cancelled_job_that_waits_leaves_the_queue():
    queued, done = JobQueue(2, 60), []
    first, second = (queued.submit(lambda number=number: done.append(number)) for number in range(2))
    queued.cancel(first)
    assert first.future.cancelled()
    assert queued.count_before(second) == 0
    third = queued.submit(lambda: done.append(2))
    run_until_done(queued, second, third)
    assert done == [1, 2]


def test_a_cancelled_job_that_runs_is_stopped_and_no_other():
    queued, before = JobQueue(3, 60), signal.getsignal(signal.SIGINT)
    running, fine = queued.submit(endless), queued.submit(lambda: (queued.is_idle, 3))
    seen = []

    def cancel():
        while running.started is None:
            time.sleep(0.001)
        seen.extend([queued.is_idle, queued.count_before(running), queued.count_before(fine)])
        queued.cancel(running)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    run_until_done(queued, running, fine)
    canceller.join()
    assert seen == [False, 0, 1]
    assert isinstance(running.future.exception(), CancelledJobError)
    assert fine.future.result() == (False, 3)
    assert 0 < running.seconds < 10
    # A job that has ended is not cancelled, and its time does not grow.
    seconds = fine.seconds
    queued.cancel(fine)
    assert fine.future.result() == (False, 3)
    assert fine.seconds == seconds
    assert signal.getsignal(signal.SIGINT) is before


def test_the_limit_stops_one_job_and_no_other():
    queued, before = JobQueue(3, 0.2), signal.getsignal(signal.SIGINT)
    late, broken, fine = queued.submit(endless), queued.submit(lambda: 1 / 0), queued.submit(lambda: 3)
    run_until_done(queued, late, broken, fine)
    assert isinstance(late.future.exception(), TimeLimitError)
    assert isinstance(broken.future.exception(), ZeroDivisionError)
    assert fine.future.result() == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_a_limit_that_comes_when_the_job_has_ended_stops_nothing():
    """The timer may find a job running that ends before the signal arrives; the next job must go on."""
    queued = JobQueue(2, 60)
    first = queued.submit(lambda: 1)
    run_until_done(queued, first)

    def overtaken():
        queued._to_stop = first, TimeLimitError
        signal.raise_signal(signal.SIGINT)
        return 2

    second = queued.submit(overtaken)
    run_until_done(queued, second)
    assert second.future.result() == 2


def test_ctrl_c_ends_the_queue_and_reaches_the_waiting_thread():
    queued, before = JobQueue(2, 60), signal.getsignal(signal.SIGINT)
    job = queued.submit(lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as raised:
        queued.run_jobs()
    assert not isinstance(raised.value, TimeLimitError)
    assert isinstance(job.future.exception(), KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
