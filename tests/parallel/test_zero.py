"""ZeRO 1 and 2: what is shared out is held once, and weights are there when they are needed."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tiny import SHAPE, TIED, micro, plan_of

from howdah.comm.transport import SingleRank
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.full_tensors import full_gradient, full_parameter, full_state, parameter_names
from howdah.parallel.mesh import connect_mesh
from howdah.plan import sums
from howdah.plan.flat_buffers import share
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.shapes.weights import weights
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory
from howdah.train.step import StepContext, accumulate, train_step

ZERO = ["zero1", "zero2 accumulate=whole", "zero2"]
MICROS = 3


def stepper_on(transport, words, shape=SHAPE, precision="float64"):
    method = Method(precision)
    plan = plan_of(shape, f"dp{transport.size} {words}", method)
    mesh = connect_mesh(plan.layout, transport, torch.device("cpu"))
    placed = apply(plan, mesh=mesh, fill=random_init(weights(shape), 5))
    return StepContext(placed, mesh, method, seed=5)


def batch(transport, shape, *, micros=MICROS, first=0):
    """This rank's micro-batches of a global batch that is the same for every number of ranks."""
    return [micro(first + n * transport.size + transport.rank, shape=shape) for n in range(micros)]


def run(transport, words, shape, steps=2):
    """Everything of a few steps by name: parameters, gradients, moments; and what is held."""
    context = stepper_on(transport, words, shape)
    placed = context.placed
    for step in range(steps):
        train_step(context, batch(transport, shape, first=100 * step), step=step, rate=1e-2)
    names = parameter_names(placed)
    found = {
        **{f"weight {n}": full_parameter(placed, n).numpy() for n in names},
        **{f"gradient {n}": full_gradient(placed, n).numpy() for n in names},
        **{f"moment {n}": full_state(placed, n, "exp_avg_sq").numpy() for n in names},
    }
    placed.sync_weights()
    bits = {name: unit.weights.numpy().copy() for name, unit in placed.units.items()}
    context.mesh.close()
    return found, bits


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("words", ZERO)
@pytest.mark.parametrize(
    ("ranks", "shape"), [(2, SHAPE), (3, TIED), (4, SHAPE)], ids=["2", "3 tied", "4"]
)
def test_steps_are_those_of_plain_data_parallelism(workers, words, ranks, shape):
    plain = workers.run(run, "", shape, ranks=ranks)
    shared = workers.run(run, words, shape, ranks=ranks)
    for found, bits in shared:
        for name, value in plain[0][0].items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-13, err_msg=name)
        for unit, value in shared[0][1].items():
            np.testing.assert_array_equal(bits[unit], value)


def held(transport, words, precision):
    """Of every unit: its length, the own range, and the elements of each kind of tensor."""
    context = stepper_on(transport, words, precision=precision)
    rows = []
    for unit in context.placed.units.values():
        gradients = unit.gradients
        apart = 0 if unit.masters.dtype == unit.weights.dtype else len(unit.masters)
        whole = 0 if gradients is None else len(gradients)
        kept = len(unit.summed) if gradients is None else whole
        rows.append((unit.buffer.length, (unit.start, unit.stop), len(unit.weights), apart, kept))
    moments = sum(state["exp_avg"].numel() for state in context.placed.optimizer.state.values())
    context.mesh.close()
    return rows, moments


@pytest.mark.parametrize("words", ZERO)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_each_rank_holds_its_share_alone(workers, words, precision):
    results = workers.run(held, words, precision, ranks=3)
    for rank, (rows, moments) in enumerate(results):
        for length, own, kept_weights, masters, gradients in rows:
            start, stop = own
            assert own == share(length, 3, rank)
            assert kept_weights == length
            assert masters == (stop - start if precision == "bf16" else 0)
            assert gradients == (stop - start if words == "zero2" else length)
        assert moments == sum(stop - start for _, (start, stop), *_ in rows)
    for units in zip(*(rows for rows, _ in results), strict=True):
        ends = [own for _, own, *_ in units]
        assert ends[0][0] == 0 and ends[-1][1] == units[0][0]
        assert all(a[1] == b[0] for a, b in pairwise(ends))


