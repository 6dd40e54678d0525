"""The torch backend: every call of torch.distributed on real processes, beside plain sums."""

import pytest
import torch
import torch.distributed as dist
from torch_ranks import ranks_of, told

WIRES = ["howdah", "howdah_tcp"]
MOVED = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.fixture(params=WIRES)
def ranks(workers, tmp_path, request):
    """Runs functions on two ranks."""
    return ranks_of(workers, tmp_path, request.param)


@pytest.fixture
def sharing(workers, tmp_path):
    """The same in shared memory alone."""
    return ranks_of(workers, tmp_path)


def numbers(rank, shape=(3, 4), dtype=torch.float32):
    """Whole numbers, so that every dtype has them."""
    start = 2 + 10 * rank
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7 + start).view(shape).to(dtype)


# -- moves


def every_move(rank):
    """Each move with each dtype; what it brought, as float lists."""
    found, other = {}, 1 - rank
    for dtype in MOVED:
        x, got = numbers(rank, dtype=dtype), []
        dist.broadcast(one := x.clone(), 1)
        got.append(one)
        dist.all_gather(both := [torch.empty_like(x) for _ in range(2)], x)
        got += both
        dist.all_gather_into_tensor(whole := torch.empty(6, 4, dtype=dtype), x)
        got.append(whole)
        dist.gather(x, parts := [torch.empty_like(x) for _ in range(2)] if rank == 1 else None, 1)
        got += parts or []
        lists = [numbers(0, dtype=dtype), numbers(1, dtype=dtype)] if rank == 0 else None
        dist.scatter(part := torch.empty_like(x), lists, 0)
        got.append(part)
        rows = torch.cat([numbers(r, dtype=dtype)[:2] for r in range(2)])
        dist.all_to_all_single(mixed := torch.empty_like(rows), rows)
        got.append(mixed)
        dist.all_to_all_single(
            bent := torch.empty(3 - rank + 1, 4, dtype=dtype)[: 4 - 2 * rank],
            torch.cat([x, x[:1]])[:3],
            [2 - rank, 2 - rank],
            [2, 1],
        )
        got.append(bent)
        dist.all_to_all(outs := [torch.empty_like(x) for _ in range(2)], [x, x])
        got += outs
        works = [dist.isend(x, other), dist.irecv(heard := torch.empty_like(x), other)]
        [work.wait() for work in works]
        got.append(heard)
        found[str(dtype)] = [[str(value) for value in one.flatten().tolist()] for one in got]
    return found


def as_moved(rank, dtype):
    """What `every_move` is to bring to a rank."""
    a, b = (numbers(r, dtype=dtype) for r in range(2))
    own = (a, b)[rank]
    expected = [b, a, b, torch.cat([a, b])]
    expected += [a, b] if rank == 1 else []
    rows = torch.cat([a[:2], b[:2]])
    expected += [own, torch.cat([rows[2 * rank : 2 * rank + 2]] * 2)]
    parts = [torch.cat([one, one[:1]])[:3] for one in (a, b)]
    expected += [torch.cat([part[:2] if rank == 0 else part[2:] for part in parts])]
    expected += [a, b, (a, b)[1 - rank]]
    return [[str(value) for value in one.flatten().tolist()] for one in expected]


def test_every_dtype_moves_by_every_call(ranks):
    """gloo refuses float8, int16 and uint16 in collectives."""
    for rank, found in enumerate(ranks(every_move)):
        for dtype in MOVED:
            assert found[str(dtype)] == as_moved(rank, dtype), dtype


# -- reductions


def terms(rank, dtype):
    """Two rows of numbers that differ between ranks."""
    x = numbers(rank, (2, 4))
    return x.remainder(3) > rank if dtype == torch.bool else (x / 2).ceil().to(dtype)


def every_sum(rank):
    """Each reduction of each dtype by all calls that reduce; or the error."""
    found = {}
    for dtype in MOVED:
        for name in OPS:
            op, x = getattr(dist.ReduceOp, name), terms(rank, dtype)
            why, _ = told(dist.all_reduce, one := x.clone(), op)
            if why:
                found[str(dtype), name] = why
                continue
            dist.reduce(two := x.clone(), 1, op)
            dist.reduce_scatter_tensor(three := torch.empty(1, 4, dtype=dtype), x, op)
            dist.reduce_scatter(four := torch.empty(4, dtype=dtype), [*x], op)
            dist.all_reduce_coalesced(five := [x[0].clone(), x[1].clone()], op)
            made = [one, two if rank == 1 else one, three, four, *five]
            found[str(dtype), name] = [str(each.flatten().tolist()) for each in made]
    return found


OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")


