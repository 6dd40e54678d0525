"""Wrong arguments, to every operation of every transport and of Group: each is a sentence.

Every argument of a call that works is replaced by everything that it cannot be. No rank may wait,
crash, or do harm: after hundreds of wrong calls, the right one still gives the right sum.
"""

import atexit
import os

import numpy as np
import pytest
import torch

from howdah.base.errors import UserError
from howdah.comm.counters import Counters
from howdah.comm.group import Group

KINDS = ["engine", "torch"]
HUGE, NAN = 2**70, float("nan")


def let_go():
    """Part of a tensor whose memory was given back, as sharded weights between their uses."""
    x = torch.ones(8)
    part = x[4:]
    x.untyped_storage().resize_(0)
    return part


def tensors():
    yield from (None, 3, "x", [1.0, 1.0, 1.0, 1.0], np.ones(4), torch.ones(4, device="meta"))
    yield from (torch.ones(4).to_sparse(), let_go())
    yield torch.ones(2, 2).to_sparse_csr()


def flat_tensors():
    """What Group takes and a transport does not."""
    yield from tensors()
    yield from (torch.ones(8)[::2], torch.ones(4).to(torch.complex32))
    yield torch.ones(4, dtype=torch.complex64).conj()


def ranks(size):
    yield from (-1, size, HUGE, 0.5, 1.0, NAN, "0", None, [0], torch.tensor([0, 1]))


def counts():
    yield from (3, "22", [4], [2, 2, 0], [-1, 5], [2.0, 2.0], [NAN, 2.0], [HUGE, 2], [2**62] * 2)
    yield from ({}, torch.ones(2), [None, 4], [[2, 2]])


OPS = ["avg", "", None, 3, ["sum"], NAN]
NUMBERS = [-1, -(1 << 20), 0.5, NAN, HUGE, "4", None, torch.ones(2)]
DTYPES = [None, "float32", 4, float]


def wrong(what, size):
    """What an argument cannot be."""
    if what == "rank":
        return list(ranks(size))
    if what == "counts":
        return list(counts())
    fixed = {"op": OPS, "number": NUMBERS, "dtype": DTYPES, "x": list(flat_tensors())}
    wholes = list(tensors())
    return (fixed | {"whole": wholes, "second": wholes[1:]})[what]  # None: in place


def right(transport):
    """Calls that work, each argument with what it is."""
    other, own, two = 1 - transport.rank, transport.rank, [2, 2]

    def x(length=4):
        return torch.ones(length), "x"

    calls = {
        "all_reduce": [x(), ("sum", "op")],
        "reduce": [x(), (own, "rank"), ("sum", "op")],
        "reduce_scatter": [x(2), x(), (two, "counts"), ("sum", "op")],
        "all_gather": [x(), x(2), (two, "counts")],
        "broadcast": [x(), (own, "rank")],
        "gather": [x(), x(2), (own, "rank"), (two, "counts")],
        "scatter": [x(2), x(), (own, "rank"), (two, "counts")],
        "all_to_all": [x(), x(), (two, "counts"), (two, "counts")],
        "send": [x(), (other, "rank")],
        "receive": [x(), (other, "rank")],
        "signal": [(other, "rank")],
        "wait": [(other, "rank")],
    }
    if hasattr(transport, "there"):
        calls |= {
            "allocate": [(4, "number"), (torch.float32, "dtype")],
            "there": [(transport.allocate(4, torch.float32), "x"), (other, "rank")],
        }
    return calls


def spoil(target, calls, size):
    """Every call with every wrong argument; those that are not refused."""
    for name, arguments in calls.items():
        for place, (_, what) in enumerate(arguments):
            for number, bad in enumerate(wrong(what, size)):
                given = [value for value, _ in arguments]
                given[place] = bad
                told = f"{name}: argument {place} is {number} of {what}"
                try:
                    getattr(target, name)(*given)
                except (UserError, TypeError) as error:
                    if not str(error):
                        yield f"{told}: no word"
                except Exception as error:
                    yield f"{told}: {type(error).__name__} {error}"
                else:
                    yield f"{told}: nothing"


def abuse(transport):
    """What is not refused, and the sum that is made afterwards."""
    used = getattr(transport, "_used", None)
    taken = list(spoil(transport, right(transport), transport.size))
    taken += [f"{name} of itself" for name in ("send", "receive") if not itself(transport, name)]
    if hasattr(transport, "there"):
        assert transport._used == used + 64  # of `right`
    x = torch.full((4,), transport.rank + 1.0)
    transport.all_reduce(x)
    return taken, x.tolist()


def itself(transport, name):
    try:
        getattr(transport, name)(torch.ones(1), transport.rank)
    except UserError:
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_argument_can_be_is_refused_and_harms_nobody(workers, kind):
    assert workers.run(abuse, ranks=2, transport=kind) == [([], [3.0] * 4)] * 2


