"""Workers: kept and reused, in rank order; a failure is a sentence, a defect has its traceback."""

import os
import signal
import time
from contextlib import suppress

import numpy as np
import pytest
import torch

from howdah.base.errors import UserError
from howdah.comm import spawn
from howdah.comm.counters import Counters
from howdah.comm.fork_server import ForkServer
from howdah.comm.group import Group
from howdah.comm.pipes import send
from howdah.comm.spawn import WorkerError, Workers
from howdah.comm.transport import PeerLost


def place(transport):
    return transport.rank, transport.size, os.getpid(), torch.get_num_threads()


def test_workers_are_reused_and_answer_in_rank_order(workers):
    first = workers.run(place)
    assert [(rank, size) for rank, size, _, _ in first] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [threads for *_, threads in first] == [1] * 4
    pids = [pid for _, _, pid, _ in first]
    assert len({*pids, os.getpid()}) == 5
    for ranks in (3, 1, 2, 4):
        again = workers.run(place, ranks=ranks)
        assert again == [(rank, ranks, pids[rank], 1) for rank in range(ranks)]


def last_comes_first(transport):
    """Rank 0 has heard from all others before it answers."""
    Group(transport, axis="dp", counters=Counters()).barrier()
    if transport.rank == 0:
        sum(range(1_000_000))
    return transport.rank


def test_the_order_of_the_answers_does_not_matter(workers):
    for _ in range(3):
        assert workers.run(last_comes_first) == [0, 1, 2, 3]


def double(transport, array, *, extra=None):
    return {"twice": 2 * array, "rank": transport.rank, "extra": extra}


def test_arrays_travel_both_ways(workers):
    array = np.arange(200_000, dtype=np.float64).reshape(400, 500)  # more than a pipe holds
    for rank, result in enumerate(workers.run(double, array, ranks=2)):
        assert result["rank"] == rank
        np.testing.assert_array_equal(result["twice"], 2 * array)


def fail_on(transport, rank):
    Group(transport, axis="dp", counters=Counters()).barrier()
    if transport.rank == rank:
        raise ZeroDivisionError("this rank divides by nothing")
    Group(transport, axis="dp", counters=Counters()).barrier()  # waits for the rank that failed


def test_an_error_comes_with_its_traceback_and_ends_the_workers():
    with Workers(2) as two:
        with pytest.raises(WorkerError) as told:
            two.run(fail_on, 1)
        text = str(told.value)
        assert text.startswith("rank 1 of 2:\nTraceback")
        assert told.value.kind == "defect"
        assert 'raise ZeroDivisionError("this rank divides by nothing")' in text
        # A later test must not be told that nothing went wrong on no ranks at all.
        with pytest.raises(WorkerError, match="2 ranks were asked for, but 0 workers live"):
            two.run(place, ranks=2)


def die(transport, rank):
    if transport.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    Group(transport, axis="dp", counters=Counters()).barrier()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_dies_is_named(rank):
    """Also where its peer is quicker, and tells that it is lost."""
    with Workers(2) as two, pytest.raises(WorkerError) as told:
        pid = two.run(place)[rank][2]
        two.run(die, rank)
    assert told.value.kind == "killed"
    assert str(told.value).startswith(f"worker {rank} (process {pid}) was killed by SIGKILL; ")


ENDS = {
    "mistake": lambda: UserError("the wheel: is missing"),
    "limit": lambda: OSError(24, "Too many open files"),
    "lost": lambda: PeerLost("rank 1 of 1 is lost"),
}


def end(transport, how):
    raise ENDS[how]()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("how", ENDS)
def test_what_is_no_defect_is_a_sentence(how):
    with Workers(1) as one, pytest.raises(WorkerError) as told:
        one.run(end, how)
    sentence = str(ENDS[how]()).removeprefix("[Errno 24] ")
    assert (told.value.kind, str(told.value)) == (how, sentence)


def leave(transport):
    os._exit(7)


