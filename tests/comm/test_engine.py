"""The engine: every operation against plain torch, equal bits on all ranks, every byte counted."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from howdah.comm.engine import connect_engine
from howdah.comm.meeting import meet, own_hello
from howdah.comm.transport import shares

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
OPS = ["sum", "mean", "min", "max", "product"]
SIZES = [1, 2, 3, 4]
LONG = 700_001  # odd, and several segments of every operation
COUNTS = [0, 1, 7, 1024, 20_003, LONG]


@pytest.fixture(scope="module")
def together(workers):
    """Runs function(engine, *arguments) on each of `ranks` engines, and closes them."""
    runs = iter(range(1_000_000))

    def run(function, *arguments, ranks):
        return workers.run(with_engine, next(runs), function, arguments, ranks=ranks)

    return run


def join(store, *, rank, size, **options):
    """The engine of ranks that meet in `store`."""
    words = meet(store, own_hello(), rank=rank, size=size, seconds=600)
    return connect_engine(store, [word.process for word in words], rank=rank, **options)


def with_engine(transport, run, function, arguments):
    store = transport.among.store if transport.size > 1 else dist.HashStore()
    store = dist.PrefixStore(f"engine{run}", store)
    deadline = getattr(function, "deadline", 600)
    rank, size = transport.rank, transport.size
    engine = join(store, rank=rank, size=size, arena_bytes=1 << 26, deadline=deadline)
    try:
        return function(engine, *arguments)
    finally:
        engine.close()


def numbers(rank, count, dtype, *, key=0):
    """Of very different size, so that the order of adding shows in the last bits."""
    draw = torch.Generator().manual_seed(1000 * key + rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (count,), generator=draw).to(dtype)
    wide = torch.randn(count, generator=draw, dtype=torch.float64)
    return (wide * 10.0 ** torch.randint(-3, 3, (count,), generator=draw)).to(dtype)


def plain(parts, op):
    """The simplest reduction: in rank order, in float32 for the half formats, rounded once."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        combine = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}
        total = combine.get(op, torch.add)(total, part.to(wide))
    if op == "mean":
        total = total / len(parts)
    return total.to(parts[0].dtype)


