"""The reducer: buckets start in order while backward runs, each gradient is summed once."""

from concurrent.futures import Future

import numpy as np
import pytest
import torch
from tiny import SHAPE, micro, place

from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.comm.transport import SingleRank
from howdah.parallel import data
from howdah.parallel.data import Reducer, Replicas, listen_to_parameters
from howdah.parallel.flat_params import FlatUnit
from howdah.plan.flat_buffers import buffers
from howdah.shapes.weights import weights
from howdah.train.step import arrays_of, loss_of


class Noted(Group):
    """A group of one that notes the units of every reduction it is asked for."""

    def __init__(self, units):
        super().__init__(SingleRank(), axis="dp", counters=Counters())
        self.units, self.asked = units, []

    def all_reduce(self, flats, **how):
        names = {id(unit.gradients): name for name, unit in self.units.items()}
        self.asked.append([names[id(flat)] for flat in flats])
        return super().all_reduce(flats, **how)


def alone(shard):
    """One copy of the states."""
    return Replicas(shard, Group(SingleRank(), axis="dp", counters=Counters()))


def units_of(shape=SHAPE):
    made = {}
    for buffer in buffers(weights(shape)):
        flat, gradients = torch.zeros(buffer.length), torch.zeros(buffer.length)
        made[buffer.unit] = FlatUnit(buffer, 0, flat, flat, gradients, gradients)
    return made


BACKWARD = ["head", "layers.1", "layers.0", "embedding"]


@pytest.fixture
def group():
    noted = Noted(units_of())
    yield noted
    noted.close()


@pytest.fixture
def reducer(group):
    """Armed, with a bucket for each unit."""
    reducer = Reducer(group.units, alone(group), bucket_bytes=1)
    reducer.arm()
    return reducer


def tell(reducer, group, *units, but=None):
    """All gradients of `units` are ready, but one."""
    for unit in units:
        for segment in group.units[unit].buffer.segments:
            if segment.name != but:
                reducer.ready(segment.name)


def test_a_bucket_starts_with_its_last_gradient(reducer, group):
    reducer.ready("norm.weight")
    assert group.asked == []
    reducer.ready("head.weight")
    assert group.asked == [["head"]]


def test_buckets_start_in_one_order_whatever_is_ready_first(reducer, group):
    """All ranks must agree on the order, and backward may finish branches in any."""
    late = "layers.1.attention.k.weight"
    tell(reducer, group, "layers.0", "layers.1", but=late)
    assert group.asked == []
    tell(reducer, group, "head")
    assert group.asked == [["head"]]
    reducer.ready(late)
    assert group.asked == [["head"], ["layers.1"], ["layers.0"]]
    tell(reducer, group, "embedding")
    reducer.finish()
    assert group.asked == [[unit] for unit in BACKWARD]


def test_finish_reduces_what_backward_never_reached(reducer, group):
    """A parameter without a gradient must not hold up the ranks that have one."""
    tell(reducer, group, "head", "layers.0", "embedding")
    assert group.asked == [["head"]]
    reducer.finish()
    assert group.asked == [[unit] for unit in BACKWARD]


def test_micro_batches_but_the_last_reduce_nothing(reducer, group):
    tell(reducer, group, *BACKWARD)
    reducer.finish()
    assert len(group.asked) == 4
    tell(reducer, group, *BACKWARD)  # not armed: an early micro-batch of the next step
    assert len(group.asked) == 4
    reducer.arm()
    tell(reducer, group, *BACKWARD)
    reducer.finish()
    assert group.asked == [[unit] for unit in BACKWARD] * 2


def test_small_units_share_a_bucket(group):
    everything = sum(unit.gradients.nbytes for unit in group.units.values())
    reducer = Reducer(group.units, alone(group), bucket_bytes=everything)
    reducer.arm()
    reducer.finish()
    assert group.asked == [BACKWARD]


