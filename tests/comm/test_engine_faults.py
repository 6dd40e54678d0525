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

from howdah.base.errors import UserError
from howdah.comm.signature import Disagreement
from howdah.comm.transport import PeerLost

# -- ranks that disagree


def caught(engine, calls):
    """The sentence of the error that this rank's call ends in."""
    try:
        calls[engine.rank](engine)
    except Disagreement as error:
        return str(error)
    return "no error"


def reduce_four(engine):
    engine.all_reduce(torch.zeros(4))


def reduce_five(engine):
    engine.all_reduce(torch.zeros(5))


def reduce_double(engine):
    engine.all_reduce(torch.zeros(4, dtype=torch.float64))


def reduce_mean(engine):
    engine.all_reduce(torch.zeros(4), "mean")


def broadcast_0(engine):
    engine.broadcast(torch.zeros(4), 0)


def broadcast_1(engine):
    engine.broadcast(torch.zeros(4), 1)


def gather_1_3(engine):
    engine.all_gather(torch.zeros(4), torch.zeros([1, 3][engine.rank]), [1, 3])


def gather_2_2(engine):
    engine.all_gather(torch.zeros(4), torch.zeros(2), [2, 2])


def send_four(engine):
    engine.send(torch.zeros(4), 1)
    engine.barrier()


def receive_five(engine):
    engine.receive(torch.zeros(5), 0)


def give_two(engine):
    engine.all_to_all(torch.zeros(4), torch.zeros(4), [2, 2], [2, 2])


def take_three(engine):
    engine.all_to_all(torch.zeros(5), torch.zeros(4), [2, 2], [3, 2])


FOUR = "#1 all_reduce(float32 [4], sum)"
DISAGREEMENTS = [
    (reduce_four, reduce_five, FOUR, "#1 all_reduce(float32 [5], sum)"),
    (reduce_four, reduce_double, FOUR, "#1 all_reduce(float64 [4], sum)"),
    (reduce_four, reduce_mean, FOUR, "#1 all_reduce(float32 [4], mean)"),
    (reduce_four, broadcast_0, FOUR, "#1 broadcast(float32 [4], root 0)"),
    (broadcast_0, broadcast_1, "broadcast(float32 [4], root 0)", "[4], root 1)"),
    (gather_1_3, gather_2_2, "all_gather(float32 [1 3])", "all_gather(float32 [2 2])"),
    (gather_1_3, gather_2_2, "all_gather(", "; the counts differ first for rank 0: "),
    (give_two, take_three, "all_to_all(float32 [3 2], 0 to 1 and back)", "[2 2], 0 to 1 and back)"),
]


@pytest.mark.parametrize(("one", "other", "first", "second"), DISAGREEMENTS)
def test_both_calls_and_both_places_are_named(together, one, other, first, second):  # noqa: F811
    places = [f"at {__file__}:{f.__code__.co_firstlineno + 1}" for f in (one, other)]
    for sentence in together(caught, (one, other), ranks=2):
        for part in ("rank 0", "rank 1", first, second, *places):
            assert part in sentence


def test_ranks_that_agree_are_told_too(together):  # noqa: F811
    sentences = together(caught, (reduce_four, reduce_four, reduce_five), ranks=3)
    assert all("rank 2" in sentence and "[5]" in sentence for sentence in sentences)


def test_a_message_that_does_not_fit_is_told_to_both_sides(together):  # noqa: F811
    for sentence in together(caught, (send_four, receive_five), ranks=2):
        assert "rank 1 waits for another message" in sentence
        assert "rank 0's send(float32 [4])" in sentence


def test_a_failed_engine_stays_failed(together):  # noqa: F811
    def_error = together(caught_again, ranks=2)
    assert all("disagree" in words or "called" in words for words in def_error)


def caught_again(engine):
    """After a disagreement, a call on which all agree."""
    caught(engine, (reduce_four, reduce_five))
    return caught(engine, (reduce_four, reduce_four))


# -- calls that cannot work


def refusals(engine):
    x, said = torch.zeros(6), []
    cases = [
        lambda: engine.all_reduce(torch.zeros(4, 4)[:, ::2]),
        lambda: engine.all_reduce(x, "median"),
        lambda: engine.all_reduce(torch.zeros(3, dtype=torch.bool)),
        lambda: engine.all_reduce(torch.zeros(3, dtype=torch.int64), "mean"),
        lambda: engine.broadcast(x, 2),
        lambda: engine.send(x, engine.rank),
        lambda: engine.reduce_scatter(x[:3], x, [3, 4]),
        lambda: engine.reduce_scatter(x[1:4], x, [3, 3]),
        lambda: engine.all_gather(x, torch.zeros(3, dtype=torch.float64), [3, 3]),
        lambda: engine.all_to_all(x, x, [3, 3], [3, 3]),
        lambda: engine.broadcast(torch.zeros(2, dtype=torch.complex32), 0),
        lambda: engine.allocate(1 << 24, torch.float64),
        lambda: engine.there(x, 0),
    ]
    for case in cases:
        try:
            case()
            said.append("nothing")
        except UserError as error:
            said.append(str(error))
    engine.all_reduce(x.fill_(1))  # and nothing is broken
    return said, x.sum().item()


def test_what_cannot_work_is_refused_with_a_sentence(together):  # noqa: F811
    said, total = together(refusals, ranks=2)[0]
    expected = [
        "contiguous", "no reduction 'median'", "torch.bool", "mean of torch.int64", "names rank 2",
        "names rank 0", "have that sum", "lie apart", "dtype of the whole", "lie apart from x",
        "cannot move torch.complex32", "connect with arena_bytes=134217728 or more", "allocate()",
    ]  # fmt: skip
    for sentence, part in zip(said, expected, strict=True):
        assert part in sentence
    assert total == 12


def after_close(engine):
    engine.close()
    with pytest.raises(UserError, match="this engine is closed"):
        engine.barrier()


def test_a_closed_engine_says_so(together):  # noqa: F811
    together(after_close, ranks=1)


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
        pipe.send(str(error))


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_the_right_one_of_several_awaited_ranks_is_named(running, fault, victim):
    ranks, _ = running(f"several{fault}{victim}", 4, receive_from_all)
    pids = [process.pid for process, _ in ranks]
    os.kill(pids[victim], getattr(signal, fault))
    happened = "died" if fault == "SIGKILL" else "is stopped"
    assert f"rank {victim} (process {pids[victim]}) {happened}" in ranks[0][1].recv()


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
