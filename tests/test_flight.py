"""The doubles of `distributed/test_in_flight.py` by themselves: one process, a silent wire."""

import pytest
import torch
from flight import FlightChecker, Race, Use
from late import LateDouble, Spoiled

from howdah.comm.group import Group
from howdah.comm.transport import SingleRank


class Silent(SingleRank):
    """Rank 1 of three; nothing is sent, and nothing comes."""

    rank, size = 1, 3

    def all_gather(self, out, x, counts):
        return 0

    def receive(self, x, source):
        return 0

    send = receive


@pytest.fixture
def group():
    group = Group(Silent())
    yield group
    group.close()


def start(group, operation, *args, **how):
    return getattr(group, operation)(*args, async_op=True, **how)


X = 9  # elements; the shares of three ranks are 0-2, 3-5, 6-8

# operation, its arguments beside the tensors: the elements that it reads and writes in place
IN_PLACE = {
    ("all_reduce",): ("0-8", "0-8"),
    ("reduce_scatter",): ("0-8", "3-5"),
    ("all_gather",): ("3-5", "0-2 6-8"),
    ("send", 0): ("0-8", ""),
    ("receive", 0): ("", "0-8"),
    ("broadcast", 1): ("0-8", ""),
    ("broadcast", 2): ("", "0-8"),
}


def elements(text):
    pairs = (part.split("-") for part in text.split())
    return {n for first, last in pairs for n in range(int(first), int(last) + 1)}


def refused(touch):
    try:
        touch()
    except Race as race:
        return str(race)
    return ""


@pytest.mark.parametrize(("call", "uses"), IN_PLACE.items(), ids=str)
def test_an_operation_in_place_uses_its_shares(group, call, uses):
    reads, writes = map(elements, uses)
    x = torch.zeros(X)
    with FlightChecker() as checker:
        handle = start(group, call[0], x, *call[1:])
        for n in range(X):
            said = refused(lambda n=n: x[n].exp())
            assert said.startswith("aten::exp reads what") is (n in writes), n
            said = refused(lambda n=n: x[n].zero_())
            assert said.startswith("aten::zero_ writes what") is (n in reads | writes), n
            assert f"{call[0]} (started at tests/test_flight.py:" in said or not said
        handle.result()
        x.zero_().exp()
    checker.check_landed()


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "all_to_all"])
def test_an_operation_with_an_input_reads_it_and_writes_the_other(group, operation):
    out, x = (
        torch.zeros(3 if operation == name else X) for name in ("reduce_scatter", "all_gather")
    )
    with FlightChecker():
        handle = start(group, operation, out, x)
        x.exp()
        assert "writes what" in refused(lambda: x.add_(1)) and refused(lambda: x.add_(out.sum()))
        assert "is writing" in refused(out.exp)
        handle.result()
        x.add_(1), out.add_(1)


def test_views_and_sizes_are_no_use(group):
    x = torch.zeros(X)
    with FlightChecker():
        start(group, "receive", x, 0)
        x.view(3, 3).T[0].detach()
        torch.empty_like(x), torch.zeros_like(x), x.new_ones(3)


def test_every_kind_of_argument_is_seen(group):
    x, other = torch.zeros(X), torch.zeros(X)
    with FlightChecker():
        start(group, "receive", x, 0)
        assert "_foreach_add_ writes" in refused(lambda: torch._foreach_add_([other, x], 1.0))
        assert "_foreach_add reads" in refused(lambda: torch._foreach_add([other], [x]))
        assert "aten::exp writes" in refused(lambda: torch.exp(other, out=x))
        assert "aten::cat reads" in refused(lambda: torch.cat([other, x]))


def test_a_backward_pass_is_seen(group):
    weight = torch.ones(X, requires_grad=True)
    weight.grad = torch.zeros(X)
    with FlightChecker():
        loss = (weight * 3).sum()
        handle = start(group, "send", weight.grad, 0)
        assert "aten::add_ writes what send" in refused(loss.backward)
        handle.result()


def test_memory_is_what_counts(group):
    whole = torch.zeros(2, X)
    with FlightChecker():
        handle = start(group, "receive", whole[0], 0)
        whole[1].zero_()
        assert refused(whole.sum) and refused(whole[:, 1].sum)
        handle.result()


