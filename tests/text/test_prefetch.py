"""Reading ahead: in order, not too far ahead, and with errors and the end brought back."""

import threading

import pytest

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
    assert second.wait(5)
    assert not third.wait(0.02)
    assert reads == [0, 1]
    assert ahead.next() == 0
    assert third.wait(5)
    ahead.close()
    assert reads == [0, 1, 2]


def test_time_spent_waiting_is_counted():
    go = threading.Event()

    def read(step):
        go.wait(5)
        return step

    ahead = Prefetch(read)
    threading.Timer(0.1, go.set).start()
    ahead.next()
    assert ahead.waited >= 0.02
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
        return [one for one in threading.enumerate() if one.name == "howdah-prefetch"]

    ahead = Prefetch(lambda step: step)
    assert len(running()) == 1
    ahead.close()
    ahead.close()
    assert not running()
    with pytest.raises(ValueError, match="closed"):
        ahead.next()
