"""What is kept off the device: what moves when, through how much memory, and what is refused. That
the numbers are those of one device is proved in tests/distributed/test_homes_parallel.py.
"""

import re
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from small_cases import FORMS
from tiny import micro, plan_of

from howdah.base.errors import Unfinished, UserError
from howdah.comm.handle import DONE
from howdah.comm.transport import SingleRank
from howdah.host.scratch import Scratch
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.homes import Homes
from howdah.parallel.mesh import connect_mesh
from howdah.plan.homes import AXIS, moves, pool_problem, set_width, sets_of, staged_bytes
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method, Optimizer
from howdah.plan.sharding import local_buffers
from howdah.plan.storage import Storage
from howdah.plan.support import unsupported
from howdah.shapes.weights import weights
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory, peak
from howdah.train.step import StepContext, train_step

DISK = "weights=disk gradients=disk optimizer=disk activations=disk"


def planned(words, precision="bf16", form="untied", **storage):
    plan = plan_of(FORMS[form], words, Method(precision))
    return replace(plan, storage=Storage(**storage))


@pytest.fixture
def place(tmp_path):
    """Lays a plan out on one rank, and closes what it opened."""
    meshes = []

    def placed(plan):
        storage = replace(plan.storage, folder=plan.storage.folder or str(tmp_path))
        plan = replace(plan, storage=storage)
        mesh = connect_mesh(plan.layout, SingleRank(), torch.device("cpu"))
        meshes.append(mesh)
        fill = random_init(weights(plan.shape), 5)
        return StepContext(apply(plan, mesh=mesh, fill=fill), mesh, plan.method, seed=5)

    yield placed
    for mesh in meshes:
        mesh.close()


def steps(context, number, first=0):
    shape = context.placed.plan.shape
    batches = [[micro(10 * n + m, shape=shape) for m in range(2)] for n in range(first, number)]
    return [
        train_step(context, batch, step=n, rate=1e-2)
        for n, batch in enumerate(batches, start=first)
    ]


# -- what is decided -----------------------------------------------------------------


def units_of(words):
    return local_buffers(planned(words), 0)


def rows(words, precision="bf16", form="untied"):
    found = Counter()
    for move in moves(planned(words, precision, form), 0):
        found[move.operation, move.link, move.update] += move.bytes * move.times
    return {key: count for key, count in found.items() if count}


def test_moves_of_a_step_by_the_formulas_of_the_page():
    n = sum(unit.length for unit in units_of("single x3"))
    up, down = ("fetch weights", "host", True), ("evict gradients", "host", True)
    read, write = ("fetch optimizer", "disk", True), ("evict optimizer", "disk", True)
    assert rows("single x3") == rows("single x3 activations=host") == {}
    assert rows("single x3 optimizer=host") == {up: 2 * n, down: 4 * n}
    assert rows("single x3 optimizer=disk") == {up: 2 * n, down: 4 * n, read: 12 * n, write: 12 * n}
    both = rows("single x3 gradients=disk optimizer=host")
    assert both == {
        up: 2 * n,
        ("evict gradients", "disk", False): 3 * 4 * n,
        ("fetch gradients", "disk", False): 2 * 4 * n,
        ("fetch gradients", "disk", True): 2 * 4 * n,
    }
    found = rows("single x3 weights=disk gradients=host optimizer=host")
    assert found["evict gradients", "host", False] == 3 * 4 * n
    assert found["evict weights", "disk", True] == 2 * n
    assert found["fetch weights", "disk", False] < 3 * 2 * 2 * n  # not all are used twice


@pytest.mark.parametrize(
    ("words", "precision", "width"),
    [
        ("single x1", "bf16", 0),
        ("single x1 optimizer=host", "bf16", 4),
        ("single x1 optimizer=host gradients=host", "bf16", 0),
        ("single x1 optimizer=disk", "bf16", 4 + 12),
        ("single x1 optimizer=disk gradients=host weights=disk", "bf16", 12 + 2),
        ("single x1 optimizer=disk gradients=disk weights=disk", "float32", 4 + 12),
    ],
)
def test_what_an_update_needs_of_memory(words, precision, width):
    plan = planned(words, precision)
    longest = max(unit.length for unit in units_of(words))
    assert sum(set_width(plan).values()) == width
    assert sets_of(plan, 0) == ((3, longest) if width else (0, 0))
    adding = 4 * longest * ("gradients=disk" in words)
    assert staged_bytes(plan, 0) == 3 * longest * width + adding


