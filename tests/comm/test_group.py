"""Group: every collective against plain sums, every byte counted, every failure told."""

import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.comm.rendezvous import choose
from howdah.comm.transport import SingleRank
from howdah.plan.flat_buffers import share
from howdah.plan.recording import Traffic

LENGTHS = [0, 1, 2, 3, 5, 1000]  # not divisible, shorter than the group, empty
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SIZES = [1, 2, 3, 4]
KINDS = ["engine", "torch", "tcp"]
LINKS = {"engine": "shared", "torch": "tcp", "tcp": "tcp"}


def numbers(rank, length, dtype):
    """Numbers of very different size, so that the order of adding shows in the last bits."""
    draw = torch.Generator().manual_seed(1000 * length + rank)
    wide = torch.randn(length, generator=draw, dtype=torch.float64)
    return (wide * 10.0 ** torch.randint(-4, 4, (length,), generator=draw)).to(dtype)


def plain_sum(size, length, dtype):
    """What every collective must equal to the last bit: the sum in rank order, rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    total = numbers(0, length, dtype).to(wide)
    for rank in range(1, size):
        total = total + numbers(rank, length, dtype).to(wide)
    return total.to(dtype)


def bits(tensor):
    """Any dtype as bytes: bf16 does not exist in numpy, and NaN equals itself."""
    return tensor.contiguous().view(torch.uint8).numpy().copy()


def collect(transport, operation, dtype):
    """Runs one collective on buffers of all lengths in one call; the buffers, and what was sent."""
    counters = Counters()
    group = Group(transport, axis="dp", counters=counters)
    flats = [numbers(group.rank, length, dtype) for length in LENGTHS]
    if operation == "all_gather":  # everything but the own share is unknown before
        for flat in flats:
            own = group.own_shard(flat).clone()
            flat.fill_(float("nan"))
            group.own_shard(flat).copy_(own)
    if operation == "all_reduce_async":
        group.all_reduce(flats, async_op=True).result()
    else:
        getattr(group, operation)(flats)
    group.close()
    return [bits(flat) for flat in flats], counters.sent()


def sent_rows(size, rank, dtype, operation, kind):
    """Ψ - |own| for the reduce-scatter and (N-1)·|own| for the all-gather, in bytes."""
    link = "none" if size == 1 else LINKS[kind]
    scattered = gathered = 0
    for length in LENGTHS:
        start, stop = share(length, size, rank)
        scattered += length - (stop - start)
        gathered += (size - 1) * (stop - start)
    rows = {}
    if operation != "all_gather":
        rows[Traffic("dp", "reduce_scatter", link)] = scattered * dtype.itemsize
    if operation != "reduce_scatter":
        rows[Traffic("dp", "all_gather", link)] = gathered * dtype.itemsize
    return {row: count for row, count in rows.items() if count}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_reduce_scatter_sums_the_own_share_and_leaves_the_rest(workers, size, dtype, kind):
    results = workers.run(collect, "reduce_scatter", dtype, ranks=size, transport=kind)
    for rank, (flats, sent) in enumerate(results):
        for length, flat in zip(LENGTHS, flats, strict=True):
            start, stop = share(length, size, rank)
            expected = numbers(rank, length, dtype)
            expected[start:stop] = plain_sum(size, length, dtype)[start:stop]
            np.testing.assert_array_equal(flat, bits(expected))
        assert sent == sent_rows(size, rank, dtype, "reduce_scatter", kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_gather_brings_every_share_everywhere(workers, size, dtype, kind):
    results = workers.run(collect, "all_gather", dtype, ranks=size, transport=kind)
    for rank, (flats, sent) in enumerate(results):
        for length, flat in zip(LENGTHS, flats, strict=True):
            expected = torch.empty(length, dtype=dtype)
            for owner in range(size):
                start, stop = share(length, size, owner)
                expected[start:stop] = numbers(owner, length, dtype)[start:stop]
            np.testing.assert_array_equal(flat, bits(expected))
        assert sent == sent_rows(size, rank, dtype, "all_gather", kind)


@pytest.mark.parametrize("operation", ["all_reduce", "all_reduce_async"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_reduce_gives_every_rank_the_same_bits(workers, size, dtype, operation, kind):
    results = workers.run(collect, operation, dtype, ranks=size, transport=kind)
    for rank, (flats, sent) in enumerate(results):
        for length, flat in zip(LENGTHS, flats, strict=True):
            np.testing.assert_array_equal(flat, bits(plain_sum(size, length, dtype)))
        assert sent == sent_rows(size, rank, dtype, operation, kind)


SCALARS = [[0.1, 1e16, 3.0], [0.2, 1.0, 5.0], [0.3, -1e16, 7.0], [0.4, 1.0, 9.0]]


def scalars_and_broadcasts(transport):
    counters = Counters()
    group = Group(transport, axis="dp", counters=counters)
    summed = group.sum_scalars(SCALARS[group.rank])
    after_scalars = counters.sent()
    heard = []
    for root in range(group.size):
        flat = torch.full((5,), float(group.rank))
        group.broadcast(flat, root=root)
        heard.append(flat.tolist())
    group.barrier()
    group.close()
    return summed, after_scalars, heard, counters.sent()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_scalars_and_broadcasts(workers, size, kind):
    """Scalars are added in rank order on every rank: 1e16 + 1 - 1e16 shows another order."""
    link = "none" if size == 1 else LINKS[kind]
    scalars, broadcast = Traffic("dp", "scalars", link), Traffic("dp", "broadcast", link)
    expected = [sum(column) for column in zip(*SCALARS[:size], strict=True)]
    results = workers.run(scalars_and_broadcasts, ranks=size, transport=kind)
    for summed, after_scalars, heard, sent in results:
        assert summed == expected
        assert heard == [[float(root)] * 5 for root in range(size)]
        assert after_scalars.get(scalars, 0) == 3 * 8 * (size - 1)
        assert sent.get(scalars, 0) == 3 * 8 * (size - 1)  # a barrier sends nothing
        assert sent.get(broadcast, 0) == 5 * 4 * (size - 1)  # each was the root once


def mixed(transport):
    """Asynchronous and synchronous calls on one buffer: each sees what the one before left."""
    group = Group(transport, axis="dp", counters=Counters())
    flat = torch.full((7,), group.rank + 1.0, dtype=torch.float64)
    group.all_reduce([flat], async_op=True)
    group.all_reduce([flat], async_op=True)
    group.reduce_scatter([flat])
    group.all_gather([flat])
    last = group.all_reduce([flat], async_op=True)
    group.close()  # finishes what was started
    assert last.done()
    return flat.numpy()


@pytest.mark.parametrize("size", SIZES)
def test_calls_run_in_the_order_they_were_made(workers, size):
    expected = np.full(7, sum(range(1, size + 1)) * size**3)
    for flat in workers.run(mixed, ranks=size):
        np.testing.assert_array_equal(flat, expected)


class Held(SingleRank):
    """Holds its first operation until told, and then a moment longer if nobody comes in."""

    def __init__(self):
        self.go, self.second = threading.Event(), threading.Event()
        self.entered, self.overlapped = [], False

    def all_reduce(self, x, op="sum"):
        self.entered.append("all_reduce")
        self.go.wait()
        self.overlapped = self.second.wait(0.05)
        return 0

    def barrier(self):
        self.entered.append("barrier")
        self.second.set()


def test_a_synchronous_call_waits_for_the_asynchronous_ones():
    """Two operations at once would mix up the order of messages between two ranks."""
    transport = Held()
    group = Group(transport, axis="dp", counters=Counters())
    future = group.all_reduce([torch.zeros(3)], async_op=True)
    assert not future.done()
    transport.go.set()
    group.barrier()
    assert future.done() and not transport.overlapped
    assert transport.entered == ["all_reduce", "barrier"]
    group.close()


class Cut(SingleRank):
    def all_reduce(self, x, op="sum"):
        raise RuntimeError("the wire was cut")


def test_an_error_of_the_progress_thread_reaches_the_caller():
    group = Group(Cut(), axis="dp", counters=Counters())
    future = group.all_reduce([torch.zeros(3)], async_op=True)
    with pytest.raises(RuntimeError, match="the wire was cut"):
        future.result()
    group.close()


def test_an_error_that_nobody_asked_for_reaches_the_next_call():
    group = Group(Cut(), axis="dp", counters=Counters())
    group.all_reduce([torch.zeros(3)], async_op=True)
    with pytest.raises(RuntimeError, match="the wire was cut"):
        group.barrier()
    group.close()


# -- a peer that dies


def lose_a_peer(pipe, met, rank, *, kind, through_thread):
    """Rank 1 dies without a word; rank 0 tells what its all-reduce said."""
    store = dist.FileStore(met)
    transport = choose(store, rank=rank, size=2, transport=kind, seconds=300)
    group = Group(transport, axis="dp", counters=Counters())
    group.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    flats = [torch.ones(1000)]
    try:
        if through_thread:
            group.all_reduce(flats, async_op=True).result()
        else:
            group.all_reduce(flats)
            group.all_reduce(flats)
    except RuntimeError as error:
        pipe.send(f"{type(error).__name__}: {error}")
    else:
        pipe.send("no error")
    pipe.close()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["engine", "torch"])  # tcp: test_tcp_faults.py
@pytest.mark.parametrize("through_thread", [False, True])
def test_a_dead_peer_is_told_soon(tmp_path, through_thread, kind):
    """Long before the 300 seconds after which a silent peer is given up."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    ranks = [
        context.Process(
            target=lose_a_peer,
            args=(theirs, str(tmp_path / "store"), rank),
            kwargs={"kind": kind, "through_thread": through_thread},
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    theirs.close()
    try:
        assert ours.poll(600), "the survivor hangs"
        told = ours.recv()
        assert told.startswith("PeerLost: rank 1 "), told
        assert "all_reduce(float32 [1000], sum) at " in told
    finally:
        for process in ranks:
            process.kill()
            process.join()
        ours.close()
    assert ranks[1].exitcode == -signal.SIGKILL


# -- between two ranks


def swap(transport):
    """Both send before they receive, of tensors that are not contiguous; then a wrong peer."""
    counters = Counters()
    group = Group(transport, axis="pp", counters=counters)
    mine = torch.arange(6.0).view(2, 3).T + 10 * group.rank
    theirs = torch.empty(3, 2)
    sent = group.send(mine, 1 - group.rank, async_op=True)
    group.receive(theirs, 1 - group.rank, async_op=True).result()
    sent.result()
    sentences = []
    for call in (group.send, group.receive):
        with pytest.raises(UserError) as caught:
            call(mine.contiguous(), group.rank)
        sentences.append(str(caught.value))
    group.close()
    return theirs, counters.sent(), sentences


def test_a_message_arrives_and_is_counted_by_who_sent_it(workers):
    for rank, (theirs, sent, sentences) in enumerate(workers.run(swap, ranks=2)):
        assert torch.equal(theirs, torch.arange(6.0).view(2, 3).T + 10 * (1 - rank))
        assert [(row.operation, count) for row, count in sent.items()] == [("send", 24)]
        assert sentences == [
            f"{word}: rank {rank} of 2 names rank {rank} as its peer"
            for word in ("send", "receive")
        ]


def test_a_group_alone_has_counters_of_its_own():
    """`connect` returned a group whose counts nobody could read."""
    one, other = Group(SingleRank()), Group(SingleRank())
    one.all_reduce(torch.ones(2))
    assert one.axis == "world" and sum(one.counters.calls.values()) > 0
    assert not sum(other.counters.calls.values())
