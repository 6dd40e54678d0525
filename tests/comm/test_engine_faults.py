"""Faults: ranks that disagree, die, stop, leave or never come are named, and nothing leaks."""

import gc
import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest
import torch
import torch.distributed as dist
from test_engine import join, together, with_engine  # noqa: F401

from howdah.comm.transport import PeerLost

# -- ranks that are gone


def loop(met, name, rank, size, pipe):
    """All-reduces for ever; tells the error and how many there were."""
    torch.set_num_threads(1)
    store = dist.PrefixStore(name, dist.FileStore(met))
    store.set(f"started{rank}", "")
    store.wait([f"started{peer}" for peer in range(size)])
    engine = join(store, rank=rank, size=size, arena_bytes=1 << 24, stopped_for=1.5)
    x, count = torch.ones(300_000), 0
    pipe.send(arena_number())
    try:
        while True:
            x.fill_(1)
            engine.all_reduce(x[: [1, 300_000][count % 2]])
            assert x[0] == size
            count += 1
    except PeerLost as error:
        pipe.send((str(error), count))
    engine.close()


@pytest.fixture
def running(tmp_path):
    """Starts `size` ranks that all-reduce; gives processes and pipes, and ends them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "howdah.comm.engine"])
    met, started = str(tmp_path / "store"), []

    def start(name, size, target=loop):
        ranks = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(met, name, rank, size, theirs))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        started.extend(process for process, _ in ranks)
        (number,) = {pipe.recv() for _, pipe in ranks}
        return ranks, number

    yield start
    for process in started:
        process.kill()
        process.join()


def arena_number():
    """The number of the arena that this process maps, which no other arena has."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[4] for line in lines if "memfd:howdah" in line)


def left_behind(number, pids):
    """Processes that map an arena, and sockets and names of processes."""
    left = [w for w in Path("/proc/net/unix").read_text().split() if "howdah" in w]
    left += [path.name for path in Path("/dev/shm").iterdir()]
    left = [name for name in left if any(str(pid) in name for pid in pids)]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            lines = (process / "maps").read_text().splitlines()
            left += [line for line in lines if "memfd:howdah" in line and line.split()[4] == number]
    return left


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("moment", range(3))
def test_a_killed_rank_is_named_at_once_and_nothing_is_left(running, size, moment):
    ranks, number = running(f"kill{size}-{moment}", size)
    pids, victim = [process.pid for process, _ in ranks], moment % size
    assert not ranks[0][1].poll(0.01 * moment)
    assert len(left_behind(number, pids)) == size
    os.kill(pids[victim], signal.SIGKILL)
    for rank, (process, pipe) in enumerate(ranks):
        if rank != victim:
            said, _ = pipe.recv()
            assert f"rank {victim} (process {pids[victim]}) died" in said
            assert "this rank called all_reduce(float32 [" in said
        process.join()
    assert left_behind(number, pids) == []


def test_a_stopped_rank_is_given_up_after_the_deadline_and_a_short_stop_is_not(running):
    """Where this process is itself kept waiting for long, the stop was not short: once more."""
    for attempt in range(100):
        ((first, pipe), (second, _)), _ = running(f"stop{attempt}", 2)
        began = monotonic()
        os.kill(second.pid, signal.SIGSTOP)
        said = pipe.poll(0.1)
        os.kill(second.pid, signal.SIGCONT)
        if monotonic() - began < 0.5:
            break
        first.kill()
        second.kill()
    assert not said
    assert not pipe.poll(0.1)
    os.kill(second.pid, signal.SIGSTOP)
    said, count = pipe.recv()
    assert f"rank 1 (process {second.pid}) is stopped" in said
    assert count > 0
    first.join()