def test_a_pool_bounds_the_sets_and_may_be_too_small_for_the_largest_unit():
    plan = planned("single x1 optimizer=disk")
    _, longest = sets_of(plan, 0)
    for pool, sets in ((0, 3), (16 * longest * 3, 3), (16 * longest * 2 + 7, 2), (16 * longest, 1)):
        bounded = replace(plan, storage=Storage(pool=pool))
        assert sets_of(bounded, 0) == (sets, longest) and pool_problem(bounded, 0) is None
    small = replace(plan, storage=Storage(pool=16 * longest - 1))
    sentence = pool_problem(small, 0)
    assert f"use storage.pool={16 * longest} or more" in sentence and "layers.0" in sentence


@pytest.mark.parametrize(
    ("words", "way"),
    [
        ("single weights=host", "add optimizer=host"),
        ("single gradients=disk", "add optimizer=disk"),
        ("dp2 zero1 weights=host optimizer=host", "use zero3"),
        ("dp2 zero1 gradients=host optimizer=host", "use zero2 or zero3"),
        ("dp2 zero2 accumulate=whole gradients=host optimizer=host", "without accumulate=whole"),
        ("dp4 zero2 shard2 gradients=disk optimizer=disk", "use gradients=host"),
        ("pp2 gradients=disk optimizer=disk", "tied over stages"),
    ],
)
def test_homes_that_do_not_go_together_are_refused(words, way):
    (sentence,) = unsupported(FORMS["laptop"], parse_layout(words))
    assert way in sentence and "can be planned, but not run yet" in sentence
    assert (
        unsupported(FORMS["laptop"], parse_layout("pp2 zb-v gradients=disk optimizer=disk")) == []
    )


@pytest.mark.parametrize(
    ("words", "precision", "way"),
    [
        ("single x2", "bf16", "add optimizer=host to the layout"),
        ("single x2 optimizer=disk", "bf16", "add optimizer=host to the layout"),
        ("single x2 optimizer=host gradients=disk", "bf16", "use weights and gradients=host"),
        ("single x2 optimizer=host weights=host", "float32", "use method.precision=bf16"),
    ],
)
def test_an_update_that_is_one_step_late_needs_states_on_the_host(words, precision, way):
    late = Method(precision, optimizer=Optimizer(delay=True))
    with pytest.raises(UserError, match=re.escape(way)):
        plan_of(FORMS["untied"], words, late)


def test_a_norm_that_is_not_finite_leaves_no_late_update(place):
    """Steps 1 and 2 update nothing and by the gradients of 1; behind a broken step 3, step 4 does
    nothing.
    """
    late = Method("float32", optimizer=Optimizer(delay=True))
    context = place(plan_of(FORMS["untied"], "single x2 optimizer=host", late))
    broken = replace(context, square=lambda _: torch.tensor(float("nan"), dtype=torch.float64))
    unit = context.placed.units["layers.0"]
    seen = [unit.masters.clone()]
    for number, one in enumerate((context, context, broken, context, context)):
        steps(one, number + 1, first=number)
        seen.append(unit.masters.clone())
    changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert changed == [False, True, True, False, True]
    assert context.placed.update.turns.updates == 3
    assert context.placed.update.staged_bytes == staged_bytes(context.placed.plan, 0) == 0


def test_the_device_holds_two_units_and_the_disk_the_rest():
    plan = planned(f"single x2 {DISK}")
    held, kept = memory(plan, 0, kernels_of(plan)), sum(u.length for u in units_of("single x2"))
    lengths = sorted(unit.length for unit in units_of("single x2"))
    on_disk = {row.component: row.bytes for row in held if row.home == "disk"}
    assert on_disk.pop("activations") > 0
    assert on_disk == {
        "weights": 2 * kept,
        "masters": 4 * kept,
        "gradients": 4 * kept,
        "moments": 8 * kept,
    }
    on_device = {row.component: row.bytes for row in held if row.home == "device"}
    assert on_device["gathered"] == 2 * sum(lengths[-2:]) and "weights" not in on_device
    assert peak(held, "host") == staged_bytes(plan, 0)


# -- what runs -----------------------------------------------------------------------