class Awaited(Future):
    """A second passes until it is there, by a clock that nothing else moves."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock
        self.set_result(None)

    def result(self, timeout=None):
        self._clock.now += 1.0
        return super().result(timeout)


class Slow(Group):
    """A group whose reductions are waited for."""

    now = 0.0

    def all_reduce(self, flats, **how):
        return Awaited(self)


def test_waiting_is_counted(monkeypatch):
    group = Slow(SingleRank(), axis="dp", counters=Counters())
    monkeypatch.setattr(data, "perf_counter", lambda: group.now)
    reducer = Reducer(units_of(), alone(group), bucket_bytes=1)
    for step in range(1, 3):
        reducer.arm()
        reducer.finish()
        assert reducer.exposed == len(reducer.buckets) * step
    group.close()


class Broken(Group):
    def all_reduce(self, flats, **how):
        future = Future()
        future.set_exception(RuntimeError("the wire was cut"))
        return future


def test_an_error_of_a_reduction_reaches_the_step():
    group = Broken(SingleRank(), axis="dp", counters=Counters())
    reducer = Reducer(units_of(), alone(group))
    reducer.arm()
    with pytest.raises(RuntimeError, match="the wire was cut"):
        reducer.finish()
    group.close()


# -- with real gradients


def summed(transport, micros, bucket_bytes):
    """Gradients of all micro-batches of all ranks; buckets, those begun early, and calls."""
    mesh, placed = place(transport)
    replicas = Replicas(mesh.shard, mesh.across)
    reducer = Reducer(placed.units, replicas, bucket_bytes=bucket_bytes)
    listen_to_parameters(placed.model, reducer)
    for number in range(micros):
        if number == micros - 1:
            reducer.arm()
        given = micro(number * transport.size + mesh.rank)
        loss_of(placed, arrays_of(given, mesh.device)).backward()
    early = len(reducer._started)
    reducer.finish()
    mesh.close()
    gradients = {name: unit.gradients.numpy() for name, unit in placed.units.items()}
    return gradients, (len(reducer.buckets), early, sum(mesh.counters.calls.values()))


def one_device(micros):
    mesh, placed = place(SingleRank())
    for number in range(micros):
        loss_of(placed, arrays_of(micro(number), mesh.device)).backward()
    return {name: unit.gradients.numpy() for name, unit in placed.units.items()}


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 4), (1 << 30, 1)])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 1), (2, 3), (3, 2), (4, 1)])
def test_gradients_are_summed_once_over_the_ranks(workers, ranks, micros, bucket_bytes, buckets):
    expected = one_device(ranks * micros)
    results = workers.run(summed, micros, bucket_bytes, ranks=ranks)
    for gradients, counts in results:
        # Backward has started every bucket; each was scattered and gathered once.
        assert counts == (buckets, buckets, 2 * buckets)
        for name, flat in gradients.items():
            np.testing.assert_allclose(flat, expected[name], rtol=1e-10, atol=1e-15)
            np.testing.assert_array_equal(flat, results[0][0][name])


def frozen_part(transport):
    """The blocks take no part in the loss, so that their gradients never come."""
    mesh, placed = place(transport)
    placed.reducer.arm()
    hidden = placed.model.embedding(torch.tensor([[1, 2, 3 + mesh.rank]]))
    (hidden.sum() + placed.model.norm(hidden).square().sum()).backward()
    placed.reducer.finish()
    mesh.close()
    unit = placed.units["embedding"]
    rows = unit.views(unit.gradients)["embedding.weight"].abs().sum(1)
    return rows.nonzero().flatten().tolist(), float(placed.units["layers.1"].gradients.abs().sum())


def test_a_parameter_without_a_gradient_holds_nobody_up(workers):
    assert workers.run(frozen_part, ranks=2) == [([1, 2, 3, 4], 0.0)] * 2


def test_one_replica_needs_no_reducer():
    _, placed = place(SingleRank())
    assert placed.reducer is None
