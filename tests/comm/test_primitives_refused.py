"""Operations of a group that ranks call differently or that cannot work, tensors of shared memory,
and what GPUs would be given.
"""

from functools import partial

import pytest
import torch
from played_streams import Played, PlayedBoth
from recorded_steps import played
from recorded_wire import META, Backend, Joining, Recorded, Streams
from test_primitives import KINDS, meet, over, run  # noqa: F401
from wire_checks import check_ends, check_equal, check_legal

from howdah.base.errors import UserError
from howdah.comm.engine import Engine
from howdah.comm.group import Group
from howdah.comm.signature import Disagreement
from howdah.comm.transport import SingleRank

# -- calls that differ, and calls that cannot work


def differ(transport, case):
    """What rank 1 calls otherwise, at a line of its own."""
    group, odd = Group(transport), transport.rank == 1
    x, out = torch.ones(2), torch.ones(4)
    try:
        if case == "root" and odd:
            group.reduce(x, 1)
        elif case == "root":
            group.reduce(x, 0)
        elif case == "counts":
            group.scatter(x[:1], None, 0) if odd else group.scatter(x, out, 0)
        elif case == "messages" and odd:
            group.exchange(out[:2], x[:1], 0, 0)
        else:
            group.exchange(out[:2], x, 1, 1)
        group.barrier()
    except Disagreement as error:
        return str(error)
    finally:
        group.close()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["engine", "torch"])
@pytest.mark.parametrize("case", ["root", "counts", "messages"])
def test_ranks_that_disagree_are_told(ended_workers, meet, kind, case):  # noqa: F811
    for said in run(ended_workers, kind, meet, differ, case, ranks=2):
        assert "test_primitives_refused.py" in said, said
        words = {"root": "root 1", "counts": "scatter(float32 [1 1]", "messages": "send"}
        assert words[case] in said


def gathers_to_itself(transport, path):
    both = PlayedBoth(transport, Played(), path)
    both.cards.agree = both.compare
    group, x = Group(both), torch.ones(2)
    with pytest.raises(Disagreement) as said:
        group.gather(torch.ones(4), x, both.rank)
    both.abort()
    return str(said.value)


def test_ledgers_tell_of_other_roots(ended_workers, meet):  # noqa: F811
    """The messages that it consists of are in no ledger's checksum."""
    for said in ended_workers.run(gathers_to_itself, meet, ranks=2):
        assert "#1 gather(float32 [2 2], root 0)" in said and "[2 2], root 1)" in said


REFUSED = [
    (lambda g, x: g.reduce(x.bool(), 0), "torch.bool cannot be reduced"),
    (lambda g, x: g.reduce(x, 1), "reduce: rank 0 of 1 names rank 1"),
    (lambda g, x: g.gather(None, x, 0), "alone gives out, but rank 0 gives none"),
    (lambda g, x: g.scatter(x, None, 0), "alone gives x"),
    (lambda g, x: g.gather(x[:1], x, 0), r"\[2\] rows of float32 \[2, 3\] do not fill"),
    (lambda g, x: g.gather(x.int(), x, 0), r"do not fill the root's int32 \[2, 3\]"),
    (lambda g, x: g.gather(x[:, :1], x, 0), r"do not fill the root's float32 \[2, 1\]"),
    (lambda g, x: g.scatter(x, x, 0, counts=[1]), "do not fill"),
    (lambda g, x: g.scatter(x, x[:1], 0, counts=[1]), r"counts are \[1\] rows, but rank 0 gives"),
    (lambda g, x: g.copy(x, x[0]), r"copy: out is float32 \[2, 3\], and x is float32 \[3\]"),
    (lambda g, x: g.gather(x, x, 0, counts=[1, 1]), "1 are needed"),
    (lambda g, x: g.signal(0), "signal: rank 0 of 1 names rank 0 as its peer"),
    (lambda g, x: g.wait(3), "wait: rank 0 of 1 names rank 3"),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_what_cannot_work_is_refused_at_the_call(call, sentence):
    group = Group(SingleRank())
    with pytest.raises(UserError, match=sentence):
        call(group, torch.zeros(2, 3))
    group.close()


# -- memory that ranks share


def shared(transport):
    """A sum of tensors of the arena, and whether they lie in it."""
    group = Group(transport)
    x = group.allocate((2, 3), torch.float64)
    assert x.shape == (2, 3) and not x.any()
    x += group.rank
    group.all_reduce(x)
    group.close()
    own = transport.there(x, group.rank) if isinstance(transport, Engine) else x  # or it raises
    return x.tolist(), own.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_shared_memory(workers, meet, kind):  # noqa: F811
    for total, inside in run(workers, kind, meet, shared, ranks=3):
        assert total == [[3.0] * 3] * 2 and inside


# -- what GPUs would be given


def every_call(group, x):
    """Each operation with equal counts, alone and together."""
    rank, size = group.rank, group.size
    root, ring = size - 1, ((rank + 1) % size, (rank - 1) % size)
    many = x(16 * size) if rank == root else None
    for asks in ({}, {"async_op": True}):
        group.all_reduce(x(16), **asks)
        group.gather(many, x(16), root, **asks)
        group.scatter(x(16), many, root, **asks)
        group.exchange(x(16), x(16), *ring, **asks)
        group.copy(x(16), x(16), **asks)
        with group.together(**asks):
            group.exchange(x(16), x(16), *ring)
            group.gather(many, x(16), root)


def test_on_gpus_calls_are_equal_legal_and_end():
    ranks = []
    for rank in range(4):
        streams = Streams()
        joining = Joining(streams, rank, Backend)
        with played(streams):
            group = Group(joining(range(4)))
            every_call(group, partial(torch.empty, device=META))
            group.close()
        ledgers = {wire: one.ledger.entry[:2] for wire, one in joining.made.items()}
        ranks.append(Recorded(streams.entries, streams.count, ledgers))
    check_equal(ranks)
    check_legal(ranks)
    check_ends(ranks)
    together = max(len(call.ops) for _, call in ranks[-1].calls)
    assert together == 2 + 3, "one group of NCCL: a message each way, and the gather of three"