def test_what_is_on_the_disk_is_not_in_memory(place):
    context = place(planned(f"single x2 {DISK}"))
    steps(context, 2)
    placed = context.placed
    for unit in placed.units.values():
        assert unit.weights.is_meta and unit.masters.is_meta and unit.summed.is_meta
        assert unit.gradients is None
        assert placed.own(unit, "masters").any() and placed.own(unit, "exp_avg").any()
        assert torch.equal(placed.own(unit, "masters").bfloat16(), placed.own(unit, "weights"))
    assert not placed.optimizer.state


@pytest.mark.parametrize("pool", [0, 1])
def test_a_pool_changes_no_bit(place, pool):
    plain = planned("single x2", "float32")
    away = planned("single x2 optimizer=disk gradients=host", "float32")
    _, longest = sets_of(away, 0)
    bounded = replace(away, storage=Storage(pool=pool * longest * sum(set_width(away).values())))
    one, other = place(plain), place(bounded)
    first, second = steps(one, 3), steps(other, 3)
    assert [step.loss for step in first] == [step.loss for step in second]
    assert max(step.norm for step in first) > 1.0, "they are clipped"
    assert len(other.placed.update.sets) == (pool or 3)
    for name, unit in one.placed.units.items():
        mine = other.placed.own(other.placed.units[name], "masters")
        assert torch.equal(unit.masters, mine), name


@pytest.mark.parametrize(
    ("precision", "there"),
    [("float32", ""), ("bf16", "weights=host gradients=disk optimizer=host")],
)
def test_rows_that_are_added_at_home_change_no_bit(place, precision, there):
    """Tokens stand several times in a micro-batch, and in both."""
    here = "weights=host gradients=host optimizer=host"
    one, other = (place(planned(f"single x2 {words}", precision)) for words in (there, here))
    first, second = steps(one, 3), steps(other, 3)
    assert [(step.loss, step.norm) for step in first] == [(step.loss, step.norm) for step in second]
    for name, unit in one.placed.units.items():
        mine = other.placed.own(other.placed.units[name], "masters")
        assert torch.equal(one.placed.own(unit, "masters"), mine), name
    moved = {row.operation for row in other.mesh.counters.sent() if row.axis == AXIS}
    assert "evict rows" in moved


def test_a_norm_that_is_not_finite_updates_nothing(place):
    context = place(planned("single x2 optimizer=disk", "float32"))
    steps(context, 1)
    placed = context.placed
    before = {name: placed.own(unit, "masters").clone() for name, unit in placed.units.items()}
    broken = replace(context, square=lambda _: torch.tensor(float("inf"), dtype=torch.float64))
    steps(broken, 2, first=1)
    assert placed.update.turns.updates == 1
    for name, unit in placed.units.items():
        assert torch.equal(placed.own(unit, "masters"), before[name])


def test_weights_are_asked_for_one_unit_ahead(place):
    """From the second step on, when the order is known; of the embedding the rows alone come."""
    context = place(planned("single x1 weights=host optimizer=host", form="untied"))
    batch = [micro(0, shape=context.placed.plan.shape)]
    train_step(context, batch, step=0, rate=1e-2)
    asked, fetch = [], Homes.fetch_weights

    def watched(self, unit, out):
        asked.append((unit.buffer.unit, tuple(context.placed.gatherer._here)))
        return fetch(self, unit, out)

    with patch.object(Homes, "fetch_weights", watched):
        train_step(context, batch, step=1, rate=1e-2)
    names = [name for name, _ in asked]
    assert names == ["layers.0", "layers.1", "head", "layers.1", "layers.0"]
    moved = context.mesh.counters.sent()
    assert all(row.axis == AXIS for row in moved if row.link in ("host", "disk"))


class Late:
    """A move that has not ended when it is waited for."""

    def done(self):
        return False

    def result(self):
        pass


def test_a_trace_names_what_moves_and_what_is_waited_for(place):
    context = place(planned(f"single x2 {DISK}"))
    steps(context, 2)
    homes, recorder = context.placed.homes, context.recorder
    told = Counter(call.operation for call in recorder.steps[-1].calls if call.axis == AXIS)
    moved = [one for one in told if not one.startswith("wait")]
    counted = {row.operation for row in context.mesh.counters.sent() if row.axis == AXIS}
    assert {one.partition(" of ")[0] for one in moved} == counted
    assert {one.partition(" of ")[2] for one in moved} >= {*context.placed.units}
    assert told["evict activations of layers.1"] % 2 == 0 < told["evict activations of layers.1"]
    with recorder.step(3):
        homes.wait("weights of layers.1", Late())
        homes.wait("weights of layers.0", DONE)
    assert [call.operation for call in recorder.steps[-1].calls] == ["wait for weights of layers.1"]


