"""Transports: every operation of every kind against plain torch, bit for bit, and its bytes.

kinds    engine, tcp, torch      ranks   1 to 4
sizes    empty, one element, fewer than ranks, not divisible, more than fits in one turn
"""

import gc
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from howdah.comm.meeting import Kind
from howdah.comm.reduction import REDUCIBLE
from howdah.comm.signature import Disagreement
from howdah.comm.transport import SingleRank, shares

KINDS = ["engine", "tcp", "torch"]
SIZES = [1, 2, 3, 4]
LENGTHS = [0, 1, 2, 5, 1000, 300_001]  # the last: several turns through shared memory
OPS = ["sum", "mean", "min", "max", "product"]
FLOATS = [dtype for dtype in REDUCIBLE if dtype.is_floating_point]


def numbers(rank, length, dtype):
    """Numbers of very different size, so that the order of adding shows in the last bits."""
    draw = torch.Generator().manual_seed(1000 * length + rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 9, (length,), generator=draw).to(dtype)
    wide = torch.randn(length, generator=draw, dtype=torch.float64)
    return (wide * 10.0 ** torch.randint(-2, 2, (length,), generator=draw)).to(dtype)


def plain(size, length, dtype, op):
    """What every reduction must equal to the last bit: in rank order, rounded once."""
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    combine = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}
    total = numbers(0, length, dtype).to(wide)
    for rank in range(1, size):
        total = combine.get(op, torch.add)(total, numbers(rank, length, dtype).to(wide))
    return (total / size if op == "mean" else total).to(dtype)


def bits(tensor):
    """Any dtype as bytes: bf16 does not exist in numpy, and NaN equals itself."""
    return tensor.contiguous().view(torch.uint8).numpy().copy()


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, bits(other))


