"""The lane of the torch backend: who runs a call, and when its thread is woken."""

from pathlib import Path
from threading import current_thread

import pytest

from howdah.comm.torch_backend.alarm import NOW, SPEC, spec
from howdah.comm.torch_backend.work import Lane

NEVER = 1e6  # seconds


@pytest.fixture
def lane():
    """Makes lanes, which end with the test."""
    made = []

    def make(grace):
        made.append(Lane("lane", lambda site: None, grace))
        return made[-1]

    yield make
    for one in made:
        one.close()


def noting(found):
    """A call that notes the name of its thread."""
    return lambda: found.append(current_thread().name)


def is_set(lane):
    """Whether the timer of a lane is to wake its thread, by the kernel's word."""
    told = Path(f"/proc/self/fdinfo/{lane._alarm._file}").read_text("utf-8")
    assert "it_value" in told
    return "it_value: (0, 0)" not in told


def test_who_waits_runs_what_is_queued_and_wakes_nobody(lane):
    found, slow = [], lane(NEVER)
    works = [slow.later(noting(found), []) for _ in range(3)]
    works[1].wait()
    assert found == [current_thread().name] * 2
    assert is_set(slow)  # for the third
    slow.now(noting(found))
    assert found == [current_thread().name] * 4
    assert works[2].is_completed()
    assert not is_set(slow)


@pytest.mark.parametrize("grace", [0, 1e-3])
def test_the_thread_runs_a_call_for_which_nobody_comes(lane, grace):
    found, quick = [], lane(grace)
    works = [quick.later(noting(found), []) for _ in range(2)]
    assert works[1]._passes()  # waits as a wait with a time-out does, which runs nothing
    assert found == ["lane"] * 2
    work = quick.later(noting(found), [])  # again, when the queue was empty
    assert work._passes()


def test_a_future_and_the_end_of_a_lane_do_not_wait_for_the_grace(lane):
    """Who waits for a future runs nothing: DDP."""
    found, slow = [], lane(NEVER)
    slow.later(noting(found), []).get_future().wait()
    assert found == ["lane"]
    slow.later(noting(found), [])
    slow.close()
    assert found == ["lane"] * 2


def test_delays_are_what_the_kernel_reads():
    assert SPEC.unpack(spec(1.5)) == (0, 0, 1, 500_000_000)
    assert SPEC.unpack(spec(500e-6)) == (0, 0, 0, 500_000)
    assert spec(0) == NOW  # nothing would turn the timer off