def test_each_of_several_is_in_flight(group):
    tensors = [torch.zeros(X) for _ in range(3)]
    with FlightChecker() as checker:
        handles = [start(group, "receive", x, 0) for x in tensors]
        for handle in (handles[1], handles[0], handles[2]):
            said = [bool(refused(x.exp)) for x in tensors]
            assert said == [not flight.landed for flight in checker.started]
            handle.result()
        assert not any(refused(x.exp) for x in tensors)


def test_an_operation_is_no_exception(group):
    """Nor are those that are done at once."""
    x, out = torch.zeros(X), torch.zeros(3)
    with FlightChecker():
        handle = start(group, "all_reduce", x)
        assert refused(lambda: start(group, "all_reduce", x)).startswith("all_reduce (started")
        assert "reduce_scatter" in refused(lambda: group.reduce_scatter(out, x))
        handle.result()
        group.reduce_scatter(out, x)


def test_what_comes_after_an_operation_takes_its_place(group):
    x, rest = torch.zeros(X), torch.zeros(X)
    with FlightChecker() as checker:
        first = start(group, "all_reduce", [x, rest])
        second = start(group, "reduce_scatter", x, after=first)
        first.result()
        rest.zero_()
        assert "reduce_scatter" in refused(x.zero_)
        second.result()
        x.zero_()
        # what is behind the second is behind the first, but that keeps its tensors
        first = start(group, "all_reduce", [x, rest])
        start(group, "reduce_scatter", x, after=first).result()
        rest.zero_()
        with pytest.raises(Race, match=r"all_reduce .* was never waited for"):
            checker.check_landed()
        first.result()
        group.reduce_scatter(x, after=start(group, "all_reduce", x))
    checker.check_landed()


def test_others_can_be_in_flight_too():
    """Such as a copy on a stream of its own."""
    master, snapshot = torch.zeros(X), torch.zeros(X)
    with FlightChecker() as checker:
        flight = checker.start("snapshot", Use([master], [snapshot]))
        assert "aten::add_ writes what snapshot" in refused(lambda: master.add_(1))
        flight.land()
        master.add_(1)
    checker.check_landed()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_a_late_result_is_poison_until_it_is_waited_for(group, dtype):
    x = torch.ones(X, dtype=dtype)
    with LateDouble() as late:
        handle = start(group, "receive", x, 0)
        poisoned = x.clone()
        with pytest.raises(Spoiled, match=r"receive .* was never waited for"):
            late.check_landed()
        assert not handle.done()
        handle.result()
        handle.result()
    late.check_landed()
    assert late.poisoned == X * x.element_size()
    assert x.eq(1).all() and (dtype is torch.bool or not poisoned.eq(1).any())
    assert not dtype.is_floating_point or poisoned.isnan().all()


def test_a_share_is_late_and_the_rest_is_not(group):
    x = torch.ones(X)
    with LateDouble():
        for operation, late in (("reduce_scatter", {3, 4, 5}), ("all_gather", {0, 1, 2, 6, 7, 8})):
            handle = start(group, operation, x)
            assert set(x.isnan().nonzero().flatten().tolist()) == late
            handle.result()
            assert x.eq(1).all()


@pytest.mark.parametrize("part", ["input", "target"])
def test_what_is_written_too_early_is_noticed_when_it_is_waited_for(group, part):
    x, out = torch.zeros(X), torch.zeros(3)
    with LateDouble():
        handle = start(group, "reduce_scatter", out, x)
        (x if part == "input" else out)[1] = 7
        with pytest.raises(Spoiled, match=r"a tensor of reduce_scatter .* was written before"):
            handle.result()


def test_a_late_result_lands_for_what_comes_after(group):
    x = torch.ones(X)
    with LateDouble():
        first = start(group, "all_reduce", x)
        second = start(group, "reduce_scatter", x, after=first)
        assert x[:3].eq(1).all() and x[3:6].isnan().all()
        first.result(), second.result()
        assert x.eq(1).all()


def test_a_late_operation_works_with_what_its_input_was():
    group, x, out = Group(SingleRank()), torch.ones(X), torch.zeros(X)
    with LateDouble():
        handle = start(group, "all_gather", out, x)
        assert out.isnan().all()
        handle.result()
    group.close()
    assert out.eq(1).all()