def same(x, y):
    """Equal bits, NaN and the sign of zero included."""
    return x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def uneven(count, size):
    """Parts of very different sizes, one of them empty."""
    if size == 1:
        return [count]
    parts = [count // 5, 0, count // 2, count // 7][:size]
    return [count - sum(parts[1:]), *parts[1:]]


def part(x, counts, rank):
    """The part of x that belongs to a rank: a view."""
    return x.split(list(counts))[rank]


def place(engine, x, resident):
    """A copy of x, in private memory or in the arena."""
    return x.clone() if not resident else engine.allocate(x.numel(), x.dtype).copy_(x)


# -- reductions


def cases():
    """(dtype, op, count): every pair of dtype and op, and for two dtypes every count."""
    for dtype in FLOATS + INTEGERS:
        for op in OPS if dtype.is_floating_point else ["sum", "min", "max", "product"]:
            yield dtype, op, 20_003
    for dtype in (torch.float32, torch.bfloat16):
        yield from ((dtype, "sum", count) for count in COUNTS)


def reductions(engine, resident):
    """The reductions that went wrong."""
    wrong, rank, size = [], engine.rank, engine.size
    for dtype, op, count in cases():
        parts = [numbers(r, count, dtype) for r in range(size)]
        want, root, width = plain(parts, op), size - 1, dtype.itemsize
        own = shares(count, size)[rank]

        x = place(engine, parts[rank], resident)
        sent = engine.all_reduce(x, op)
        if not same(x, want) or sent != (count - own + (size - 1) * own) * width:
            wrong.append(f"all_reduce {op} of {count} {dtype}")

        x.copy_(parts[rank])
        sent = engine.reduce(x, root, op)
        kept, bytes = (want, 0) if rank == root else (parts[rank], count * width)
        if not same(x, kept) or sent != bytes:
            wrong.append(f"reduce {op} of {count} {dtype}")

        for in_place in (False, True):
            x.copy_(parts[rank])
            if not reduce_scatter_is(engine, x, want, op, in_place=in_place):
                wrong.append(f"reduce_scatter {op} of {count} {dtype}, in place: {in_place}")
    return wrong


def reduce_scatter_is(engine, x, want, op, *, in_place):
    """Whether the own part is the reduction, and all of x that is not the result is as before."""
    counts = uneven(x.numel(), engine.size)
    after = x.clone()
    own = part(x, counts, engine.rank)
    out = own if in_place else torch.empty_like(own)
    sent = engine.reduce_scatter(out, x, counts, op)
    result = part(want, counts, engine.rank)
    if in_place:
        part(after, counts, engine.rank).copy_(result)
    right = same(out, result.contiguous()) and same(x, after)
    return right and sent == (x.numel() - counts[engine.rank]) * x.itemsize


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("resident", [False, True], ids=["private", "arena"])
@pytest.mark.parametrize("ranks", SIZES)
def test_reductions_are_those_of_plain_torch_to_the_last_bit(together, ranks, resident):
    assert together(reductions, resident, ranks=ranks) == [[]] * ranks


def special(engine):
    """Infinity, NaN, signed zeros, numbers at the edges of the half formats."""
    found = []
    for dtype in FLOATS:
        limit = torch.finfo(dtype)
        mine = [0.0, -0.0, float("inf"), float("nan"), 1.0, limit.max, limit.tiny, limit.eps, 1.0]
        theirs = [-0.0, -0.0, float("-inf"), 1.0, float("nan"), limit.max, limit.tiny, 1.0, -1.0]
        rows = torch.tensor([mine, theirs], dtype=torch.float64).to(dtype)
        for op in OPS:
            x = rows[engine.rank].clone()
            engine.all_reduce(x, op)
            want = plain(list(rows), op)
            found.append(bool(torch.equal(x.isnan(), want.isnan())))
            found.append(bool(torch.equal(x.nan_to_num(7), want.nan_to_num(7))))
    return found


def test_infinity_and_nan_come_out(together):
    assert all(all(found) for found in together(special, ranks=2))


def every_half(engine):
    """All 65536 numbers of each half format, widened, halved twice over, and rounded."""
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        other = every.roll(12345 * engine.rank)
        x, parts = other.clone(), [every.roll(12345 * r) for r in range(engine.size)]
        engine.all_reduce(x, "mean")
        want = plain(parts, "mean")
        fine = (x == want) | (x.isnan() & want.isnan())
        found.append(int((~fine).sum()))
    return found


def test_every_number_of_the_half_formats_is_rounded_as_torch_rounds(together):
    assert together(every_half, ranks=3) == [[0, 0]] * 3


# -- moves


def moves(engine, resident):
    """The moves that went wrong."""
    wrong = []
    for dtype in (torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex128):
        for count in [0, 1, 7, 20_003, LONG] if dtype.itemsize < 16 else [7, 200_003]:
            for name, x, want, sent, bytes in moved(engine, resident, count, dtype):
                if not same(x, want.contiguous()) or sent != bytes:
                    wrong.append(f"{name} of {count} {dtype}: {sent} bytes, not {bytes}")
    return wrong


def moved(engine, resident, count, dtype):
    """Name, result, expected result, bytes sent, and expected bytes, of every move."""
    rank, size, width = engine.rank, engine.size, dtype.itemsize
    counts, root = uneven(count, size), size // 2
    whole = numbers(9, count, torch.float32).to(dtype)
    empty = torch.zeros_like(whole)
    own = part(whole, counts, rank)
    other_bytes = (size - 1) * counts[rank] * width
    x, out = place(engine, own, resident), place(engine, empty, resident)

    yield "all_gather", out, whole, engine.all_gather(out, x, counts), other_bytes

    slot = part(out.copy_(empty), counts, rank)
    slot.copy_(own)
    yield "all_gather in place", out, whole, engine.all_gather(out, slot, counts), other_bytes

    out.copy_(empty)
    sent = engine.gather(out if rank == root else None, x, root, counts)
    bytes = 0 if rank == root else counts[rank] * width
    yield "gather", out, whole if rank == root else empty, sent, bytes

    out.copy_(whole if rank == root else empty)
    bytes = (size - 1) * count * width if rank == root else 0
    yield "broadcast", out, whole, engine.broadcast(out, root), bytes

    x.copy_(torch.zeros_like(x))
    sent = engine.scatter(x, out if rank == root else None, root, counts)
    bytes = (count - counts[rank]) * width if rank == root else 0
    yield "scatter", x, own, sent, bytes


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("resident", [False, True], ids=["private", "arena"])
@pytest.mark.parametrize("ranks", SIZES)
def test_moves_bring_every_bit(together, ranks, resident):
    assert together(moves, resident, ranks=ranks) == [[]] * ranks


def swap(engine, resident, scale):
    """Rank p sends (p + 2 q) · scale elements to rank q."""
    size, rank = engine.size, engine.rank
    sent = [(rank + 2 * q) * scale for q in range(size)]
    received = [(q + 2 * rank) * scale for q in range(size)]
    values = [torch.full((count,), float(10 * rank + q)) for q, count in enumerate(sent)]
    x, out = place(engine, torch.cat(values), resident), torch.zeros(sum(received))
    bytes = engine.all_to_all(out, x, sent, received)
    want = [torch.full((count,), float(10 * q + rank)) for q, count in enumerate(received)]
    return bytes == (sum(sent) - sent[rank]) * 4 and torch.equal(out, torch.cat(want))


@pytest.mark.parametrize("resident", [False, True], ids=["private", "arena"])
@pytest.mark.parametrize("ranks", SIZES)
def test_all_to_all_with_a_different_count_for_every_pair(together, ranks, resident):
    for scale in (0, 1, 70_001):
        assert together(swap, resident, scale, ranks=ranks) == [True] * ranks


# -- between two ranks


def exchange(engine, count, resident):
    """Everybody sends two tensors to everybody, and only then receives."""
    rank, peers = engine.rank, [p for p in range(engine.size) if p != engine.rank]
    heard = {peer: [torch.zeros(count), torch.zeros(5)] for peer in peers}
    sent = 0
    with engine.group():
        for peer in peers:
            x = place(engine, torch.full((count,), 10.0 * rank + peer), resident)
            sent += engine.send(x, peer) + engine.send(torch.full((5,), 100.0 + rank), peer)
        for peer in peers:
            engine.receive(heard[peer][0], peer)
            engine.receive(heard[peer][1], peer)
        total = torch.tensor([float(rank)])
        sent += engine.all_reduce(total)
    right = all(
        bool((first == 10 * peer + rank).all()) and bool((second == 100 + peer).all())
        for peer, (first, second) in heard.items()
    )
    own = shares(1, engine.size)[rank]
    counted = len(peers) * (count + 5) * 4 + (1 - own + len(peers) * own) * 4
    return right and total.item() == sum(range(engine.size)) and sent == counted


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("resident", [False, True], ids=["private", "arena"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_of_a_group_may_all_send_first(together, ranks, resident):
    for count in (0, 3, 300_001):  # the last does not fit into a mailbox
        assert together(exchange, count, resident, ranks=ranks) == [True] * ranks


def pass_on(engine):
    """Each message waits for the one before: rank 0 → 1 → 2 → 0, ten times."""
    x = torch.zeros(1)
    for lap in range(10):
        if engine.rank or lap:
            engine.receive(x, (engine.rank - 1) % engine.size)
        x += 1
        engine.send(x, (engine.rank + 1) % engine.size)
    if engine.rank == 0:
        engine.receive(x, engine.size - 1)
    return x.item()


def test_messages_alone(together):
    assert together(pass_on, ranks=3) == [30.0, 29.0, 30.0]


def one_sided(engine):
    """Rank 1 copies rank 0's tensor when it is told that it is ready, three times."""
    x, seen = engine.allocate(1000, torch.float32), []
    for turn in range(3):
        if engine.rank == 0:
            x.fill_(turn + 1)
            engine.signal(1)
            engine.wait(1)
        else:
            engine.wait(0)
            x.copy_(engine.there(x, 0))
            engine.signal(0)
            seen.append((x.min().item(), x.max().item()))
    return seen


def test_signal_and_wait_order_one_sided_copies(together):
    assert together(one_sided, ranks=2) == [[], [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]]


# -- any sequence of operations

CALLS = st.tuples(
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]),
    st.sampled_from([0, 1, 5, 9_000, 300_000]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.booleans(),
)


def sequence(engine, calls):
    """Runs the calls one right after the other; gives what each left behind."""
    size, rank, results = engine.size, engine.rank, []
    for key, (name, count, dtype, resident) in enumerate(calls):
        x = place(engine, numbers(rank, count, dtype, key=key), resident)
        counts = uneven(count, size)
        out = torch.zeros(count, dtype=dtype)
        if name == "all_reduce":
            engine.all_reduce(x)
        elif name == "reduce_scatter":
            engine.reduce_scatter(part(x, counts, rank), x, counts)
            x = part(x, counts, rank)
        elif name == "all_gather":
            engine.all_gather(out, part(x, counts, rank), counts)
        elif name == "broadcast":
            engine.broadcast(x, key % size)
        else:
            received = [shares(count, size)[rank]] * size
            out = torch.zeros(sum(received), dtype=dtype)
            engine.all_to_all(out, x, shares(count, size), received)
        results.append(out if name in ("all_gather", "all_to_all") else x)
    return [result.view(torch.uint8).numpy().copy() for result in results]


def expected(rank, size, calls):
    for key, (name, count, dtype, _) in enumerate(calls):
        rows = [numbers(r, count, dtype, key=key) for r in range(size)]
        counts = uneven(count, size)
        if name == "all_reduce":
            yield plain(rows, "sum")
        elif name == "reduce_scatter":
            yield part(plain(rows, "sum"), counts, rank)
        elif name == "all_gather":
            yield torch.cat([part(row, counts, r) for r, row in enumerate(rows)])
        elif name == "broadcast":
            yield rows[key % size]
        else:
            yield torch.cat([part(row, shares(count, size), rank) for row in rows])


@settings(max_examples=15)
@given(size=st.integers(2, 4), calls=st.lists(CALLS, min_size=1, max_size=8))
def test_any_sequence_gives_what_torch_gives(together, size, calls):
    found = together(sequence, calls, ranks=size)
    for rank, results in enumerate(found):
        for result, want in zip(results, expected(rank, size, calls), strict=True):
            assert result.tobytes() == want.contiguous().view(torch.uint8).numpy().tobytes()
