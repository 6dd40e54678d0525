"""Moves of a GPU: each ends before its bytes are used, and begins behind what was computed. The GPU
is the CPU, and its copies are late (`late_streams.py`).
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from late_streams import PIECE, late_moves
from small_cases import FORMS
from tiny import micro, plan_of

from howdah.base.errors import UserError
from howdah.comm.transport import SingleRank
from howdah.parallel import home_lanes
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.home_lanes import CardLane, Locks
from howdah.parallel.mesh import connect_mesh
from howdah.plan import homes
from howdah.plan.method import Method, Optimizer
from howdah.plan.plan import for_gpus
from howdah.plan.storage import Storage
from howdah.shapes.weights import weights
from howdah.train.report import measured_memory, predicted_memory
from howdah.train.step import StepContext, train_step

STATES = "weights=host gradients=host optimizer=host"
ALL = f"{STATES} activations=host"
DISK = ALL.replace("host", "disk")


@contextmanager
def placed(plan, folder):
    plan = replace(plan, storage=Storage(folder=str(folder), io="threads"))
    mesh = connect_mesh(plan.layout, SingleRank(), torch.device("cpu"))
    try:
        fill = random_init(weights(plan.shape), 5)
        yield StepContext(apply(plan, mesh=mesh, fill=fill), mesh, plan.method, seed=5)
    finally:
        mesh.close()


def trained(plan, folder):
    """Losses, and all masters and states, after some steps."""
    with placed(plan, folder) as context:
        shape, model = plan.shape, context.placed
        losses = [
            train_step(
                context,
                [micro(10 * n + m, shape=shape) for m in range(plan.micros)],
                step=n,
                rate=1e-2,
            ).loss
            for n in range(3)
        ]
        kinds = ["weights", "masters", *plan.method.optimizer.states]
        units = model.units.values()
        return losses, [model.own(unit, kind).clone() for unit in units for kind in kinds]


def equal(first, second):
    return first[0] == second[0] and all(map(torch.equal, first[1], second[1]))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize(
    "words",
    [
        "optimizer=host",
        "gradients=host optimizer=host",
        STATES,
        "activations=host",
        ALL,
        "optimizer=disk",
        "gradients=host optimizer=disk activations=disk",
        DISK,
    ],
)
def test_late_copies_change_no_bit(tmp_path, words, precision):
    plan = plan_of(FORMS["untied"], f"single x2 {words}", Method(precision))
    with late_moves() as (streams, locked):
        found = trained(for_gpus(plan), tmp_path)
    assert equal(found, trained(plan, tmp_path))
    assert streams.copies and not locked


def test_late_copies_beside_an_update_that_is_late_too(tmp_path):
    method = Method("bf16", Optimizer(delay=True))
    plan = plan_of(FORMS["untied"], "single x2 optimizer=host", method)
    with late_moves():
        found = trained(for_gpus(plan), tmp_path)
    assert equal(found, trained(plan, tmp_path))


def no_wait_for_a_room(lane, out, fill):
    for number, (first, last) in enumerate(home_lanes._parts(out)):
        part = lane._part(number % 2, out, last - first)
        fill(part, first, last)
        out[first:last].copy_(part, non_blocking=True)


def read_too_early(event, part, first, last, take):
    take(part, first, last)


@contextmanager
def does_not_end(lane, called, after):
    with lane._streams.inside(lane._stream):
        lane._stream.wait_event(called)
        after.result()
        yield


MUTATIONS = {
    "a room is filled again too early": (CardLane, "up", no_wait_for_a_room),
    "a room is read too early": (home_lanes, "_taken", read_too_early),
    "a move does not end": (CardLane, "behind", does_not_end),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_move_that_does_not_wait_is_seen(tmp_path, mutation):
    plan = plan_of(FORMS["untied"], f"single x2 {DISK}", Method("bf16"))
    whole = trained(plan, tmp_path)
    with late_moves(), patch.object(*MUTATIONS[mutation]):
        assert not equal(trained(for_gpus(plan), tmp_path), whole)


def test_a_move_that_is_not_behind_what_was_computed_is_refused(tmp_path):
    @contextmanager
    def at_once(lane, called, after):
        after.result()
        with lane._streams.inside(lane._stream):
            yield

    plan = plan_of(FORMS["untied"], "single optimizer=host", Method("bf16"))
    with (
        late_moves(),
        patch.object(CardLane, "behind", at_once),
        pytest.raises(AssertionError, match="not behind what was computed"),
    ):
        trained(for_gpus(plan), tmp_path)


@pytest.mark.parametrize("words", ["optimizer=host", STATES, ALL, DISK, "activations=disk"])
def test_the_rooms_of_a_gpus_moves_are_in_the_plan(tmp_path, words):
    plan = for_gpus(plan_of(FORMS["untied"], f"single x2 {words}", Method("bf16")))
    with late_moves(), patch.object(homes, "ROOM", PIECE), placed(plan, tmp_path) as context:
        found = measured_memory(context, micro(1, shape=plan.shape))
        predicted = predicted_memory(plan, 0, packed=False)
    for name in {*found, *predicted}:
        if " at " in name and not name.startswith("activations"):
            assert found[name] == predicted[name] > 0, name
    assert found["staged at host"] >= 4 * PIECE


def test_memory_that_a_driver_does_not_lock_is_a_sentence():
    def refuse(memory):
        raise UserError("no")

    with patch.object(home_lanes, "register", refuse), pytest.raises(UserError, match="no"):
        Locks().lock(torch.zeros(8))
    Locks().lock(torch.zeros(0))  # of nothing, nothing is locked
