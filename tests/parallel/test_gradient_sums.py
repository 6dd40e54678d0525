"""Gradients are summed once over the ranks, while backward runs; which sum starts when is proved
in tests/plan/test_sum_order.py.
"""

from concurrent.futures import Future
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tiny import SHAPE, micro, place, summed_loss

from howdah.base import stopwatch
from howdah.base.stopwatch import Stopwatch
from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.comm.transport import SingleRank
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.sums import GradientSums, Window
from howdah.plan import sums as plan_sums
from howdah.plan.flat_buffers import buffers
from howdah.plan.sums import Span, Sum
from howdah.shapes.weights import weights


def units_of(shape=SHAPE):
    made = {}
    for buffer in buffers(weights(shape)):
        flat, gradients = torch.zeros(buffer.length), torch.zeros(buffer.length)
        made[buffer.unit] = FlatUnit(buffer, 0, flat, flat, gradients, gradients)
    return made


def sums_on(group):
    """A sum for each unit, over `group`."""
    units = units_of()
    rows = [
        Sum(0, "dp", (0, 1), "all_reduce", (Span(name, 0, one.buffer.length),))
        for name, one in units.items()
    ]
    like = torch.zeros(1)
    return GradientSums(rows, [group] * len(rows), units, Window(0, 0, like), Stopwatch())


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
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: group.now)
    summed = sums_on(group)
    for step in range(1, 3):
        summed.order.arm(0)
        summed.order.finish(0)
        assert summed._waited.seconds == len(summed.sums) * step
    group.close()


class Broken(Group):
    def all_reduce(self, flats, **how):
        future = Future()
        future.set_exception(RuntimeError("the wire was cut"))
        return future


def test_an_error_of_a_reduction_reaches_the_step():
    group = Broken(SingleRank(), axis="dp", counters=Counters())
    summed = sums_on(group)
    summed.order.arm(0)
    with pytest.raises(RuntimeError, match="the wire was cut"):
        summed.order.finish(0)
    group.close()


# -- with real gradients


def summed(transport, micros, bucket_bytes):
    """Gradients of all micro-batches of all ranks; sums, those begun early, and calls."""
    with patch.object(plan_sums, "BUCKET_BYTES", bucket_bytes):
        mesh, placed = place(transport)
    order, started = placed.sums.order, []
    placed.sums.start = lambda number, start=placed.sums.start: (
        started.append(number) or start(number)
    )
    for number in range(micros):
        if number == micros - 1:
            order.arm(0)
        summed_loss(placed, micro(number * transport.size + mesh.rank)).backward()
    early = len(started)
    order.finish(0)
    mesh.close()
    gradients = {name: unit.gradients.numpy() for name, unit in placed.units.items()}
    assert started == list(range(len(placed.sums.sums)))
    return gradients, (len(started), early, sum(mesh.counters.calls.values()))


def one_device(micros):
    _, placed = place(SingleRank())
    for number in range(micros):
        summed_loss(placed, micro(number)).backward()
    return {name: unit.gradients.numpy() for name, unit in placed.units.items()}


@pytest.mark.slow_after(2)
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
    placed.sums.order.arm(0)
    hidden = placed.model.embedding(torch.tensor([[1, 2, 3 + mesh.rank]]))
    (hidden.sum() + placed.model.norm(hidden).square().sum()).backward()
    placed.sums.order.finish(0)
    mesh.close()
    unit = placed.units["embedding"]
    rows = unit.views(unit.gradients)["embedding.weight"].abs().sum(1)
    return rows.nonzero().flatten().tolist(), float(placed.units["layers.1"].gradients.abs().sum())


def test_a_parameter_without_a_gradient_holds_nobody_up(workers):
    assert workers.run(frozen_part, ranks=2) == [([1, 2, 3, 4], 0.0)] * 2


def skipped(transport):
    """The gradients of a rank whose sums are all left out, and of one whose sums are not."""
    found = []
    for skip in (True, False):
        mesh, placed = place(transport)
        if skip:
            placed.sums.skipped |= set(range(len(placed.sums.sums)))
        placed.sums.order.arm(0)
        summed_loss(placed, micro(mesh.rank)).backward()
        placed.sums.order.finish(0)
        mesh.close()
        found.append({name: unit.gradients.numpy() for name, unit in placed.units.items()})
    return found


def test_a_skipped_sum_leaves_each_rank_its_own_term(workers):
    """The controls of `verify` rely on it."""
    (mine, both), (theirs, _) = workers.run(skipped, ranks=2)
    for name, whole in both.items():
        np.testing.assert_allclose(mine[name] + theirs[name], whole, rtol=1e-12, atol=1e-15)
        assert (mine[name] != whole).any()