def uneven(length, size):
    """Counts that are no shares: everything beyond one element each belongs to rank 1."""
    counts = [min(1, length // size)] * size
    counts[1 % size] += length - sum(counts)
    return counts


# -- reductions


def reductions(transport, dtype, op):
    """all_reduce, reduce_scatter and reduce of every length; then what was sent."""
    found, sent = [], []
    for length in LENGTHS:
        x = numbers(transport.rank, length, dtype)
        counts = uneven(length, transport.size)
        whole, kept, root = x.clone(), x.clone(), transport.size - 1
        sent.append(transport.all_reduce(whole, op))
        out = torch.empty(counts[transport.rank], dtype=dtype)
        sent.append(transport.reduce_scatter(out, kept, counts, op))
        assert torch.equal(kept.nan_to_num(), x.nan_to_num())
        within = x.clone()
        transport.reduce_scatter(within.split(counts)[transport.rank], within, counts, op)
        one = x.clone()
        sent.append(transport.reduce(one, root, op))
        found += [bits(tensor) for tensor in (whole, out, within, one)]
    return found, sent


def check_reductions(results, size, dtype, op):
    for rank, (found, sent) in enumerate(results):
        expected, total = [], []
        for length in LENGTHS:
            whole, counts = plain(size, length, dtype, op), uneven(length, size)
            x, own = numbers(rank, length, dtype), shares(length, size)[rank]
            part = whole.split(counts)[rank]
            within = x.clone()
            within.split(counts)[rank].copy_(part)
            expected += [whole, part, within, whole if rank == size - 1 else x]
            total += [length - own + (size - 1) * own, length - counts[rank]]
            total += [0 if rank == size - 1 else length]
        same(found, expected)
        assert sent == [count * dtype.itemsize for count in total]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_sums_in_every_float(workers, size, kind):
    for dtype in FLOATS:
        results = workers.run(reductions, dtype, "sum", ranks=size, transport=kind)
        check_reductions(results, size, dtype, "sum")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_every_reduction(workers, op, kind):
    for dtype in (torch.float32, torch.bfloat16):
        results = workers.run(reductions, dtype, op, ranks=3, transport=kind)
        check_reductions(results, 3, dtype, op)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_whole_number(workers, kind):
    for dtype in REDUCIBLE:
        if not dtype.is_floating_point:
            results = workers.run(reductions, dtype, "sum", ranks=3, transport=kind)
            check_reductions(results, 3, dtype, "sum")


# -- moves


def moves(transport, dtype):
    """all_gather, gather, scatter, broadcast and all_to_all of every length."""
    rank, size, found, sent = transport.rank, transport.size, [], []
    for length in LENGTHS:
        counts, root = uneven(length, size), length % size
        whole = numbers(7, length, dtype)
        part = whole.split(counts)[rank].clone()
        everywhere = torch.empty(length, dtype=dtype)
        sent.append(transport.all_gather(everywhere, part, counts))
        within = torch.zeros(length, dtype=dtype)
        within.split(counts)[rank].copy_(part)
        transport.all_gather(within, within.split(counts)[rank], counts)
        at_root = torch.zeros(length, dtype=dtype)
        sent.append(transport.gather(at_root if rank == root else None, part, root, counts))
        back = torch.empty_like(part)
        sent.append(transport.scatter(back, whole if rank == root else None, root, counts))
        cast = numbers(rank, length, dtype)
        sent.append(transport.broadcast(cast, root))
        found += [bits(tensor) for tensor in (everywhere, within, at_root, back, cast)]
    return found, sent


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_moves(workers, size, kind):
    dtype = torch.bfloat16
    for rank, (found, sent) in enumerate(workers.run(moves, dtype, ranks=size, transport=kind)):
        expected, total = [], []
        for length in LENGTHS:
            counts, root, whole = uneven(length, size), length % size, numbers(7, length, dtype)
            at_root = whole if rank == root else torch.zeros_like(whole)
            part, cast = whole.split(counts)[rank], numbers(root, length, dtype)
            expected += [whole, whole, at_root, part, cast]
            total.append((size - 1) * counts[rank])
            total.append(0 if rank == root else counts[rank])
            total.append(length - counts[rank] if rank == root else 0)
            total.append((size - 1) * length if rank == root else 0)
        same(found, expected)
        assert sent == [count * dtype.itemsize for count in total]


def pairs(size, scale):
    """Elements that each rank sends to each; some send nothing."""
    return [[scale * ((3 * i + 5 * j) % 4) for j in range(size)] for i in range(size)]


def exchange(transport, scale):
    table, rank = pairs(transport.size, scale), transport.rank
    sent, received = table[rank], [row[rank] for row in table]
    x = torch.cat([torch.full((n,), 10.0 * rank + peer) for peer, n in enumerate(sent)])
    out = torch.empty(sum(received))
    return transport.all_to_all(out, x, sent, received), out.numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [0, 1, 200_000])
def test_all_to_all(workers, size, scale, kind):
    table = pairs(size, scale)
    results = workers.run(exchange, scale, ranks=size, transport=kind)
    for rank, (sent, out) in enumerate(results):
        values = [10.0 * peer + rank for peer in range(size)]
        np.testing.assert_array_equal(out, np.repeat(values, [row[rank] for row in table]))
        assert sent == 4 * (sum(table[rank]) - table[rank][rank])


def around(transport, length):
    """Every rank sends to the next, the even ones first; two messages, so that order counts."""
    rank, size = transport.rank, transport.size
    after, before = (rank + 1) % size, (rank - 1) % size
    heard = []
    for message in range(2):
        x, out = torch.full((length,), 10.0 * rank + message), torch.empty(length)
        calls = [lambda x=x: transport.send(x, after), lambda o=out: transport.receive(o, before)]
        for call in calls if rank % 2 == 0 else reversed(calls):
            call()
        heard.append(out.numpy())
    return heard


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("length", [0, 3, 100_000])
def test_messages_of_a_pair_arrive_in_order(workers, size, length, kind):
    for rank, heard in enumerate(workers.run(around, length, ranks=size, transport=kind)):
        before = (rank - 1) % size
        for message, out in enumerate(heard):
            np.testing.assert_array_equal(out, np.full(length, 10.0 * before + message))


def together(transport):
    """Operations that are started together; the same operations one by one."""
    found = []
    for start in (transport.group, torch.no_grad):  # the second starts nothing together
        flats = [numbers(transport.rank, length, torch.float32) for length in LENGTHS]
        root, out = numbers(transport.rank, 9, torch.float32), torch.empty(4 * transport.size)
        with start():
            for flat in flats:
                transport.all_reduce(flat)
            transport.broadcast(root, 1)
            transport.all_gather(out, torch.full((4,), 1.0), [4] * transport.size)
        found.append([bits(tensor) for tensor in (*flats, root, out)])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_operations_that_are_started_together(workers, kind):
    for one, other in workers.run(together, ranks=3, transport=kind):
        for found, expected in zip(one, other, strict=True):
            np.testing.assert_array_equal(found, expected)


# -- ranks that disagree


def disagree(transport, case):
    """What this rank is told; the calls stand on lines of their own, which it must name."""
    x, odd = torch.ones(10), transport.rank == 1
    transport.barrier()
    try:
        if case == "operation" and odd:
            transport.broadcast(x, 0)
        elif case == "operation":
            transport.all_reduce(x)
        elif case == "size":
            transport.all_reduce(x[: 7 if odd else 10])
        elif case == "dtype":
            transport.all_reduce(x.to(torch.int32 if odd else torch.float32))
        elif case == "op":
            transport.all_reduce(x, "max" if odd else "sum")
        elif case == "root":
            transport.broadcast(x, int(odd))
        elif case == "counts":
            transport.all_gather(torch.ones(4), x[: 2 if odd else 1], [2, 2] if odd else [1, 3])
        elif case == "pair":
            mine, theirs = (3, 4) if odd else (5, 5)
            out, x = torch.ones(theirs + 1), torch.ones(mine + 1)
            pair = [[mine, 1], [theirs, 1]] if odd else [[1, mine], [1, theirs]]
            transport.all_to_all(out, x, *pair)
        elif case == "more":
            for _ in range(2 if odd else 1):
                transport.all_reduce(x)
            transport.barrier()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


CASES = {
    "operation": ("all_reduce(float32 [10], sum)", "broadcast(float32 [10], root 0)"),
    "size": ("all_reduce(float32 [10], sum)", "all_reduce(float32 [7], sum)"),
    "dtype": ("all_reduce(float32 [10], sum)", "all_reduce(int32 [10], sum)"),
    "op": ("all_reduce(float32 [10], sum)", "all_reduce(float32 [10], max)"),
    "root": ("broadcast(float32 [10], root 0)", "broadcast(float32 [10], root 1)"),
    "counts": ("all_gather(float32 [1 3])", "all_gather(float32 [2 2])"),
    "more": ("barrier", "all_reduce(float32 [10], sum)"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_disagree_are_told_by_whom_and_where(workers, case, kind):
    told = workers.run(disagree, case, ranks=2, transport=kind)
    calls = CASES[case]
    for text in told:
        one, _, other = text.partition(", but ")
        first = int(one.startswith("Disagreement: rank 1 called "))
        assert one.startswith(f"Disagreement: rank {first} called "), text
        assert other.startswith(f"rank {1 - first} ")
        assert calls[first] in one and calls[1 - first] in other
        assert "test_transport.py:" in one and "test_transport.py:" in other


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_that_disagree_are_told(workers, kind):
    told = workers.run(disagree, "pair", ranks=2, transport=kind)
    assert all(text.startswith("Disagreement: ") for text in told), told


def disagree_late(transport):
    """Many calls at once, of which one differs beyond what a record holds."""
    x = torch.ones(10)
    try:
        with transport.group():
            for number in range(20):
                length = 7 if transport.rank == 1 and number == 15 else 10
                transport.all_reduce(x[:length])
    except Disagreement as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_of_many_calls_that_differs_is_told(workers, kind):
    """By torch beside those that the record holds; the others run one after the other."""
    for text in workers.run(disagree_late, ranks=3, transport=kind):
        assert "all_reduce(float32 [10], sum)" in text
        assert "all_reduce(float32 [7], sum)" in text
        assert "test_transport.py:" in text


def disagree_on_late_counts(transport):
    """Many calls at once, of which the last has other counts for the ranks."""
    counts = [4, 5, 3] if transport.rank == 1 else [4, 4, 4]
    try:
        with transport.group():
            for _ in range(9):
                transport.all_reduce(torch.ones(10))
            transport.all_gather(torch.ones(12), torch.ones(counts[transport.rank]), counts)
    except Disagreement as error:
        return str(error)


def test_counts_that_are_cut_are_told(workers):
    """The torch transport alone describes many calls by one record."""
    zero, one, two = workers.run(disagree_on_late_counts, ranks=3, transport="torch")
    assert zero.endswith("; the counts differ first for rank 1: 4 and 5")
    assert one.endswith("; the counts differ first for rank 1: 5 and 4")
    assert two.endswith("; the counts differ first for rank 1: 4 and 5")


# -- what is left


def open_files():
    """What this process holds open: numbers, with what they stand for."""
    gc.collect()
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.add(f"{entry.name}: {os.readlink(entry)}")
    return found


def come_and_go(transport):
    """The files that are open before, while and after some groups are made and closed."""
    before, during = open_files(), set()
    for _ in range(2):
        other = transport.among(range(transport.size))
        other.all_reduce(torch.ones(5))
        during |= open_files() - before
        transport.barrier()  # whoever leaves earlier takes its links along
        other.close()
        del other
    return len(during), sorted(open_files() - before)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_stays_open(workers, kind):
    for during, left in workers.run(come_and_go, ranks=3, transport=kind):
        assert during > 0  # sockets, or what watches processes
        assert left == []


def test_alone_everything_is_a_copy():
    transport = SingleRank()
    assert (transport.rank, transport.size, transport.link) == (0, 1, "none")
    with pytest.raises(AssertionError):
        transport.send(torch.zeros(1), 0)


def test_every_kind_is_tested():
    """Those of a backend object of torch: test_native.py."""
    assert sorted([*KINDS, "mpi", "nccl"]) == sorted(Kind.__args__)