def receive_from_all(met, name, rank, size, pipe):
    """Rank 0 receives from all others at once; they are there and send nothing."""
    store = dist.PrefixStore(name, dist.FileStore(met))
    engine = join(store, rank=rank, size=size, deadline=600, stopped_for=0.3)
    pipe.send(arena_number())
    if rank:
        pipe.recv()
    heard = [torch.zeros(1) for _ in range(1, size)]
    try:
        with engine.group():
            for peer, x in enumerate(heard, start=1):
                engine.receive(x, peer)
    except PeerLost as error:
        pipe.send((str(error), error.dead))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_the_right_one_of_several_awaited_ranks_is_named(running, fault, victim):
    ranks, _ = running(f"several{fault}{victim}", 4, receive_from_all)
    pids = [process.pid for process, _ in ranks]
    os.kill(pids[victim], getattr(signal, fault))
    happened, dead = ("died", pids[victim]) if fault == "SIGKILL" else ("is stopped", 0)
    said, seen = ranks[0][1].recv()
    assert f"rank {victim} (process {pids[victim]}) {happened}" in said and seen == dead


def wait_for_rank_1(met, name, rank, size, pipe):
    """Rank 0 waits for rank 1, which signals when it is told to; rank 2 leaves when it is."""
    store = dist.PrefixStore(name, dist.FileStore(met))
    engine = join(store, rank=rank, size=size, deadline=600)
    pipe.send(arena_number())
    try:
        if rank == 0:
            engine.wait(1)
            pipe.send("signalled")
        else:
            pipe.recv()
            (engine.signal if rank == 1 else lambda _: engine.close())(0)
    except PeerLost as error:
        pipe.send(str(error))


def test_the_death_of_a_rank_that_nobody_awaits_ends_all_waits(running):
    ranks, _ = running("unawaited", 3, wait_for_rank_1)
    os.kill(ranks[2][0].pid, signal.SIGKILL)
    assert f"rank 2 (process {ranks[2][0].pid}) died" in ranks[0][1].recv()


def test_the_others_go_on_when_one_has_left_and_ended(running):
    ((_, first), (_, second), (process, third)), _ = running("goodbye", 3, wait_for_rank_1)
    third.send("leave")
    process.join()
    assert not first.poll(0.1)
    second.send("signal")
    assert first.recv() == "signalled"


@pytest.mark.parametrize("closed", [True, False])
def test_the_arena_is_given_back_without_the_collector(closed):
    """Engines in cycles were freed dozens at once, in the middle of anything: stalls of seconds."""
    store = dist.HashStore()
    gc.disable()
    try:
        engine = join(store, rank=0, size=1, arena_bytes=1 << 20)
        number = arena_number()
        if closed:
            engine.close()
        else:
            del engine
        assert left_behind(number, []) == []
    finally:
        gc.enable()


def leave(engine):
    if engine.rank == 1:
        return None
    with pytest.raises(PeerLost, match=r"rank 1 \(process \d+\) left the group, as rank 0 saw"):
        engine.barrier()
    return None


def test_a_rank_that_left_is_named(together):  # noqa: F811
    together(leave, ranks=2)


def wait_for_each_other(engine):
    engine.barrier()
    with pytest.raises(PeerLost, match=rf"rank [01] \(process \d+\) .* at {__file__}") as told:
        (engine.barrier if engine.rank == 0 else lambda: engine.wait(1 - engine.rank))()
    return str(told.value)


wait_for_each_other.deadline = 2


def test_ranks_that_wait_for_each_other_are_told_after_the_deadline(together):  # noqa: F811
    """The first one, at least: the other may hear that this one has left."""
    said = together(wait_for_each_other, ranks=2)
    assert any("did not come" in each for each in said)


def interrupt(engine):
    if engine.rank == 1:
        with pytest.raises(PeerLost, match="rank 0 was interrupted"):
            engine.receive(torch.zeros(1), 0)
        return
    signal.signal(signal.SIGALRM, raise_where_it_waits)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.receive(torch.zeros(1), 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def raise_where_it_waits(_, frame):
    """Inside the engine's wait, and not a moment before or after."""
    if frame.f_code.co_name == "_heed_signals":
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt


def test_a_waiting_rank_can_be_interrupted(together):  # noqa: F811
    together(interrupt, ranks=2)