def late(transport):
    """Weights right after an update, and as the next forward pass finds them."""
    context = stepper_on(transport, "zero1")
    placed = context.placed
    before = {name: unit.weights.clone() for name, unit in placed.units.items()}
    train_step(context, batch(transport, SHAPE), step=0, rate=1e-2)
    counted = dict(context.mesh.counters.sent())
    stale = sum(
        torch.equal(
            unit.weights[share(len(unit.weights), 2, 1 - transport.rank)[0] :][:8],
            before[name][share(len(unit.weights), 2, 1 - transport.rank)[0] :][:8],
        )
        for name, unit in placed.units.items()
    )
    accumulate(context, batch(transport, SHAPE, micros=1), step=1, tokens=10)
    after = dict(context.mesh.counters.sent())
    gathered = [row for row in after if row.operation == "all_gather"]
    whole = {
        name: full_parameter(placed, s.name).numpy().ravel()
        for name, unit in placed.units.items()
        for s in unit.buffer.segments[:1]
    }
    seen = {name: placed.units[name].weights[: len(value)].numpy() for name, value in whole.items()}
    context.mesh.close()
    return stale, any(row.operation == "all_gather" for row in counted), gathered, whole, seen


def test_weights_come_with_the_forward_pass_that_needs_them(workers):
    for stale, early, gathered, whole, seen in workers.run(late, ranks=2):
        assert stale == 4 and not early  # the other rank's ranges are those of before the update
        assert gathered
        for name, value in whole.items():
            np.testing.assert_array_equal(seen[name], value)


def windows(transport, words, shape):
    """The window of a rank, in bytes, and as it was planned; what was added to it in two steps."""
    method = Method("float32")
    with patch.object(sums, "BUCKET_BYTES", 1):  # every unit by itself
        plan = plan_of(shape, words, method)
        mesh = connect_mesh(plan.layout, transport, torch.device("cpu"))
        placed = apply(plan, mesh=mesh, fill=random_init(weights(shape), 5))
        context = StepContext(placed, mesh, method, seed=5)
        for step in range(2):
            place = mesh.index_of("replicas")
            mine = [micro(plan.micros * place + n, shape=shape) for n in range(plan.micros)]
            placed.sums.window.memory.fill_(torch.nan)  # nothing is read of what was there
            norm = train_step(context, mine, step=step, rate=1e-2).norm
        rows = memory(plan, mesh.rank, kernels_of(plan))
        planned = sum(row.bytes for row in rows if row.component == "reduced")
        units = sorted((unit.buffer.length * 4 for unit in placed.units.values()), reverse=True)
    mesh.close()
    window = placed.sums.window
    assert norm > 0
    return window.memory.nbytes, planned, window.added, len(window.free), units


DEEP = replace(SHAPE, layers=6)
LONG = replace(TIED, layers=6, norm="rmsnorm", bias=False)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("shape", [DEEP, LONG], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "words",
    [
        *("dp2 zero2 x3", "dp2 zero3 x2", "dp4 zero2 shard2 x2", "dp2 tp2 sp zero2 x2"),
        *("pp2 dp2 zero2 gpipe x4", "pp2 dp2 zero2 interleaved v2 x4", "pp2 dp2 zero2 zb-h1 x4"),
        *("pp2 dp2 zero2 zb-h2 x4", "pp2 dp2 zero3 zb-v x4"),
    ],
)
def test_whole_gradients_take_no_more_than_was_planned(workers, words, shape):
    """Buffers of every length used to stay, once for each stage: more than all gradients."""
    world = parse_layout(words).world
    for held, planned, added, free, units in workers.run(windows, words, shape, ranks=world):
        assert held == planned and added == 0
        assert free * units[0] >= held  # every slot is free again
        assert held <= 4 * units[0] and (held < sum(units) or len(units) <= 5)


@pytest.mark.parametrize("words", ZERO)
def test_one_replica_has_nobody_to_share_with(words):
    context = stepper_on(SingleRank(), words)
    assert not context.placed.sums.sums and context.placed.gatherer is None
    result = train_step(context, batch(SingleRank(), SHAPE), step=0, rate=1e-2)
    assert result.norm > 0
