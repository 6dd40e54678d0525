"""The arena: who may take and give it, what it must be, and what is said where it does not fit."""

import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
from threading import Thread

import pytest
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm.arena import ADDRESS, ARENAS, default_heap, map_arena
from howdah.comm.engine import connect_engine
from howdah.comm.joining import Ranks, told_to_all
from howdah.comm.memory import check_memory, make_memory
from howdah.comm.transport import PeerLost
from howdah.comm.watch import Patience, release, watch

HOST = "127.0.0.1"
STRANGER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as rank_0:
    rank_0.connect("\\0" + sys.argv[1])
    print(socket.recv_fds(rank_0, 1, 1)[:2])
"""


@pytest.fixture
def asleep():
    """A process of this user that is said to be a rank, and never comes."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def store():
    return dist.HashStore()


# -- who may take and give it


def test_memory_from_another_process_than_rank_0s_is_not_taken(store, asleep):
    """Whoever can write to the store could send the ranks to a socket of its own."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0howdah-test-{os.getpid()}")
        listener.listen()
        store.set(ADDRESS, f"howdah-test-{os.getpid()}")
        with pytest.raises(
            UserError, match=rf"offered by process {os.getpid()} of user .*not taken"
        ):
            connect_engine(store, [asleep.pid, os.getpid()], rank=1, arena_bytes=4096, deadline=2)


def test_rank_0_gives_nothing_to_a_stranger_and_waits_for_nobody_who_ended(store, asleep):
    processes, said = (os.getpid(), asleep.pid), []

    def give():
        watched = tuple(watch(processes))
        try:
            map_arena(Ranks(store, 0, 2, processes, watched, Patience(600, every=0.1)), 1 << 20)
        except PeerLost as error:
            said.append(str(error))
        release(watched)

    thread = Thread(target=give)
    thread.start()
    store.wait([ADDRESS])
    command = [sys.executable, "-S", "-c", STRANGER, store.get(ADDRESS).decode()]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "(b'', [])"
    asleep.kill()
    thread.join()
    assert said == [f"rank 1 (process {asleep.pid}) ended before all were connected"]


# -- what it must be


def test_nobody_can_make_the_memory_shorter_or_longer():
    descriptor = make_memory("howdah-test", 1 << 20)
    for size in (0, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    check_memory(descriptor, 1 << 20)
    with pytest.raises(UserError, match="an arena of 1048576 bytes and this rank needs 4096"):
        check_memory(descriptor, 4096)
    os.close(descriptor)


def test_memory_that_could_be_cut_off_is_not_taken():
    loose = os.memfd_create("howdah-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(4096))
        for descriptor in (loose, file.fileno()):
            with pytest.raises(UserError, match="not memory whose size is fixed"):
                check_memory(descriptor, 4096)
    os.close(loose)


# -- what is said where it does not fit


def address_space(_):
    """A limit that leaves less than the arena needs."""
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
    lower(resource.RLIMIT_AS, pages * resource.getpagesize() + (64 << 20))


def file_size(_):
    lower(resource.RLIMIT_FSIZE, 1 << 20)


def open_files(spare):
    """A limit that leaves `spare` more."""
    lower(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    lowest = os.dup(0)
    os.close(lowest)
    lower(resource.RLIMIT_NOFILE, lowest + spare)


def lower(what, limit):
    resource.setrlimit(what, (limit, resource.getrlimit(what)[1]))


def connect(pipe, port, rank, limit, tries):
    """Sends what some tries to connect end in, up to the one that works."""
    store, said = dist.TCPStore(HOST, port, is_master=False), []
    store.set(f"process{rank}", str(os.getpid()))
    processes = [int(store.get(f"process{peer}")) for peer in range(2)]
    for number in range(tries):
        met = dist.PrefixStore(str(number), store)
        if limit:
            limit(number)
        try:
            connect_engine(met, processes, rank=rank, arena_bytes=1 << 30).close()
            said.append("connected")
            break
        except UserError as error:
            said.append(str(error))
    pipe.send(said)
    pipe.recv()  # the end of a process would be noticed


def sentences(limited, limit, tries=1):
    """What two ranks say of which one has a limit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "howdah.comm.engine"])
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    pipes = []
    for rank in range(2):
        ours, theirs = context.Pipe()
        target = (theirs, store.port, rank, limit if rank == limited else None, tries)
        context.Process(target=connect, args=target, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    said = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send("leave")
    assert said[0] == said[1]
    return said[0]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("limited", "limit", "way"),
    [(0, address_space, "ulimit -v"), (1, address_space, "ulimit -v"), (0, file_size, "ulimit -f")],
)
def test_all_ranks_are_told_at_once_which_limit_is_too_low(limited, limit, way):
    (said,) = sentences(limited, limit)
    assert said.startswith(f"rank {limited} cannot share memory with the others: 2.0 GiB cannot be")
    assert way in said
    assert "arena_bytes" not in said  # which no command has


def test_a_limited_address_space_is_not_filled_with_arenas(monkeypatch):
    """A run has some groups, each of which would map as much as the machine has memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (4 << 30, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, -1))
        whole = memory if limit == resource.RLIM_INFINITY else min(limit // ARENAS, memory)
        assert default_heap(1) == whole
        assert default_heap(3) == whole // 3


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("limited", [0, 1])
def test_all_ranks_are_told_when_one_can_open_no_more_files(limited):
    """Whichever file it is that cannot be opened; with enough of them, they connect."""
    *lacking, last = sentences(limited, open_files, tries=30)
    assert last == "connected"
    assert len(lacking) > 3
    for said in lacking:
        assert said.startswith(f"rank {limited} cannot share memory with the others: ")
        assert "Too many open files" in said


def test_a_failure_is_told_to_the_others_and_once(store):
    sentence = r"^rank 1 cannot share memory with the others: too little$"
    with pytest.raises(UserError, match=sentence), told_to_all(store, 1):
        raise UserError("too little")
    ranks = Ranks(store, 0, 2, (), (), Patience(600, every=0.1))
    with pytest.raises(UserError, match=sentence), told_to_all(store, 0):
        ranks.hear(ADDRESS)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"arena_bytes": -1}, "arena_bytes is -1"),
        ({"arena_bytes": 0.5}, "arena_bytes is 0.5"),
        ({"arena_bytes": 1 << 70}, "arena_bytes is 1180"),
        ({"deadline": float("nan")}, "deadline is nan"),
        ({"deadline": -1}, "deadline is -1"),
        ({"deadline": float("inf")}, "deadline is inf"),
        ({"stopped_for": "long"}, "stopped_for is 'long'"),
        ({"rank": 1}, "names rank 1"),
        ({"rank": 0.5}, "names rank 0.5"),
        ({"processes": []}, "at most 64 ranks, not 0"),
        ({"processes": [1.5]}, "rank 0 has no process 1.5"),
        ({"processes": [os.getppid()]}, "is said to be rank 0, this one's"),
    ],
)
def test_what_cannot_be_connected_is_refused(store, wrong, sentence):
    given = {"processes": [os.getpid()], "rank": 0, "arena_bytes": 4096} | wrong
    with pytest.raises(UserError, match=sentence):
        connect_engine(store, given.pop("processes"), **given)
