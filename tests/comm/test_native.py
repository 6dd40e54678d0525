"""The wire of backend objects, over gloo's: every operation, its bytes, and how it ends.

On GPUs the object is NCCL's; what that does between cards is not proved here (docs/gpu.md).
"""

from uuid import uuid4

import numpy as np
import pytest
import torch
import torch.distributed as dist
from played_streams import Played, PlayedBoth
from test_transport import (
    LENGTHS,
    SIZES,
    around,
    bits,
    exchange,
    moves,
    numbers,
    pairs,
    plain,
    same,
    together,
    uneven,
)

from howdah.comm import native as native_module
from howdah.comm.both import Both, explain_losses_in
from howdah.comm.group import Group
from howdah.comm.native import Native
from howdah.comm.reduction import REDUCIBLE
from howdah.comm.signature import Disagreement
from howdah.comm.transport import PeerLost, SingleRank, shares
from howdah.plan.flat_buffers import share

GLOO_LACKS = (torch.int16,)  # among those that can be reduced


@pytest.fixture
def meet(tmp_path):
    """A new file at which ranks meet."""
    return str(tmp_path / uuid4().hex)


def wire(path, transport):
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = dist.FileStore(path, transport.size)
    return Native(
        dist.ProcessGroupGloo(store, transport.rank, transport.size, options), link="gloo"
    )


def on_wire(transport, path, function, *arguments):
    """Calls a function of test_transport.py with a native transport of as many ranks."""
    native = wire(path, transport)
    try:
        return function(native, *arguments)
    finally:
        native.close()


# -- operations


