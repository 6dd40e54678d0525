"""Every operation of a group: dtype, reduction, number of ranks and transport, against plain torch.

engine   shared memory          native   gloo's own collectives, as NCCL's are called
torch    messages over gloo     both     float32 on streams over native, the rest on the engine

Numbers are small and whole, so that every order of additions gives the same bits. Bits of sums that
round: test_transport.py, test_group.py.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import NamedTuple
from uuid import uuid4

import pytest
import torch
from played_streams import Played, PlayedBoth
from test_native import GLOO_LACKS, wire

from howdah.base.errors import UserError
from howdah.comm.group import Group
from howdah.comm.reduction import REDUCIBLE
from howdah.comm.transport import SingleRank, shares
from howdah.plan.recording import Traffic

KINDS = ["engine", "torch", "tcp", "native", "both"]
MOVED = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16)
OPS = {
    "sum": lambda terms: terms.sum(0, dtype=terms.dtype),
    "mean": lambda terms: terms.mean(0),
    "min": lambda terms: terms.amin(0),
    "max": lambda terms: terms.amax(0),
    "product": lambda terms: terms.prod(0, dtype=terms.dtype),
}
LENGTHS = [1, 7]  # rows: fewer than ranks, and not divisible
ROW = 3  # elements


@pytest.fixture
def meet(tmp_path):
    """A new file at which ranks meet."""
    return str(tmp_path / uuid4().hex)


def over(transport, kind, path, function, *arguments):
    """Calls a function with a transport of this kind."""
    with ExitStack() as stack:
        if kind == "native":
            transport = stack.enter_context(closing(wire(path, transport)))
        if kind == "both":
            played = Played()
            transport = stack.enter_context(closing(PlayedBoth(transport, played, path)))
            stack.enter_context(played.checked())
        return function(transport, *arguments)


def run(workers, kind, meet, function, *arguments, ranks):
    base = kind if kind in ("engine", "torch", "tcp") else None
    return workers.run(over, kind, meet, function, *arguments, ranks=ranks, transport=base)


def numbers(rank, rows, dtype, salt=0):
    """Whole numbers from 0 to 3."""
    draw = torch.Generator().manual_seed(97 * rank + 11 * rows + salt)
    return torch.randint(0, 4, (rows, ROW), generator=draw).to(dtype)


# -- each operation: how it is called, what it must give, and what is sent


class Case(NamedTuple):
    """One call on this rank: what `out` must be after it, and the bytes sent by operation."""

    out: torch.Tensor | None
    expected: torch.Tensor | None
    sent: dict[str, int]
    call: Callable


def reductions(group, dtype, rows, op):
    """all_reduce, reduce and reduce_scatter."""
    size, rank, root = group.size, group.rank, rows % group.size
    terms = [numbers(peer, rows, dtype) for peer in range(size)]
    total, width = OPS[op](torch.stack(terms)), ROW * dtype.itemsize
    # An all-reduce cuts elements into shares, and a reduce-scatter rows.
    own, part = shares(rows * ROW, size)[rank], shares(rows, size)[rank]
    first, second = (rows * ROW - own) * dtype.itemsize, (size - 1) * own * dtype.itemsize
    x = terms[rank].clone()
    sent = {"reduce_scatter": first, "all_gather": second}
    yield Case(x, total, sent, partial(group.all_reduce, x, op=op))
    x, is_root = terms[rank].clone(), rank == root
    sent = {"reduce": 0 if is_root else rows * width}
    yield Case(x, total if is_root else terms[rank], sent, partial(group.reduce, x, root, op=op))
    out, x = torch.zeros(part, ROW, dtype=dtype), terms[rank].clone()
    expected, sent = (
        total.split(shares(rows, size))[rank],
        {"reduce_scatter": (rows - part) * width},
    )
    yield Case(out, expected, sent, partial(group.reduce_scatter, out, x, op=op))


def moves(group, dtype, rows):
    """All that moves elements and does not reduce them."""
    size, rank, root = group.size, group.rank, rows % group.size
    cuts, whole, width = shares(rows, size), numbers(9, rows, dtype), ROW * dtype.itemsize
    own, is_root, others = whole.split(cuts)[rank].clone(), rank == root, size - 1
    empty, part = partial(torch.zeros, dtype=dtype), cuts[rank]

    out, sent = empty(rows, ROW), {"all_gather": others * part * width}
    yield Case(out, whole, sent, partial(group.all_gather, out, own))
    out = empty(rows, ROW) if is_root else None
    sent = {"gather": 0 if is_root else part * width}
    yield Case(out, whole, sent, partial(group.gather, out, own, root, counts=cuts))
    out, x = torch.zeros_like(own), whole.clone() if is_root else None
    sent = {"scatter": (rows - part) * width * is_root}
    yield Case(out, own, sent, partial(group.scatter, out, x, root, counts=cuts))
    x, sent = numbers(rank, rows, dtype), {"broadcast": others * rows * width * is_root}
    yield Case(x, numbers(root, rows, dtype), sent, partial(group.broadcast, x, root))
    out, x = empty(part * size, ROW), numbers(rank, rows, dtype)
    heard = [numbers(peer, rows, dtype).split(cuts)[rank] for peer in range(size)]
    sent = {"all_to_all": (rows - part) * width}
    yield Case(out, torch.cat(heard), sent, partial(group.all_to_all, out, x))
    out, x, before = empty(rows, ROW), numbers(rank, rows, dtype, 5), (rank - 1) % size
    call = partial(group.exchange, out, x, (rank + 1) % size, before)
    yield Case(out, numbers(before, rows, dtype, 5), {"send": rows * width}, call)
    x, out, far = numbers(root, rows, dtype, 7), empty(rows, ROW), (root + 1) % size
    if is_root:
        yield Case(x, x.clone(), {"send": rows * width}, partial(group.send, x, far))
    if rank == far:
        yield Case(out, x, {}, partial(group.receive, out, root))
    out = torch.zeros_like(own)
    yield Case(out, own, {"copy": 0}, partial(group.copy, out, own))


def cases(group, dtype, lengths):
    for rows in lengths:
        for op in OPS if dtype in REDUCIBLE else []:
            if op != "mean" or dtype.is_floating_point:
                yield from reductions(group, dtype, rows, op)
        yield from moves(group, dtype, rows)


def each_way(transport, dtypes):
    """Each case by itself, then all asynchronously, then all together; and what was counted."""
    for way in ("alone", "async", "together"):
        group, predicted = Group(transport, axis="dp"), {}
        for dtype in dtypes:
            every = list(cases(group, dtype, LENGTHS if way == "alone" else LENGTHS[-1:]))
            play(group, every, way)
            for case in every:
                if case.out is not None:
                    found, expected = (x.contiguous().view(torch.uint8) for x in case[:2])
                    assert torch.equal(found, expected), (way, dtype, case.call)
                row = transport.wire_of(torch.empty(0, dtype=dtype)).link
                for operation, sent in case.sent.items():
                    key = Traffic("dp", operation, row)
                    predicted[key] = predicted.get(key, 0) + sent
        group.close()
        assert group.counters.sent() == {key: sent for key, sent in predicted.items() if sent}


def play(group, every, way):
    """Makes the calls of some cases."""
    if way == "alone":
        for case in every:
            case.call()
    elif way == "async":
        handles = [case.call(async_op=True) for case in every]
        handles[-1].result()  # those before it have ended, too
        assert all(handle.done() for handle in handles)
    else:
        with group.together() as handle:
            for case in every:
                assert case.call() is handle
        handle.result()


QUICK = [("engine", 2), ("engine", 3), ("engine", 4), ("torch", 3), ("native", 3), ("both", 2)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, marks=() if (kind, size) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for size in (2, 3, 4)
    ],
)
def test_every_operation_gives_what_torch_gives(workers, meet, kind, size):
    dtypes = [
        dtype for dtype in (*REDUCIBLE, *MOVED) if kind != "native" or dtype not in GLOO_LACKS
    ]
    run(workers, kind, meet, each_way, dtypes, ranks=size)


def test_alone_every_operation_is_a_copy():
    group = Group(SingleRank())
    for dtype in (torch.float32, torch.bool):
        x, out = numbers(0, 5, dtype), torch.zeros(5, ROW, dtype=dtype)
        for call in (group.gather, group.scatter):
            out.zero_()
            call(out, x, 0)
            assert torch.equal(out, x)
    group.reduce(x.float(), 0, op="mean")
    with pytest.raises(UserError, match="send: rank 0 of 1 names rank 0 as its peer"):
        group.exchange(out, x, 0, 0)
    group.close()


# -- the order of asynchronous operations


def chain(transport, mode):
    """Each operation uses what the one before has left; only the last handle is waited for."""
    group = Group(transport)
    rank, size, asks = group.rank, group.size, {"async_op": mode == "async"}
    x, y, spread = torch.full((2,), rank + 1.0), torch.zeros(2), torch.zeros(2 * size)
    handles = [
        group.copy(y, x, **asks),
        group.reduce(y, 0, **asks),
        group.broadcast(y, 0, **asks),
        group.exchange(x, y, (rank + 1) % size, (rank - 1) % size, **asks),
        group.all_reduce(x, op="max", **asks),
        group.gather(spread if rank == 1 else None, x, 1, **asks),
        group.scatter(y, spread if rank == 1 else None, 1, **asks),
        group.all_reduce(y, **asks),
    ]
    handles[-1].result()
    assert all(handle.done() for handle in handles)
    group.close()
    return y.tolist()


@pytest.mark.parametrize("mode", ["alone", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_operations_run_in_the_order_of_their_calls(workers, meet, kind, mode):
    for found in run(workers, kind, meet, chain, mode, ranks=3):
        assert found == [3.0 * (1 + 2 + 3)] * 2


def signals(transport):
    """Rank 0 writes, signals, and waits; the others read what it wrote, in shared memory."""
    group = Group(transport)
    asks = {"async_op": True}
    x, seen = group.allocate((3,)), []
    for lap in range(1, 4):
        if group.rank == 0:
            x.fill_(lap)
            for peer in range(1, group.size):
                group.signal(peer)
            for peer in range(1, group.size):
                group.wait(peer, **asks).result()
        else:
            group.wait(0)
            seen += transport.there(x, 0).tolist() if group.link == "shared" else []
            group.signal(0, **asks).result()
    group.barrier(**asks).result()
    group.close()
    assert not group.counters.sent()
    return seen


@pytest.mark.parametrize("kind", ["engine", "torch", "tcp", "native"])
def test_each_signal_lets_one_wait_return(workers, meet, kind):
    zero, *others = run(workers, kind, meet, signals, ranks=3)
    seen = [1.0] * 3 + [2.0] * 3 + [3.0] * 3 if kind == "engine" else []
    assert zero == [] and others == [seen] * 2


# -- several operations in one call


def crossing(transport):
    """All send before they receive, twice, around a sum, which comes at another place on each."""
    group = Group(transport)
    rank, size = group.rank, group.size
    total, heard = torch.full((3,), rank + 1.0), torch.zeros(2, size)
    with group.together():
        for at in range(2):
            for peer in set(range(size)) - {rank}:
                group.send(torch.tensor([10.0 * rank + at]), peer)
            if at == rank % 2:
                group.all_reduce(total)
        with group.together():  # part of the outer one
            for at in range(2):
                for peer in set(range(size)) - {rank}:
                    group.receive(heard[at, peer : peer + 1], peer)
    group.close()
    calls = sorted((row.operation, count) for row, count in group.counters.calls.items())
    return total.tolist(), heard.tolist(), calls


@pytest.mark.parametrize("kind", ["engine", "torch", "tcp", "native"])
def test_messages_of_a_block_go_first_and_cross(workers, meet, kind):
    for rank, (total, heard, calls) in enumerate(run(workers, kind, meet, crossing, ranks=3)):
        assert total == [6.0] * 3
        assert heard == [[10.0 * p + at if p != rank else 0.0 for p in range(3)] for at in range(2)]
        assert calls == [("all_gather", 1), ("receive", 4), ("reduce_scatter", 1), ("send", 4)]


def test_what_a_block_refuses():
    group = Group(SingleRank())
    x = torch.ones(2)
    for call in (group.barrier, partial(group.sum_scalars, [1.0])):
        with pytest.raises(UserError, match="inside of together"), group.together():
            call()
    earlier = group.copy(x, x, async_op=True)
    with pytest.raises(UserError, match="follows no handle"), group.together() as handle:
        group.all_reduce(x, after=earlier)
    assert not handle.done()
    with pytest.raises(UserError, match="when the block has ended"):
        group.all_reduce(x, after=handle)
    with group.together(after=earlier) as handle:
        early = group.copy(x, x + 1)
        with pytest.raises(UserError, match="when the block has ended"):
            early.result()
        with pytest.raises(UserError, match="inside of another"), group.together(after=earlier):
            pass
    group.all_reduce(x, after=handle)
    assert handle.done() and x.tolist() == [2.0, 2.0]
    with group.together() as handle:
        pass
    assert handle.done()
    group.close()


def test_nothing_of_a_block_that_raises_is_started():
    group = Group(SingleRank())
    x, y = torch.zeros(2), torch.ones(2)
    with pytest.raises(ZeroDivisionError), group.together():
        group.all_reduce(x)
        raise ZeroDivisionError
    group.copy(x, y)
    assert not any("reduce" in row.operation for row in group.counters.calls)
    group.close()
