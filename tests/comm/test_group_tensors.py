"""Single tensors of any shape, layout and dtype through a group, and what is refused."""

import numpy as np
import pytest
import torch
from test_group import KINDS

from howdah.base.errors import UserError
from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.comm.transport import SingleRank
from howdah.plan.flat_buffers import share


def strided(transport):
    """Every operation on tensors that are not contiguous, and what lies beside them."""
    group = Group(transport, axis="dp", counters=Counters())
    rank, size, found = group.rank, group.size, []
    base = torch.arange(24.0).view(4, 6) + 100 * rank
    group.all_reduce(base[:, ::2], op="max")
    turned = torch.full((2, 3), float(rank)).t()
    group.broadcast(turned, size - 1)
    part = torch.zeros(2, 2 * len(group.own_shard(torch.empty(7)))).t()[::2]
    group.reduce_scatter(part, torch.ones(2, 7).t(), op="mean")
    whole = torch.zeros(2, 7).t()
    group.all_gather(whole, part + rank)
    flat = torch.full((7, 4), rank + 1.0)[:, 1]
    group.reduce_scatter([flat], op="product")
    group.close()
    found += [base, turned, part, whole, flat]
    return [tensor.numpy() for tensor in found]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3])
def test_strided_tensors_are_read_and_written_in_place(workers, size, kind):
    owner = [r for r in range(size) for _ in range(*share(7, size, r))]
    for rank, found in enumerate(workers.run(strided, ranks=size, transport=kind)):
        base, turned, part, whole, flat = found
        expected = np.arange(24.0).reshape(4, 6) + 100 * rank
        expected[:, ::2] += 100 * (size - 1 - rank)
        np.testing.assert_array_equal(base, expected)
        np.testing.assert_array_equal(turned, np.full((3, 2), size - 1.0))
        np.testing.assert_array_equal(part, np.ones((owner.count(rank), 2)))
        np.testing.assert_array_equal(whole, np.repeat([[1.0 + r] for r in owner], 2, axis=1))
        factorial = float(np.prod(np.arange(1, size + 1)))
        mine = [factorial if r == rank else rank + 1.0 for r in owner]
        np.testing.assert_array_equal(flat, mine)


MOVED = [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]


def moved(transport):
    """Dtypes that nobody adds, but that can be moved."""
    group, found = Group(transport, axis="dp", counters=Counters()), []
    for dtype in MOVED:
        x = torch.arange(12.0).mul(group.rank).to(dtype).view(6, 2)
        whole, out = torch.zeros(12, 2, dtype=dtype), torch.zeros(6, 2, dtype=dtype)
        group.all_gather(whole, x)
        group.all_to_all(out, x)
        group.broadcast(x, 1)
        found.append(
            [t.float().numpy() if dtype != torch.complex64 else t.numpy() for t in (whole, out, x)]
        )
    group.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_that_cannot_be_added_can_be_moved(workers, kind):
    for rank, found in enumerate(workers.run(moved, ranks=2, transport=kind)):
        for dtype, (whole, out, cast) in zip(MOVED, found, strict=True):
            zero, one = (torch.arange(12.0).mul(r).to(dtype).view(6, 2) for r in range(2))
            wide = dtype if dtype == torch.complex64 else torch.float32
            zero, one = zero.to(wide).numpy(), one.to(wide).numpy()
            np.testing.assert_array_equal(whole, np.concatenate([zero, one]))
            rows = slice(3 * rank, 3 * rank + 3)
            np.testing.assert_array_equal(out, np.concatenate([zero[rows], one[rows]]))
            np.testing.assert_array_equal(cast, one)


REFUSED = [
    (lambda g: g.all_reduce(torch.zeros(3, dtype=torch.bool)), "torch.bool cannot be reduced"),
    (lambda g: g.all_reduce(torch.zeros(3), op="avg"), "no reduction 'avg'"),
    (lambda g: g.all_reduce(torch.zeros(3, dtype=torch.int32), op="mean"), "the mean of"),
    (lambda g: g.all_reduce(torch.zeros(1).expand(3)), "all_reduce: an expanded tensor"),
    (lambda g: g.broadcast(torch.zeros(3).to_sparse(), 0), "broadcast: a torch.sparse_coo tensor"),
    (lambda g: g.broadcast(torch.zeros(3, device="meta"), 0), "broadcast: a meta tensor"),
    (lambda g: g.broadcast(torch.zeros(3), 1), "broadcast: rank 0 of 1 names rank 1"),
    (lambda g: g.reduce_scatter(torch.zeros(2), torch.zeros(3)), r"3 elements of float32 \[3\]"),
    (lambda g: g.all_gather(torch.zeros(3), torch.zeros(3).int()), r"its part is int32 \[3\]"),
    (lambda g: g.all_gather([torch.zeros(3)], torch.zeros(3)), "go in place, without x"),
    (lambda g: g.all_to_all(torch.zeros(3), torch.zeros(3), sent=[2]), "x is float32"),
    (lambda g: g.all_to_all(torch.zeros(2), torch.zeros(3)), "out is float32"),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_what_cannot_work_is_refused_at_the_call(call, sentence):
    group = Group(SingleRank(), axis="dp", counters=Counters())
    with pytest.raises(UserError, match=sentence):
        call(group)
    group.close()


def differ_later(transport):
    """Rank 1 has another size, in a call that runs on the progress thread."""
    group = Group(transport, axis="dp", counters=Counters())
    future = group.all_reduce([torch.ones(5 + group.rank), torch.ones(3)], async_op=True)
    try:
        future.result()
    except RuntimeError as error:
        return str(error)
    finally:
        group.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_disagreement_names_the_place_that_asked_for_it(workers, kind):
    """Not the line of the progress thread, which is the same for all."""
    for text in workers.run(differ_later, ranks=2, transport=kind):
        assert text.count("test_group_tensors.py:") == 2, text


def uneven_blocks(transport):
    """Rows to each rank: as many as its number, from every rank."""
    group = Group(transport, axis="ep", counters=Counters())
    sent, received = list(range(group.size)), [group.rank] * group.size
    x = torch.full((sum(sent), 2), float(group.rank))
    out = torch.empty(sum(received), 2)
    group.all_to_all(out, x, sent=sent, received=received)
    group.close()
    return out.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_all_to_all_of_uneven_rows(workers, kind):
    for rank, out in enumerate(workers.run(uneven_blocks, ranks=3, transport=kind)):
        expected = np.repeat([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], rank, axis=0)
        np.testing.assert_array_equal(out, expected)