def combined(dtype, name):
    """The reduction of both ranks' terms by plain operations, rounded once; None: there is none."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    wide = wide if dtype.is_complex or dtype.is_floating_point else torch.int64
    a, b = (terms(rank, dtype).to(wide) for rank in range(2))
    if name.startswith("B"):
        bits = {"BAND": a.__and__, "BOR": a.__or__, "BXOR": a.__xor__}[name]
        return bits(b).to(dtype) if wide == torch.int64 else None
    if name == "AVG":
        return None if wide == torch.int64 else ((a + b) / 2).to(dtype)
    if name in ("MIN", "MAX", "PRODUCT") and dtype.is_complex:
        return None  # refused by torch itself
    plain = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
    return plain[name](a, b).to(dtype)


def test_every_dtype_is_reduced_by_every_operation_that_it_has(ranks):
    for rank, found in enumerate(ranks(every_sum)):
        for dtype in MOVED:
            for name in OPS:
                whole, made = combined(dtype, name), found[str(dtype), name]
                if whole is None:
                    assert made in ("UserError", "ValueError"), (dtype, name, made)
                    continue
                both, row = str(whole.flatten().tolist()), str(whole[rank].tolist())
                assert made == [both, both, row, row, *map(str, whole.tolist())], (dtype, name)


def premultiplied(rank):
    """Sums of terms that each rank has multiplied, as FSDP2 takes them."""
    op, x = dist._make_nccl_premul_sum(0.25), numbers(rank)
    dist.all_reduce(one := x.clone(), op)
    dist.reduce_scatter_tensor(two := torch.empty(6), x.view(-1), op)
    return one.tolist(), two.tolist(), x.equal(numbers(rank))


def test_terms_are_multiplied_before_their_sum(ranks):
    """gloo refuses PREMUL_SUM, which FSDP2's set_gradient_divide_factor takes."""
    whole = numbers(0) * 0.25 + numbers(1) * 0.25
    for rank, (one, two, kept) in enumerate(ranks(premultiplied)):
        assert one == whole.tolist()
        assert two == whole.view(2, 6)[rank].tolist()
        assert kept


# -- strides


def strided(rank):
    """Calls with tensors that are not contiguous; each with what surrounds it."""
    base = numbers(rank, (4, 6))
    dist.all_reduce(base[:, ::2])
    turned = numbers(rank, (3, 4)).t()
    dist.broadcast(turned, 0)
    spread = torch.zeros(4, 4)
    dist.all_gather_into_tensor(spread[:, ::2], numbers(rank, (2, 2)))
    lists = [torch.zeros(4, 3)[:, 1] for _ in range(2)]
    dist.all_gather(lists, numbers(rank, (2, 4)).t()[:, 0])
    share = torch.zeros(2, 4)
    dist.reduce_scatter_tensor(share[:, 1], numbers(rank, (4, 2))[:, 1])
    works = [
        dist.isend(numbers(rank, (4, 2))[:, 1], 1 - rank),
        dist.irecv((heard := torch.zeros(4, 2))[:, 0], 1 - rank),
    ]
    [work.wait() for work in works]
    return [one.tolist() for one in (base, turned, spread, *lists, share, heard)]


def test_strided_tensors_are_right(ranks):
    """gloo of torch 2.13 summed the first elements of the storage of base[:, ::2]: elements beside
    the view changed, and rows of it did not; and it broadcast a transposed tensor in another order.
    """
    for rank, found in enumerate(ranks(strided)):
        base = numbers(rank, (4, 6))
        base[:, ::2] = numbers(0, (4, 6))[:, ::2] + numbers(1, (4, 6))[:, ::2]
        spread, share, heard = torch.zeros(4, 4), torch.zeros(2, 4), torch.zeros(4, 2)
        spread[:, ::2] = torch.cat([numbers(0, (2, 2)), numbers(1, (2, 2))])
        column = numbers(0, (4, 2))[:, 1] + numbers(1, (4, 2))[:, 1]
        share[:, 1] = column[2 * rank : 2 * rank + 2]
        heard[:, 0] = numbers(1 - rank, (4, 2))[:, 1]
        lists = [numbers(r, (2, 4)).t()[:, 0] for r in range(2)]
        expected = [base, numbers(0, (3, 4)).t(), spread, *lists, share, heard]
        assert found == [one.tolist() for one in expected]


# -- messages and order


