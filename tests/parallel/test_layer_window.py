"""The window of weights: how many units come ahead, what stays in it, and where they have room.
That numbers are those of one device is proved in tests/distributed/test_window_parallel.py.
"""

from collections import Counter
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
import torch
from small_cases import FORMS
from tiny import micro, plan_of

from howdah.comm.transport import SingleRank
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.homes import Homes
from howdah.parallel.layer_window import Window
from howdah.parallel.mesh import connect_mesh
from howdah.plan.gather_order import _fetched, gather_counts
from howdah.plan.method import Method
from howdah.plan.sharding import local_buffers
from howdah.plan.storage import Storage
from howdah.shapes.weights import weights
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory
from howdah.train.step import StepContext, train_step

HOST = "weights=host optimizer=host"


def planned(words, window, *, layers=2, vocab=16):
    """With fewer rows than the 18 tokens of a micro-batch the embedding comes whole."""
    shape = replace(FORMS["untied"], layers=layers, vocab=vocab)
    return replace(plan_of(shape, words, Method("float32")), storage=Storage(window=window))


@pytest.fixture
def place():
    """Lays a plan out on one rank."""
    meshes = []

    def placed(plan):
        meshes.append(connect_mesh(plan.layout, SingleRank(), torch.device("cpu")))
        fill = random_init(weights(plan.shape), 5)
        return StepContext(apply(plan, mesh=meshes[-1], fill=fill), meshes[-1], plan.method, seed=5)

    yield placed
    for mesh in meshes:
        mesh.close()


# -- room


def test_a_window_has_room_at_its_ends_then_between_and_moves_units_together():
    window = Window(torch.arange(10.0))
    assert window.take("a", 4).tolist() == [0, 1, 2, 3]
    assert window.take("b", 3).tolist() == [7, 8, 9]
    assert window.take("c", 2).tolist() == [5, 6] and window.take("d", 2) is None
    window.give("a")
    assert window.take("e", 3).tolist() == [0, 1, 2]
    window.give("c")
    window.give("e")
    assert window.take("c", 2).tolist() == [0, 1]  # the left end is free again
    window.give("b")
    assert window.take("f", 9) is None
    window.take("b", 5).copy_(torch.arange(5.0))
    window.give("c")
    there = window.together()
    assert there["b"].tolist() == [0, 1, 2, 3, 4] and window.take("f", 5) is not None
    assert there["b"].data_ptr() == window.memory.data_ptr()


# -- what comes


@pytest.mark.parametrize(
    ("window", "counts"),
    [
        # embedding layers.0 layers.1 head layers.1 layers.0 | embedding layers.0 layers.1 …
        (2, {"embedding": 2, "layers.0": 4, "layers.1": 4, "head": 2}),
        (3, {"embedding": 2, "layers.0": 1, "layers.1": 1, "head": 2}),
        (4, {"embedding": 1, "layers.0": 1, "layers.1": 1, "head": 1}),
        (9, {"embedding": 1, "layers.0": 1, "layers.1": 1, "head": 1}),
    ],
)
def test_what_is_used_again_soon_does_not_come_again(window, counts):
    plan = planned(f"single x2 {HOST}", window)
    assert gather_counts(plan, 0) == Counter(counts)
    longer = planned(f"single x9 {HOST}", window)
    order = ["embedding", "layers.0", "layers.1", "head", "layers.1", "layers.0"] * 9
    assert gather_counts(longer, 0) == Counter(_fetched(longer, order))


def test_the_device_holds_the_longest_units_of_a_window():
    lengths = sorted(unit.length for unit in local_buffers(planned(f"single x2 {HOST}", 2), 0))
    for window in (2, 3, 4, 9):
        plan = planned(f"single x2 {HOST}", window)
        rows = {one.component: one.bytes for one in memory(plan, 0, kernels_of(plan))}
        assert rows["gathered"] == 4 * sum(lengths[-window:])


def test_units_come_as_far_ahead_as_the_window_holds(place):
    """From the second step on, when the order is known."""
    context = place(planned(f"single x1 {HOST}", 3, layers=4))
    batch = [micro(0, shape=context.placed.plan.shape)]
    train_step(context, batch, step=0, rate=1e-2)
    asked, fetch = [], Homes.fetch_weights

    def watched(self, unit, out):
        asked.append((unit.buffer.unit, *context.placed.gatherer._here))
        return fetch(self, unit, out)

    with patch.object(Homes, "fetch_weights", watched):
        train_step(context, batch, step=1, rate=1e-2)
    assert asked == [
        ("embedding",),
        ("layers.0",),
        ("layers.1", "embedding"),
        ("layers.2", "layers.0"),
        ("layers.3", "layers.1"),
        ("head", "layers.2"),
        ("layers.1", "layers.3"),  # which is still there, as layers.2 is
        ("layers.0", "layers.2"),
    ]


@pytest.mark.parametrize("window", [2, 3, 4, 6])
@pytest.mark.parametrize("vocab", [16, 600])
def test_any_order_of_units_finds_its_weights_in_a_window(place, window, vocab):
    """With ends that are shorter, and much longer than blocks: their room is made by moving."""
    plan = planned(f"single x2 {HOST}", window, layers=5, vocab=vocab)
    plan = replace(plan, sequence=vocab)  # the embedding comes whole, too
    placed = place(plan).placed
    gatherer, random = placed.gatherer, Random(window)
    names = {unit: flat.buffer.names[0] for unit, flat in placed.units.items()}
    wanted = {unit: flat.views(flat.weights)[names[unit]] for unit, flat in placed.units.items()}
    moved, together = [], Window.together

    def watched(self):
        moved.append(len(self._places))
        return together(self)

    for kind in range(12):
        order = [random.choice([*names]) for _ in range(30)]
        order = [unit for at, unit in enumerate(order) if unit != order[at - 1]]
        for _ in range(2):
            fetched, fetch = [], Homes.fetch_weights

            def listed(self, unit, out, fetched=fetched, fetch=fetch):
                fetched.append(unit.buffer.unit)
                return fetch(self, unit, out)

            with (
                patch.object(Homes, "fetch_weights", listed),
                patch.object(Window, "together", watched),
            ):
                gatherer.begin(str(kind))
                for unit in order:
                    assert torch.equal(gatherer.value(names[unit]), wanted[unit])
                gatherer.end()
            assert fetched == [*_fetched(plan, order)]
    assert moved or window < 4 or vocab == 16


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("vocab", [16, 64])
@pytest.mark.parametrize("words", [HOST, f"{HOST} recompute=full", "optimizer=host weights=host"])
def test_a_window_changes_no_bit(place, words, vocab):
    """Nor do rows of the embedding that are read where they lie, of 64."""
    losses = []
    for homes, window in (("", 2), (words, 2), (words, 3), (words, 50)):
        plan = planned(f"single x2 {homes}", window, vocab=vocab)
        context, shape = place(plan), plan.shape
        batches = [[micro(10 * n + m, shape=shape) for m in range(2)] for n in range(3)]
        found = [train_step(context, one, step=n, rate=1e-2) for n, one in enumerate(batches)]
        losses.append([step.loss for step in found])
    assert all(one == losses[0] for one in losses)