def uneven(transport):
    """What fits in each argument, and not together."""
    x, said, back = torch.ones(6), [], [3, 3]
    back[transport.rank] = 2
    for call in (
        lambda: transport.reduce_scatter(x[:3], x, [4, 4]),
        lambda: transport.reduce_scatter(x[1:4], x, [3, 3]),
        lambda: transport.all_gather(x, torch.zeros(3, dtype=torch.float64), [3, 3]),
        lambda: transport.all_gather(x[:5], torch.zeros(3), [3, 3]),
        lambda: transport.all_to_all(x, x, [3, 3], [3, 3]),
        lambda: transport.all_to_all(torch.ones(5), x, [3, 3], back),
        lambda: transport.all_reduce(x.bool()),
        lambda: transport.all_reduce(x.long(), "mean"),
        lambda: transport.gather(None, x[:3], transport.rank, [3, 3]),
        lambda: transport.scatter(x[:3], None, transport.rank, [3, 3]),
    ):
        try:
            call()
            said.append("nothing")
        except UserError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_together_is_refused(workers, kind):
    expected = [
        "for its own", "lie apart", "dtype of the whole", "have that sum", "lie apart from x",
        "to itself", "torch.bool", "mean of torch.int64", "gives no out", "gives no x",
    ]  # fmt: skip
    for said in workers.run(uneven, ranks=2, transport=kind):
        for sentence, part in zip(said, expected, strict=True):
            assert part in sentence


# -- closed


def closed(transport):
    """What is not refused after close, which may be called twice."""
    calls = right(transport)
    transport.close()
    transport.close()
    transport.abort()
    taken = []
    for name, arguments in (calls | {"barrier": []}).items():
        try:
            getattr(transport, name)(*[value for value, _ in arguments])
            taken.append(name)
        except UserError as error:
            assert "closed" in str(error), str(error)
    return taken


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_closed_says_so(workers, kind):
    assert workers.run(closed, ranks=2, transport=kind) == [[]] * 2


# -- a forked child


def fork(engine):
    """A child that uses its parent's engine, and ends as programs do; then the parent goes on."""
    child = os.fork()
    if child == 0:
        refused = 0
        calls = (
            engine.barrier,
            lambda: engine.all_reduce(torch.ones(4)),
            lambda: engine.allocate(4, torch.float32),
        )
        for call in calls:
            try:
                call()
            except UserError as error:
                refused += "forked" in str(error)
        engine.abort()
        atexit._run_exitfuncs()
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    x = torch.full((4,), engine.rank + 1.0)
    engine.all_reduce(x)
    return os.waitstatus_to_exitcode(status), x.tolist(), engine._leave.alive


def test_a_forked_child_takes_nobody_out_of_the_group(workers):
    assert workers.run(fork, ranks=2, transport="engine") == [(3, [3.0] * 4, True)] * 2


# -- Group


def grouped(transport):
    group = Group(transport, axis="dp", counters=Counters())
    x, other = (torch.ones(4), "whole"), (1 - group.rank, "rank")
    two = torch.ones(2), "whole"
    calls = {
        "all_reduce": [x],
        "reduce_scatter": [two, (x[0], "second")],
        "all_gather": [x, (two[0], "second")],
        "broadcast": [x, (0, "rank")],
        "all_to_all": [x, x],
        "reduce": [x, (0, "rank")],
        "gather": [x, (two[0], "second"), (group.rank, "rank")],
        "scatter": [two, (x[0], "second"), (group.rank, "rank")],
        "send": [x, other],
        "receive": [x, other],
        "exchange": [x, x, other, other],
        "copy": [x, (torch.zeros(4), "second")],
        "signal": [other],
        "wait": [other],
    }
    taken = list(spoil(group, calls, 2))
    keywords = [
        ("all_reduce", (torch.ones(4),), "op", OPS),
        ("all_reduce", (torch.ones(4),), "after", [None, 3]),
        ("all_to_all", (torch.ones(4), torch.ones(4)), "sent", list(counts())),
        ("all_to_all", (torch.ones(4), torch.ones(4)), "received", list(counts())),
        ("reduce", (torch.ones(4), 0), "op", OPS),
        ("gather", (torch.ones(4), torch.ones(2), group.rank), "counts", list(counts())),
        ("scatter", (torch.ones(2), torch.ones(4), group.rank), "counts", list(counts())),
        ("exchange", (torch.ones(4), torch.ones(4), other[0], other[0]), "after", [None, 3]),
        ("allocate", (), "shape", [None, 4, [-1], [0.5], ["4"], [HUGE], [NAN]]),
        ("allocate", ([4],), "dtype", DTYPES),
        ("sum_scalars", (), "values", [3, None, ["x"], [[1.0], [2.0]], [None], [1j]]),
        ("own_shard", (torch.ones(4),), "rank", [-1, 2, HUGE, 0.5, NAN, "0"]),
    ]
    for name, arguments, key, values in keywords:
        for bad in values:
            try:
                getattr(group, name)(*arguments, **{key: bad})
                taken.append(f"{name}({key}={bad!r})")
            except (UserError, TypeError):
                pass
    x = torch.full((4,), group.rank + 1.0)
    group.all_reduce(x)
    group.close()
    with pytest.raises(UserError, match="this group is closed"):
        group.all_reduce(x, async_op=True)
    return taken, x.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_group_refuses_what_no_argument_can_be(workers, kind):
    assert workers.run(grouped, ranks=2, transport=kind) == [([], [3.0] * 4)] * 2
