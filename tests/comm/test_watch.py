"""Watching processes: those that end, those that are nobody's, and time that nobody had."""

import os
import subprocess
import time

import pytest

from howdah.base.errors import UserError
from howdah.comm import watch as watching
from howdah.comm.transport import PeerLost
from howdah.comm.watch import Patience, ended, release, watch


@pytest.fixture
def asleep():
    """A process of this user that does nothing."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def test_the_end_of_a_process_is_seen(asleep):
    watched = watch([os.getpid(), asleep.pid])
    assert ended(watched) is None
    asleep.kill()
    assert ended(watched, seconds=60) == 1
    release(watched)


@pytest.mark.parametrize("reaped", [False, True])
def test_a_process_that_has_ended_is_lost(asleep, reaped):
    asleep.kill()
    os.waitid(os.P_PID, asleep.pid, os.WEXITED | os.WNOWAIT * (not reaped))
    with pytest.raises(PeerLost, match=rf"^rank 1 \(process {asleep.pid}\) ended before all were"):
        watch([os.getpid(), asleep.pid])


@pytest.mark.parametrize("process", [0, -1, 2**40, "one", None, 1.5, float("nan")])
def test_what_is_no_process_is_refused_and_nothing_stays_open(process):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(UserError, match=r"^rank 1('s process| has no process)"):
        watch([os.getpid(), process])
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")
def test_a_process_of_another_user_is_refused():
    process = subprocess.Popen(["sleep", "1000"], user=65534)
    try:
        with pytest.raises(
            UserError, match=r"rank 0 is said to be process \d+, which is of user 65534"
        ):
            watch([process.pid])
    finally:
        process.kill()
        process.wait()


def test_time_that_nobody_had_is_not_counted(monkeypatch):
    """A look an hour after the last one: everybody was suspended."""
    now = [time.monotonic()]
    monkeypatch.setattr(watching, "monotonic", lambda: now[0])
    patience = Patience(10, every=1)
    now[0] += 3600
    assert patience.look()
    assert patience.waited == 4
    now[0] += 3
    assert patience.look()
    now[0] += 3
    assert not patience.look()