def reduced(transport, dtype, op):
    """Each reduction of every length, with equal and with unequal counts; then what was sent."""
    found, sent = [], []
    for length in LENGTHS:
        x, size, rank = numbers(transport.rank, length, dtype), transport.size, transport.rank
        root = size - 1
        for counts in (uneven(length, size), [length // size] * size):
            part = x[: sum(counts)].clone()
            out = torch.empty(counts[rank], dtype=dtype)
            sent.append(transport.reduce_scatter(out, part.clone(), counts, op))
            transport.reduce_scatter(part.split(counts)[rank], part, counts, op)
            assert torch.equal(part.split(counts)[rank], out)
            found.append(bits(out))
        whole, one = x.clone(), x.clone()
        sent.append(transport.all_reduce(whole, op))
        sent.append(transport.reduce(one, root, op))
        if rank != root:
            assert torch.equal(one, x)
        found += [bits(whole), bits(one if rank == root else whole)]
    return found, sent


def near(found, expected, terms):
    """Equal but for the order of the additions, which is the backend's."""
    found = torch.from_numpy(found).view(expected.dtype)
    if not expected.dtype.is_floating_point:
        assert torch.equal(found, expected)
        return
    error = (found.double() - expected.double()).abs()
    assert (
        error <= len(terms) * torch.finfo(expected.dtype).eps * sum(t.abs() for t in terms)
    ).all()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("op", ["sum", pytest.param("max", marks=pytest.mark.slow)])
def test_reductions(workers, meet, size, op):
    for dtype in REDUCIBLE:
        if dtype in GLOO_LACKS:
            continue
        results = workers.run(
            on_wire, f"{meet}{dtype}{op}", reduced, dtype, op, ranks=size, transport=None
        )
        for rank, (found, sent) in enumerate(results):
            expected, total, at = [], [], iter(found)
            for length in LENGTHS:
                terms = [numbers(r, length, dtype).double() for r in range(size)]
                whole = plain(size, length, dtype, op)
                for counts in (uneven(length, size), [length // size] * size):
                    begin = sum(counts[:rank])
                    own = slice(begin, begin + counts[rank])
                    near(next(at), whole[own], [term[own] for term in terms])
                    total.append(sum(counts) - counts[rank])
                near(next(at), whole, terms)
                near(next(at), whole, terms)
                own = shares(length, size)[rank]
                total += [length - own + (size - 1) * own, 0 if rank == size - 1 else length]
            assert sent == [count * dtype.itemsize for count in total], expected


def test_a_mean_is_a_sum_that_is_divided(workers, meet):
    results = workers.run(on_wire, meet, reduced, torch.float32, "mean", ranks=2)
    again = workers.run(on_wire, f"{meet}2", reduced, torch.float32, "sum", ranks=2)
    for (means, _), (sums, _) in zip(results, again, strict=True):
        for mean, total in zip(means, sums, strict=True):
            half = torch.from_numpy(total).view(torch.float32) / 2
            np.testing.assert_array_equal(torch.from_numpy(mean).view(torch.float32), half)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", SIZES[1:])
def test_moves(workers, meet, size):
    results = workers.run(on_wire, meet, moves, torch.float32, ranks=size)
    for rank, (found, sent) in enumerate(results):
        expected, total = [], []
        for length in LENGTHS:
            counts, root, whole = (
                uneven(length, size),
                length % size,
                numbers(7, length, torch.float32),
            )
            at_root = whole if rank == root else torch.zeros_like(whole)
            part, cast = whole.split(counts)[rank], numbers(root, length, torch.float32)
            expected += [whole, whole, at_root, part, cast]
            total += [(size - 1) * counts[rank], 0 if rank == root else counts[rank]]
            total.append(length - counts[rank] if rank == root else 0)
            total.append((size - 1) * length if rank == root else 0)
        same(found, expected)
        assert sent == [4 * count for count in total]


@pytest.mark.parametrize("scale", [0, 1, 2000])
def test_all_to_all(workers, meet, scale):
    table = pairs(3, scale)
    for rank, (sent, out) in enumerate(workers.run(on_wire, meet, exchange, scale, ranks=3)):
        values = [10.0 * peer + rank for peer in range(3)]
        np.testing.assert_array_equal(out, np.repeat(values, [row[rank] for row in table]))
        assert sent == 4 * (sum(table[rank]) - table[rank][rank])


def test_messages_of_a_pair_arrive_in_order(workers, meet):
    for rank, heard in enumerate(workers.run(on_wire, meet, around, 3, ranks=4)):
        for message, out in enumerate(heard):
            np.testing.assert_array_equal(out, np.full(3, 10.0 * ((rank - 1) % 4) + message))


def test_operations_that_are_started_together(workers, meet):
    for one, other in workers.run(on_wire, meet, together, ranks=2):
        for found, expected in zip(one, other, strict=True):
            np.testing.assert_array_equal(found, expected)


def several(transport, path, length, op):
    """The own shares of two buffers that are reduced together."""
    native = wire(path, transport)
    group = Group(native, axis="dp")
    flats = [numbers(native.rank, length, torch.float32) + at for at in range(2)]
    group.reduce_scatter(flats, op=op)
    group.close()
    native.close()
    return [bits(group.own_shard(flat)) for flat in flats]


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("length", [15, 17])
def test_what_follows_an_operation_waits_for_the_end_of_its_group(workers, meet, length, op):
    """The copy from the pieces of unequal shares, and the division, once came before the sum."""
    ranks = workers.run(several, meet, length, op, ranks=3)
    for at in range(2):
        terms = [numbers(rank, length, torch.float32) + at for rank in range(3)]
        whole = sum(terms) / (3 if op == "mean" else 1)
        for rank, found in enumerate(ranks):
            own = slice(*share(length, 3, rank))
            near(found[at], whole[own], [term[own] for term in terms])


# -- one NCCL group


class NoLane:
    """A lane that keeps nothing."""

    def keep(self, tensors):
        pass


class Cards:
    """A backend that notes how it is called, as NCCL would be on a lane."""

    supports_coalescing = True

    def __init__(self):
        self.calls = []

    def rank(self):
        return 0

    def size(self):
        return 2

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name)


def test_at_most_so_many_operations_are_one_group(monkeypatch):
    """A longer one was seen to hang: pytorch #174288."""
    monkeypatch.setattr(native_module, "MOST_TOGETHER", 3)
    backend = Cards()
    native = Native(backend, link="nccl", lane=NoLane())
    with native.group():
        for _ in range(4):
            native.all_reduce(torch.ones(2))
    assert backend.calls == [
        "_start_coalescing",
        *["allreduce"] * 3,
        "_end_coalescing",
        "allreduce",
    ]


def test_empty_tensors_are_not_sent_alone():
    backend = Cards()
    native = Native(backend, link="nccl", lane=NoLane())
    assert native.broadcast(torch.empty(0), 0) == native.send(torch.empty(0), 1) == 0
    assert not backend.calls


def test_torch_takes_the_calls_of_a_group_without_arguments():
    """The doubles take any."""
    for name in ("_start_coalescing", "_end_coalescing"):
        signature = getattr(dist.ProcessGroupGloo, name).__doc__.splitlines()[0]
        assert "(self: " in signature and "," not in signature


# -- its end


def abandoned(transport, path):
    """Rank 1 leaves; rank 0 waits for it, until the wire is aborted or gloo notices."""
    native = wire(path, transport)
    if transport.rank == 1:
        native.abort()
        return ""
    with pytest.raises(PeerLost) as lost:
        native.all_reduce(torch.ones(3))
    return str(lost.value)


@pytest.mark.slow
def test_who_waits_on_a_wire_that_ends_is_told_which_call_it_was(ended_workers, meet):
    said, _ = ended_workers.run(abandoned, meet, ranks=2)
    assert "this rank called #1 all_reduce(float32 [3], sum) at" in said
    assert "test_native.py" in said


def test_an_aborted_wire_says_why_at_every_call():
    native = Native(Cards(), link="nccl")
    native.lose("rank 1 has ended")
    for call in (native.check, lambda: native.all_reduce(torch.ones(1))):
        with pytest.raises(PeerLost, match="rank 1 has ended; this rank called nothing yet"):
            call()
    native.close()
    assert native._backend.calls == ["abort"], "an aborted backend is not shut down, too"


# -- beside the wire of the host


def by_both(transport, path):
    """Tensors of the GPU, here float32, go over its wire; the rest over that of the host."""
    both = PlayedBoth(transport, Played(), path)
    group = Group(both, axis="dp")
    card, host = torch.full((4,), 1.0 + both.rank), torch.full((4,), both.rank, dtype=torch.int64)
    handle = group.all_reduce(card, async_op=True)
    group.all_reduce(host)
    (total,) = group.sum_scalars([1.0])
    handle.result()
    part = torch.full((3,), float(both.rank))
    gathered, scattered = torch.empty(6), torch.empty(2)
    group.all_gather(gathered, part)
    group.reduce_scatter(scattered, card.clone())
    pair = part.clone()
    if both.rank == 0:
        group.send(pair, 1)
    else:
        group.receive(pair, 0)
    group.barrier()
    group.close()
    both.close()
    lists = [x.tolist() for x in (card, host, gathered, scattered, pair)]
    return lists, total, {(row.operation, row.link) for row in group.counters.sent()}


def test_tensors_of_the_gpu_and_of_the_host_have_their_own_wires(workers, meet):
    for rank, (lists, total, rows) in enumerate(workers.run(by_both, meet, ranks=2)):
        card, host, gathered, scattered, pair = lists
        assert card == [3.0] * 4 and host == [1] * 4 and total == 2.0
        assert gathered == [0.0] * 3 + [1.0] * 3 and scattered == [6.0] * 2 and pair == [0.0] * 3
        own = {(row, "played") for row in ("reduce_scatter", "all_gather")}
        own |= {("send", "played")} if rank == 0 else set()
        beside = {("scalars", "shared"), ("reduce_scatter", "shared"), ("all_gather", "shared")}
        assert rows == own | beside


def apart(transport, path):
    """Rank 1 makes another call; both go on, as GPUs would, and are compared afterwards."""
    both = PlayedBoth(transport, Played(), path)
    x = torch.ones(4)
    both.compare()
    both.cards.all_reduce(x)
    both.compare()
    (both.cards.all_reduce if both.rank else both.cards.broadcast)(x, *(() if both.rank else (0,)))
    with pytest.raises(Disagreement) as said:
        both.compare()
    both.abort()
    return str(said.value)


def test_ledgers_tell_which_ranks_called_what(ended_workers, meet):
    for said in ended_workers.run(apart, meet, ranks=2):
        assert "rank 0 made 2 calls, the last #2 broadcast(float32 [4], root 0) at" in said
        assert "but rank 1 2, the last #2 all_reduce(float32 [4], sum) at" in said


def test_in_checked_mode_calls_are_compared_before_they_are_made(ended_workers, meet):
    for said in ended_workers.run(checked, meet, ranks=2):
        assert "#1 all_gather(float32 [2 2])" in said and "#1 all_reduce(float32 [4], sum)" in said


def checked(transport, path):
    both = PlayedBoth(transport, Played(), path)
    both.cards.agree = both.compare
    x = torch.ones(4)
    with pytest.raises(Disagreement) as said:
        both.all_reduce(x) if both.rank else both.all_gather(x, x[:2], [2, 2])
    both.abort()
    return str(said.value)


def test_a_run_says_where_losses_are_explained(tmp_path):
    class Watches:
        folder = None

    host = SingleRank()
    watcher = Watches()
    explain_losses_in(Both(host, Native(Cards(), link="nccl"), watcher=watcher), tmp_path)
    assert watcher.folder == tmp_path
    explain_losses_in(host, tmp_path)  # a wire that compares calls and names the lost itself
