"""Test jobs in the main thread: their order, their time limit, and Ctrl-C."""

from __future__ import annotations

import queue
import signal
import threading
import time

import pytest

from lens_mix.serve.job_queue import JobQueue, TimeLimitError


def endless():
    while True:
        time.sleep(0.001)


def run_until_done(jobs, *futures):
    jobs.run_jobs(until=lambda: all(future.done() for future in futures))


def test_jobs_run_in_order_in_this_thread():
    jobs, done = JobQueue(3, 60), []

    def job(number):
        done.append((number, threading.current_thread() is threading.main_thread()))
        return number

    futures = [jobs.submit(lambda number=number: job(number)) for number in range(3)]
    with pytest.raises(queue.Full):
        jobs.submit(endless)
    assert futures[1].cancel()
    run_until_done(jobs, *futures)
    assert done == [(0, True), (2, True)]
    assert futures[2].result() == 2


def test_the_limit_stops_one_job_and_no_other():
    jobs, before = JobQueue(3, 0.2), signal.getsignal(signal.SIGINT)
    late, broken, fine = jobs.submit(endless), jobs.submit(lambda: 1 / 0), jobs.submit(lambda: 3)
    run_until_done(jobs, late, broken, fine)
    assert isinstance(late.exception(), TimeLimitError)
    assert isinstance(broken.exception(), ZeroDivisionError)
    assert fine.result() == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_a_limit_that_comes_when_the_job_has_ended_stops_nothing():
    """The timer may find a job running that ends before the signal arrives; the next job must go on."""
    jobs = JobQueue(2, 60)
    first = jobs.submit(lambda: 1)
    run_until_done(jobs, first)

    def overtaken():
        jobs._late = first
        signal.raise_signal(signal.SIGINT)
        return 2

    second = jobs.submit(overtaken)
    run_until_done(jobs, second)
    assert second.result() == 2


def test_ctrl_c_ends_the_queue_and_reaches_the_waiting_thread():
    jobs, before = JobQueue(2, 60), signal.getsignal(signal.SIGINT)
    job = jobs.submit(lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as raised:
        jobs.run_jobs()
    assert not isinstance(raised.value, TimeLimitError)
    assert isinstance(job.exception(), KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
