"""Reading ahead: in order, not too far ahead, and with errors and the end brought back."""

import threading

import pytest

from howdah.base import stopwatch
from howdah.text.prefetch import Prefetch


def test_steps_come_in_order_from_where_it_starts():
    ahead = Prefetch(lambda step: step * 10, step=3)
    assert [ahead.next() for _ in range(5)] == [30, 40, 50, 60, 70]
    ahead.close()


def test_it_reads_two_ahead_and_no_further():
    reads, second, third = [], threading.Event(), threading.Event()

    def read(step):
        reads.append(step)
        if step:
            (second if step == 1 else third).set()
        return step

    ahead = Prefetch(read, depth=2)
    second.wait()
    assert not third.wait(0.02)
    assert reads == [0, 1]
    assert ahead.next() == 0
    third.wait()
    ahead.close()
    assert reads == [0, 1, 2]


def test_time_spent_waiting_is_counted(monkeypatch):
    """By a clock of the test's own, which moves while a step is read, and at no other time."""
    clock, asked = [0.0], threading.Event()

    def now():
        asked.set()
        return clock[0]

    def read(step):
        asked.wait()  # the caller has looked at the clock: it waits
        clock[0] += 0.25 if step == 0 else 0.0
        return step

    monkeypatch.setattr(stopwatch, "perf_counter", now)
    ahead = Prefetch(read)
    assert ahead.next() == 0
    assert ahead.waited.seconds == 0.25
    ahead.close()


def test_an_exception_reaches_the_caller_at_its_step_and_stays():
    def read(step):
        if step == 1:
            raise ValueError("no step 1")
        return step

    ahead = Prefetch(read)
    assert ahead.next() == 0
    for _ in range(2):
        with pytest.raises(ValueError, match="no step 1"):
            ahead.next()
    ahead.close()


def test_closing_ends_the_thread_and_may_be_repeated():
    def running():
        here = [one for one in threading.enumerate() if one.name == "howdah-prefetch"]
        return [one for one in here if one not in before]

    before = []  # an earlier test that failed may have left one
    before = running()
    ahead = Prefetch(lambda step: step)
    assert len(running()) == 1
    ahead.close()
    ahead.close()
    assert not running()
    with pytest.raises(ValueError, match="closed"):
        ahead.next()