def messages(rank):
    """Messages in orders in which one queue of blocking calls would wait for ever."""
    other, found = 1 - rank, []
    if dist.get_backend() == "howdah":  # over TCP a message waits for its receiver
        dist.isend(torch.ones(1), other).wait()  # both send first
        dist.recv(torch.zeros(1), other)
    for size in (3, 1 << 19):  # 2 MiB: more than a mailbox has
        mine, theirs = torch.full((size,), float(rank)), torch.zeros(size)
        if rank == 0:  # posted to receive before it sends
            first = dist.irecv(theirs, other)
            dist.send(mine, other)
            first.wait()
        else:
            dist.recv(theirs, other)
            dist.send(mine, other)
        found.append(bool((theirs == other).all()))
        ops = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
        [work.wait() for work in dist.batch_isend_irecv(ops)]
        work = dist.isend(mine, other)
        dist.all_reduce(one := torch.ones(1))  # all ranks are here while the message waits
        dist.recv(theirs, other)
        work.wait()
        found.append(one.item())
    tags = [dist.isend(torch.tensor([float(tag)]), other, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        dist.recv(one := torch.zeros(1), other, tag=tag)
        found.append(one.item())
    [work.wait() for work in tags]
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        found.append(dist.recv(one))  # from whom?
    return found


def test_messages_pass_each_other_and_collectives(ranks):
    zero, one = ranks(messages)
    assert zero == [True, 2.0, True, 2.0, 2.0, 1.0]
    assert one == [*zero, 0]


def given_up(rank):
    """Both receive what nobody sends, and the group is destroyed behind it."""
    work = dist.irecv(torch.zeros(1), 1 - rank)
    group = dist.new_group([0, 1])
    other = dist.irecv(torch.zeros(1), 1 - rank, group=group) if rank == 0 else None
    dist.barrier(group)
    dist.destroy_process_group()
    ended = [told(one.wait)[0] for one in (work, other) if one]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ended


def test_messages_that_never_come_end_with_the_group(sharing):
    """Also where the other rank has never looked for them."""
    zero, one = sharing(given_up)
    assert zero == ["PeerLost", "PeerLost"]
    assert one == ["PeerLost"]


def queued(rank):
    """Calls of async_op, read in another order than they were made."""
    xs = [numbers(rank) + step for step in range(5)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    dist.all_reduce(last := numbers(rank))  # behind all of them
    done = [work.is_completed() for work in works]
    future = works[3].get_future()
    [work.wait() for work in works[::-1]]
    value = future.wait()[0].tolist()
    return done, [x.tolist() for x in xs], last.tolist(), value, works[0].result()[0].tolist()


def test_queued_calls_run_in_order(ranks):
    whole = numbers(0) + numbers(1)
    for done, xs, last, value, first in ranks(queued):
        assert done == [True] * 5
        assert xs == [(whole + 2 * step).tolist() for step in range(5)]
        assert (last, value, first) == (whole.tolist(), xs[3], xs[0])


def objects(rank):
    """Object collectives, and a group of one rank each."""
    dist.all_gather_object(heard := [None, None], {"rank": rank})
    dist.broadcast_object_list(said := [rank, "x" * (rank + 1)], 1)
    dist.scatter_object_list(part := [None], ["a", ["b"]] if rank == 0 else None, 0)
    dist.gather_object(rank, all_of := [None, None] if rank == 0 else None, 0)
    own = [dist.new_group([r]) for r in range(2)][rank]
    dist.all_reduce(one := torch.ones(2), group=own)
    both = dist.new_group([0, 1])
    dist.all_reduce(two := torch.ones(2), group=both)
    dist.destroy_process_group(both)
    return heard, said, part, all_of, one.tolist(), two.tolist(), dist.get_backend()


def test_objects_and_subgroups(sharing):
    zero, one = sharing(objects)
    heard, said = [{"rank": 0}, {"rank": 1}], [1, "xx"]
    assert zero == (heard, said, ["a"], [0, 1], [1.0, 1.0], [2.0, 2.0], "howdah")
    assert one == (heard, said, [["b"]], None, [1.0, 1.0], [2.0, 2.0], "howdah")


def by_old_names(rank):
    """Methods by the names that torch calls before 2.13."""
    group, x = dist.group.WORLD, numbers(rank, (4,))
    wholes, shares = torch.zeros(2, 8), torch.zeros(2, 2)
    works = [
        group._allgather_base(wholes[0], x),
        group.allgather_into_tensor_coalesced([wholes[1]], [x]),
        group._reduce_scatter_base(shares[0], x),
        group.reduce_scatter_tensor_coalesced([shares[1]], [x]),
        group.alltoall_base(mixed := torch.zeros(4), x, [], []),
    ]
    [work.wait() for work in works]
    return [wholes.tolist(), shares.tolist(), mixed.tolist()]


def test_older_versions_of_torch_find_their_names(sharing):
    a, b = (numbers(rank, (4,)) for rank in range(2))
    for rank, (wholes, shares, mixed) in enumerate(sharing(by_old_names)):
        own = slice(2 * rank, 2 * rank + 2)
        assert wholes == [torch.cat([a, b]).tolist()] * 2
        assert shares == [(a + b)[own].tolist()] * 2
        assert mixed == torch.cat([a[own], b[own]]).tolist()
