"""The watcher: who is lost, who has not called what; and a host that is woken from its GPU.

The wires are not NCCL's: their operations end only when the wire is aborted, as those of a GPU do
that waits for another one. Processes, stores and threads are real.
"""

import json
import os
import subprocess
import sys
from threading import Event as Flag
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from played_streams import Played

from howdah.comm import watcher as watching
from howdah.comm.lane import Lane
from howdah.comm.native import Native
from howdah.comm.transport import PeerLost
from howdah.comm.watcher import LEFT, LOST, WANTED, Watcher


class Hangs:
    """A work that is over when the wire is aborted."""

    def __init__(self, aborted):
        self._aborted = aborted

    def wait(self):
        self._aborted.wait()

    def is_completed(self):
        return self._aborted.is_set()


class Unending:
    """A backend whose operations wait for a rank that never comes."""

    supports_coalescing = False

    def __init__(self, played):
        self.aborted, self._played = Flag(), played

    def rank(self):
        return 0

    def size(self):
        return 2

    def abort(self):
        self.aborted.set()

    def allreduce(self, tensors, options):
        self._played.give(lambda: Hangs(self.aborted), [])


def wire():
    played = Played()
    native = Native(Unending(played), link="nccl")
    native.lane = Lane(played, check=native.check)
    return native


def operation(native):
    """Starts an operation that never ends."""
    x = torch.ones(4)
    return native.lane.start(lambda: native.all_reduce(x), [x], site="net.py:7") and None


@pytest.fixture
def child():
    """A process that waits until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.stdin.close()
    process.wait()


def kill(process):
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is over, and not reaped


def watcher_of(store, process=None, seconds=600):
    return Watcher(store, rank=0, processes={1: process.pid} if process else {}, seconds=seconds)


def test_a_rank_that_was_killed_is_named(child):
    watcher = watcher_of(dist.HashStore(), child)
    assert watcher.look() == ""
    kill(child)
    assert watcher.look() == f"rank 1 (process {child.pid}) ended, as rank 0 saw"
    watcher.close()


def test_a_rank_that_has_left_is_no_loss(child):
    store = dist.HashStore()
    watcher = watcher_of(store, child)
    store.set(f"{LEFT}/1", "")
    kill(child)
    assert watcher.look() == watcher.look() == ""
    watcher.close()


def test_what_one_rank_finds_all_are_told():
    store = dist.HashStore()
    one, other = watcher_of(store), watcher_of(store)
    one.lose("rank 3 ended")
    assert other.look() == "rank 3 ended"


def test_a_host_that_waits_for_its_gpu_is_woken(child):
    """Its wait has no end of its own."""
    watcher, native = watcher_of(dist.HashStore(), child), wire()
    watcher.add("0-1/0", native)
    operation(native)
    landing = native.lane.oldest()
    watcher.start()
    kill(child)
    landing.ended.synchronize()
    with pytest.raises(PeerLost, match=f"rank 1 .process {child.pid}. ended, as rank 0"):
        landing.result()
    watcher.close()


def ledger_of(store, rank, calls):
    """Another rank's ledger, as it answers."""
    told = {"0-1/0": [calls, 0, f"#{calls} all_reduce(float32 [4], sum) at own.py:3"]}
    store.set(f"cards/ledger/{rank}", json.dumps(told))


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (0, "rank 1 has not made the call #1 all_reduce(float32 [4], sum) at"),
        (1, "all of its ranks had called it"),
        (2, "rank 0 has not made the call #2 all_reduce(float32 [4], sum) at own.py:3 of rank 1"),
        (None, "rank 1 did not say what it called: it may be stopped"),
    ],
)
def test_an_operation_that_hangs_is_explained_by_the_ledgers(monkeypatch, calls, said):
    monkeypatch.setattr(watching, "ANSWER", 0.1)
    store = dist.HashStore()
    watcher, native = watcher_of(store, seconds=1e-6), wire()
    watcher.add("0-1/0", native)
    if calls is not None:
        ledger_of(store, 1, calls)
    operation(native)
    assert watcher.look() == ""  # it may have begun just now
    found = watcher.look()
    assert found.startswith("an operation of rank 0 was not over in 1e-06 s (net.py:7): ")
    assert said in found


def test_a_watcher_that_is_asked_tells_its_ledgers():
    store = dist.HashStore()
    watcher, native = watcher_of(store), wire()
    watcher.add("0-1/0", native)
    operation(native)
    assert watcher.look() == "" and not store.check(["cards/ledger/0"])
    store.set(WANTED, "")
    assert watcher.look() == ""
    calls, _, last = json.loads(store.get("cards/ledger/0"))["0-1/0"]
    assert calls == 1 and last.startswith("#1 all_reduce(float32 [4], sum) at")


def test_an_error_that_a_wire_has_found_is_told(monkeypatch):
    watcher, native = watcher_of(dist.HashStore()), wire()
    watcher.add("0-1/0", native)
    native._backend.get_error = watching_error
    assert watcher.look() == "the wire of ranks 0-1/0 reports REMOTE_ERROR, as rank 0 saw"


def watching_error():
    from torch._C._distributed_c10d import ErrorType

    return ErrorType.REMOTE_ERROR


def test_the_calls_are_written_beside_the_run(tmp_path):
    watcher, native = watcher_of(dist.HashStore()), wire()
    watcher.add("0-1/0", native)
    operation(native)
    watcher.folder = tmp_path
    watcher.lose("rank 1 ended")
    text = (tmp_path / "calls-of-rank-0.txt").read_text()
    assert text.startswith("ranks 0-1/0\n    #1 all_reduce(float32 [4], sum) at ")


def test_a_folder_that_is_gone_does_not_keep_it_from_ending(tmp_path):
    watcher, native = watcher_of(dist.HashStore()), wire()
    watcher.add("0-1/0", native)
    watcher.folder = tmp_path / "gone"
    watcher.lose("rank 1 ended")
    assert native.lost == "rank 1 ended"


class Gone(dist.HashStore):
    """The store of a launcher that has ended."""

    def check(self, keys):
        raise dist.DistNetworkError("connection closed\nby peer")

    def set(self, key, value):
        raise dist.DistNetworkError("connection closed")


def test_a_launcher_that_is_gone_ends_the_waits_too():
    watcher, native = watcher_of(Gone()), wire()
    watcher.add("0-1/0", native)
    thread = Thread(target=watcher._run)
    thread.start()
    thread.join()
    assert native.lost == "the launcher's store is gone: connection closed"
    assert LOST == "cards/lost"
    watcher.close()