def test_a_worker_that_leaves_is_a_defect():
    with Workers(1) as one, pytest.raises(WorkerError, match=r"left with exit code 7$") as told:
        one.run(leave)
    assert told.value.kind == "defect"


def stop(transport, pid):
    os.kill(pid or os.getpid(), signal.SIGSTOP)
    return pid


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_not_waited_for():
    """A single one, whom no peer misses."""
    with Workers(1) as one, pytest.raises(WorkerError, match=r"\) was stopped$") as told:
        one.run(stop, 0)
    assert told.value.kind == "killed"


@pytest.mark.slow
def test_a_server_that_is_stopped_is_not_waited_for():
    """The workers meet through it."""
    with Workers(2) as two:
        assert two.run(stop, two._server.pid, ranks=1) == [two._server.pid]
        with pytest.raises(WorkerError, match="that started the ranks was killed") as told:
            two.run(place)
    assert told.value.kind == "killed"


def test_workers_that_cannot_be_started_are_told(monkeypatch):
    """Because the server's process cannot load what they need, or is killed on the way."""
    monkeypatch.setattr(spawn, "PRELOAD", ["no.such.module"])
    with pytest.raises(WorkerError, match=r"No module named 'no'; .*`ulimit -a`") as told:
        Workers(1)
    assert told.value.kind == "limit"
    monkeypatch.setattr(spawn, "ForkServer", Killed)
    with pytest.raises(WorkerError, match=r"that started the ranks was killed$") as told:
        Workers(1)
    assert told.value.kind == "killed"


class Killed(ForkServer):
    def __init__(self, **how):
        super().__init__(**how)
        os.kill(self.pid, signal.SIGKILL)


def test_a_worker_that_died_between_runs_is_named():
    with Workers(2) as two:
        pids = [pid for _, _, pid, _ in two.run(place)]
        os.kill(pids[1], signal.SIGKILL)
        wait_for_end(pids[1:])
        with pytest.raises(WorkerError, match=r"worker 1 \(process \d+\) was killed by SIGKILL"):
            two.run(last_comes_first)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ranks", [0, 3])
def test_a_wrong_number_of_ranks_is_refused(ranks):
    with Workers(1) as one:
        with pytest.raises(WorkerError, match=f"{ranks} ranks were asked for, but 1 workers live"):
            one.run(place, ranks=ranks)
        assert one.run(place)[0][:2] == (0, 1)


def wait_for_end(pids):
    """Until none of the processes runs: the fork server takes a moment to bury its children."""
    deadline = time.monotonic() + 120
    while any(map(lives, pids)):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.005)


def lives(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_close_leaves_no_process():
    with Workers(2) as two:
        pids = [pid for _, _, pid, _ in two.run(place)]
        assert all(map(lives, pids))
    wait_for_end(pids)


def test_an_error_of_the_caller_does_not_wait_for_workers_that_wait():
    """Rank 0 of a run that was interrupted while it started waits for its peer in vain."""
    with pytest.raises(KeyboardInterrupt), Workers(2) as two:
        pids = [pid for _, _, pid, _ in two.run(place)]
        send(two._children[0].pipe, place, (), 0, 2, 2, None)
        raise KeyboardInterrupt
    wait_for_end(pids)


def adding(transport, first):
    """Keeps a sum; a question is a number that is added."""
    total = first
    while True:
        (more,) = yield transport.rank, total
        total += more


def test_a_generator_keeps_what_it_has_made_between_questions():
    with Workers(2) as two:
        with pytest.raises(WorkerError, match="no worker waits for a question"):
            two.ask(1)
        assert two.run(adding, 10) == [(0, 10), (1, 10)]
        assert [two.ask(1), two.ask(2)] == [[(0, 11), (1, 11)], [(0, 13), (1, 13)]]
        with pytest.raises(WorkerError, match="these workers answer questions; start others"):
            two.run(place)
        with pytest.raises(WorkerError, match="unsupported operand"):
            two.ask("a word")  # a defect ends them, as it does in a run
        with pytest.raises(WorkerError, match="no worker waits for a question"):
            two.ask(1)
