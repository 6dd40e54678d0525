"""The fallback's own: memory that is short, systems without memfd, nothing left behind.

What it computes is tested with the other transports, in test_transport.py.
"""

import gc
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm import fallback_file, watch
from howdah.comm.fallback import Fallback, _steps, connect_fallback
from howdah.comm.signature import Disagreement
from howdah.comm.transport import PeerLost


@pytest.fixture
def small_files():
    """No file of this process may grow beyond a MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_memory_that_is_short_is_told_at_the_start(small_files):
    with pytest.raises(UserError, match=r"^8 MiB of shared memory are needed and not there"):
        fallback_file.create(8 << 20)


def without_memfd(transport, folder):
    """Connects as on a system that has no memfd; the files that there were, and are."""
    kept = os.memfd_create
    tempfile.tempdir = folder
    del os.memfd_create
    try:
        store = transport.among.store
        shared = connect_fallback(
            dist.PrefixStore("named", store), rank=transport.rank, size=transport.size
        )
    finally:
        os.memfd_create, tempfile.tempdir = kept, None
    x = torch.full((100_000,), shared.rank + 1.0)
    shared.all_reduce(x)
    left = os.listdir(folder)
    shared.barrier()
    shared.close()
    return x.unique().tolist(), left


def test_a_named_file_loses_its_name_when_all_have_it(workers, tmp_path):
    results = workers.run(without_memfd, str(tmp_path), ranks=2, transport="torch")
    assert results[0] == ([3.0], [])
    assert results[1][0] == [3.0]
    assert os.listdir(tmp_path) == []


def test_counts_that_are_too_many_to_show_are_told_apart():
    """32 ranks, of which one has others: the calls look alike, cut as they are."""
    size, said = 32, {}
    fd, _ = fallback_file.create(fallback_file.Plan(size).total)

    def gather(rank):
        shared = Fallback(os.dup(fd), rank=rank, size=size, seconds=60)
        counts = [100] * size
        if rank == 5:
            counts[30:32] = 101, 99
        try:
            shared.all_gather(torch.ones(100 * size), torch.ones(counts[rank]), counts)
        except Disagreement as error:
            said[rank] = str(error)

    threads = [Thread(target=gather, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    for rank in range(size):
        end = "101 and 100" if rank == 5 else "100 and 101"
        assert said[rank].endswith(f"; the counts differ first for rank 30: {end}")


def wild(transport, to):
    """An all_to_all in which rank 1 says that it sends absurdly many elements to some rank."""
    size, turn = transport.size, transport._turn

    def wild_turn(writes=()):
        for side in range(2):
            table = transport._at.table + side * size**2
            transport._words[table + size + to] = 1 << 62
        return turn(writes)

    if transport.rank == 1:
        transport._turn = wild_turn
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    room = pages * resource.getpagesize() + (1 << 30)  # what a list of so many turns cannot have
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    try:
        transport.all_to_all(torch.zeros(size), torch.ones(size), [1] * size, [1] * size)
    except (Disagreement, PeerLost) as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("to", [1, 2])
def test_an_absurd_count_ends_nobody_else(workers, to):
    """Those whom it does not concern went through it too, and ran out of memory."""
    told = workers.run(wild, to, ranks=3, transport="fallback")
    said = told.pop(to)
    assert said.startswith(f"rank {to} called all_to_all to receive 1 elements from rank 1 at ")
    assert said.endswith(f", but rank 1 sends {1 << 62}")
    assert told == [f"rank {to} of 3 gave up; what it says tells why"] * 2


def test_turns_are_not_listed_before_they_are_taken():
    turns = _steps(10, 4)
    assert isinstance(turns, Iterator)
    assert list(turns) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert list(_steps(0, 4)) == [slice(0, 0)]


def suspended(transport):
    """Waits as one does that was suspended between any two looks."""
    hours = iter(range(0, 10**9, 3600))
    watch.monotonic = lambda: next(hours)
    try:
        if transport.rank == 1:
            sleep(0.1)  # for a few looks
        transport.barrier()
    finally:
        watch.monotonic = monotonic


def test_an_hour_in_which_all_were_suspended_is_not_waited_for(workers):
    """Two minutes are 1500 looks, however late they come."""
    workers.run(suspended, ranks=2, transport="fallback")


def files(transport):
    """Open files of fallbacks in this process."""
    gc.collect()
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own, or one that another thread closes
            names.append(os.readlink(entry))
    return sum("howdah-fallback" in name for name in names)


def test_runs_leave_no_file_open(workers):
    assert workers.run(files, transport="fallback") == [2] * 4  # a map keeps one of its own
    assert workers.run(files, transport="torch") == [0] * 4