@pytest.mark.parametrize("home", ["host", "disk"])
def test_activations_leave_and_come_back_and_their_room_is_used_again(place, home):
    context = place(planned(f"single x2 activations={home}", form="laptop"))
    shelf = context.placed.executor.shelf
    steps(context, 1)
    assert shelf.held == 0
    room = context.placed.homes.scratch.size if home == "disk" else len(shelf._free)
    steps(context, 3, first=1)
    after = context.placed.homes.scratch.size if home == "disk" else len(shelf._free)
    assert shelf.held == 0 and after == room > 0


@pytest.mark.parametrize("home", ["host", "disk"])
def test_room_is_used_again_for_what_has_another_size_each_time(place, home):
    """As what experts keep, of which other tokens arrive in every micro-batch."""
    context = place(planned(f"single x2 activations={home}"))
    shelf = context.placed.executor.shelf
    for size in (9000, 5000, 8999, 1):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        room, out = shelf.take(size), torch.zeros_like(data)
        shelf.evict(room, data, of="a block").result()
        shelf.fetch(out, room, of="a block").result()
        shelf.give(size, room)
        assert torch.equal(out, data)
    assert [len(free) for free in shelf._free.values()] == [1] and shelf.held == 0
    small, large = shelf.take(10), shelf.take(9001)
    shelf.give(9001, large)
    shelf.give(10, small)
    assert len(shelf._free) == 2


def test_a_disk_that_has_filled_since_the_start_ends_the_run_and_no_checkpoint(place, monkeypatch):
    context = place(planned("single x2 activations=disk", form="laptop"))

    def full(*_):
        raise UserError("the disk has no room")

    monkeypatch.setattr(Scratch, "allocate", full)
    with pytest.raises(Unfinished, match="no room; the last checkpoint stands"):
        steps(context, 1)


def fails(*_, **__):
    raise Unfinished("it failed on its way")


def failed(*_):
    """A job that has failed: nothing was raised where it began."""
    job = Future()
    job.set_exception(Unfinished("it failed on its way"))
    return job


def failing_on(way):
    """What starts the moves of a lane, with those of one direction failing in their threads."""
    start = Homes._on_lane

    def on_lane(homes, what, lane, size, work, *after, of):
        return start(homes, what, lane, size, fails if lane == way else work, *after, of=of)

    return on_lane


@pytest.mark.parametrize(
    ("words", "where", "name", "fault"),
    [
        ("optimizer=disk", Scratch, "_read", failed),
        ("optimizer=disk", Scratch, "_write", failed),
        (DISK, Scratch, "_read", failed),
        (DISK, Scratch, "_write", failed),
        ("activations=disk", Scratch, "_read", failed),
        ("activations=disk", Scratch, "_write", failed),
        ("optimizer=host", Homes, "_on_lane", failing_on("fetch")),
        ("optimizer=host", Homes, "_on_lane", failing_on("evict")),
        (DISK.replace("disk", "host"), Homes, "_on_lane", failing_on("fetch")),
        (DISK.replace("disk", "host"), Homes, "_on_lane", failing_on("evict")),
        ("activations=host", Homes, "_on_lane", failing_on("fetch")),
        ("activations=host", Homes, "_on_lane", failing_on("evict")),
    ],
)
def test_a_move_that_fails_on_its_way_ends_the_step_with_a_sentence(
    place, words, where, name, fault
):
    """What was written last is waited for when it is used again, in the next step."""
    context = place(planned(f"single x2 {words}"))
    steps(context, 1)
    with patch.object(where, name, fault), pytest.raises(Unfinished, match="failed on its way"):
        steps(context, 3, first=1)


def test_an_update_beside_the_passes_that_fails_ends_the_step(place):
    plan = planned("single x2 optimizer=host")
    late = replace(plan.method, optimizer=replace(plan.method.optimizer, delay=True))
    context, start = place(replace(plan, method=late)), Homes.beside
    steps(context, 1)
    with (
        patch.object(Homes, "beside", lambda homes, work: start(homes, fails)),
        pytest.raises(Unfinished, match="failed on its way"),
    ):
        steps(context, 4, first=1)


def test_a_pool_that_is_too_small_starts_nothing(place, tmp_path):
    with pytest.raises(UserError, match=r"storage\.pool 5 bytes is too small"):
        place(planned("single x2 optimizer=disk", pool=5))
    assert list(tmp_path.iterdir()) == []
