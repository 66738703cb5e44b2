"""Jobs in the main thread: their order, their limit, and Ctrl-C."""

from __future__ import annotations

import queue
import signal
import threading
import time

import pytest

from lens_mix.serve.desk import Desk, OutOfTime


def endless():
    while True:
        time.sleep(0.001)


def worked(desk, *futures):
    desk.work(until=lambda: all(future.done() for future in futures))


def test_jobs_are_done_in_turn_and_here():
    desk, done = Desk(3, 60), []

    def job(number):
        done.append((number, threading.current_thread() is threading.main_thread()))
        return number

    futures = [desk.submit(lambda number=number: job(number)) for number in range(3)]
    with pytest.raises(queue.Full):
        desk.submit(endless)
    assert futures[1].cancel()
    worked(desk, *futures)
    assert done == [(0, True), (2, True)]
    assert futures[2].result() == 2


def test_the_limit_stops_one_job_and_no_other():
    desk, before = Desk(3, 0.2), signal.getsignal(signal.SIGINT)
    late, broken, fine = desk.submit(endless), desk.submit(lambda: 1 / 0), desk.submit(lambda: 3)
    worked(desk, late, broken, fine)
    assert isinstance(late.exception(), OutOfTime)
    assert isinstance(broken.exception(), ZeroDivisionError)
    assert fine.result() == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_a_limit_that_comes_when_the_job_has_ended_stops_nothing():
    """As where the timer has looked just before: what it found is another job's future now."""
    desk = Desk(2, 60)
    first = desk.submit(lambda: 1)
    worked(desk, first)

    def overtaken():
        desk._late = first
        signal.raise_signal(signal.SIGINT)
        return 2

    second = desk.submit(overtaken)
    worked(desk, second)
    assert second.result() == 2


def test_ctrl_c_ends_the_work_and_tells_who_waits():
    desk, before = Desk(2, 60), signal.getsignal(signal.SIGINT)
    job = desk.submit(lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as raised:
        desk.work()
    assert not isinstance(raised.value, OutOfTime)
    assert isinstance(job.exception(), KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
