"""ZeRO-3: units are whole only while they are used, come before they are needed, and leave no
trace. That the numbers are those of one device is proved in tests/distributed.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from small_cases import FORMS
from tiny import micro, plan_of

from howdah.base.errors import UserError
from howdah.comm.transport import SingleRank
from howdah.parallel import apply as applying
from howdah.parallel import ops
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.full_tensors import full_gradient, full_parameter, full_state, parameter_names
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.gather_order import backward_units, forward_units, gather_counts
from howdah.plan.method import Method
from howdah.shapes.weights import parts, weights
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory
from howdah.train.report import measured_memory
from howdah.train.step import StepContext, held_out_loss, train_step

MICROS = 2


def stepper_on(transport, words, form="untied", precision="float64", dropout=0.0):
    method, shape = Method(precision, dropout=dropout), FORMS[form]
    plan = plan_of(shape, f"dp{transport.size} {words} x{MICROS}", method)
    mesh = connect_mesh(plan.layout, transport, torch.device("cpu"))
    placed = apply(plan, mesh=mesh, fill=random_init(weights(shape), 5))
    return StepContext(placed, mesh, method, seed=5)


def batch(context, *, first=0, micros=MICROS):
    """This rank's micro-batches of a global batch that is the same for every number of ranks."""
    size, rank, shape = context.mesh.world.size, context.mesh.rank, context.placed.plan.shape
    return [micro(first + n * size + rank, shape=shape) for n in range(micros)]


def steps(context, number, **how):
    return [
        train_step(context, batch(context, first=100 * step, **how), step=step, rate=1e-2)
        for step in range(number)
    ]


def everything(context):
    """Parameters, gradients and moments by name."""
    placed = context.placed
    return {
        f"{what} {name}": full(placed, name).numpy()
        for name in parameter_names(placed)
        for what, full in (
            ("weight", full_parameter),
            ("gradient", full_gradient),
            ("moment", partial(full_state, state="exp_avg_sq")),
        )
    }


# -- the same training ---------------------------------------------------------------


def train_and_look(transport, words, form="untied", precision="float64", dropout=0.1):
    context = stepper_on(transport, words, form, precision, dropout)
    losses = [result.loss for result in steps(context, 2)]
    held_out = held_out_loss(context, iter(batch(context, first=900)))
    losses += [result.loss for result in steps(context, 1)]
    found = everything(context), losses, held_out
    context.mesh.close()
    return found


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "words", ["zero3", "zero3 accumulate=whole", "zero3 recompute=full", "zero3 release=step"]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_evaluations_between_steps_change_nothing(workers, words, ranks):
    plain, losses, held_out = workers.run(train_and_look, "", ranks=ranks)[0]
    for found, mine, mine_out in workers.run(train_and_look, words, ranks=ranks):
        np.testing.assert_allclose(mine, losses, rtol=1e-12)
        np.testing.assert_allclose(mine_out, held_out, rtol=1e-12)
        for name, value in plain.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-8, atol=1e-12, err_msg=name)


# -- what is held --------------------------------------------------------------------


def held(transport, precision):
    context = stepper_on(transport, "zero3", precision=precision)
    steps(context, 1)
    placed, rank = context.placed, transport.rank
    given = batch(context)[0]  # a part of an array would count as the whole
    given = replace(given, tokens=given.tokens.copy(), labels=given.labels.copy())
    measured = measured_memory(context, given)
    rows = {row.component: row.bytes for row in memory(placed.plan, rank, kernels_of(placed.plan))}
    cut = [(len(u.weights), len(u.masters), u.buffer.length) for u in placed.units.values()]
    meta = list(placed.model.parameters())
    context.mesh.close()
    return measured, rows, cut, meta


@pytest.mark.parametrize("precision", ["float32", "bf16", "float64"])
def test_each_rank_holds_what_is_predicted(workers, precision):
    results = workers.run(held, precision, ranks=3)
    for measured, rows, cut, meta in results:
        assert measured == {name: rows[name] for name in measured}
        assert {"weights", "gathered", "gradients", "moments", "activations"} <= {*measured}
        assert all(weights == masters for weights, masters, _ in cut)
        assert not meta
    for shares in zip(*(cut for _, _, cut, _ in results), strict=True):
        assert sum(share for share, *_ in shares) == shares[0][2]


class Watching(ShardedWeights):
    """Writes down what is gathered, when it was asked for, and how much is whole."""

    def __init__(self, *given, **how):
        super().__init__(*given, **how)
        self.log, self.late, self.most, self.moved = [], [], 0, []

    def begin(self, kind):
        self.log, self.late = [], []
        super().begin(kind)

    def _gather(self, unit):
        whole = super()._gather(unit)
        both = [whole.views, *(one.views for one in self._whole.values())]
        self.most = max(self.most, sum(v.nbytes for views in both for v in views.values()))
        places = sorted(
            (v.data_ptr(), v.data_ptr() + v.nbytes) for views in both for v in views.values()
        )
        assert all(one[1] <= two[0] for one, two in pairwise(places)), "two units overlap"
        inside = self.window.data_ptr(), self.window.data_ptr() + self.window.nbytes
        self.moved += [p for p in places if not inside[0] <= p[0] <= p[1] <= inside[1]]
        self.log.append(unit)
        return whole

    def _advance_to(self, unit):
        if unit not in self._whole:
            self.late.append(unit)
        super()._advance_to(unit)


def watched(transport, form, words):
    with patch.object(applying, "ShardedWeights", Watching):
        context = stepper_on(transport, words, form)
    seen, gatherer = [], context.placed.gatherer
    for _ in range(2):
        steps(context, 1)
        seen.append((gatherer.log, gatherer.late))
    held_out_loss(context, iter(batch(context, micros=1)))
    seen.append((gatherer.log, gatherer.late))
    plan, window = context.placed.plan, gatherer.window.nbytes
    context.mesh.close()
    return plan, seen, (gatherer.most, window, gatherer.moved)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("words", ["zero3", "zero3 recompute=full", "zero3 recompute=selective"])
@pytest.mark.parametrize("form", FORMS)
def test_units_come_in_the_planned_order_and_after_the_first_step_ahead(workers, form, words):
    for plan, (first, second, out), (most, window, moved) in workers.run(
        watched, form, words, ranks=2
    ):
        counts = gather_counts(plan, 0)
        once = list(forward_units(plan, parts(plan.shape)))
        back = list(backward_units(plan, parts(plan.shape)))
        assert once[-1] == back[0]
        assert first[0] == second[0] == [*once, *back[1:]] * MICROS
        assert {unit: first[0].count(unit) for unit in first[0]} == counts
        assert first[1] == first[0] and second[1] == []  # at first as they are asked for
        assert out == (once, once)
        assert most <= window and not moved


@pytest.mark.parametrize("words", ["zero3 release=step", "zero3 release=step recompute=full"])
def test_units_that_stay_come_once_in_a_step(workers, words):
    for plan, (first, second, out), (most, window, moved) in workers.run(
        watched, "laptop", words, ranks=2
    ):
        once = [*dict.fromkeys(forward_units(plan, parts(plan.shape)))]
        assert first[0] == second[0] == out[0] == once
        assert dict.fromkeys(once, 1) == gather_counts(plan, 0)
        assert second[1] == []  # all ahead
        assert most == window and not moved


def test_what_a_model_of_each_form_asks_for():
    """Written out: an embedding is not asked for in backward, nor the last unit twice."""
    found = {}
    for form in ("laptop", "untied", "gpt2", "norm after"):
        plan = plan_of(FORMS[form], "dp2 zero3 x1", Method("float32"))
        units = [*forward_units(plan, parts(plan.shape)), "|"]
        found[form] = " ".join([*units, *backward_units(plan, parts(plan.shape))])
        assert gather_counts(plan, 0)["layers.1"] == 2
    assert found == {
        "laptop": "tied layers.0 layers.1 head tied | tied head layers.1 layers.0",
        "untied": "embedding layers.0 layers.1 head | head layers.1 layers.0",
        "gpt2": "tied embedding layers.0 layers.1 head tied | tied head layers.1 layers.0",
        "norm after": "tied layers.0 layers.1 tied | tied layers.1 layers.0",
    }


# -- what was released -----------------------------------------------------------------


class Poisoned(ShardedWeights):
    """Fills everything with NaN that is no longer whole, at once and until it is gathered over."""

    def _advance_to(self, unit):
        assert unit not in self._here
        super()._advance_to(unit)
        for one in self._whole.values():
            one.handle.result()
        kept = [one.views for one in self._whole.values()]
        saved = [{name: view.clone() for name, view in views.items()} for views in kept]
        self.window.fill_(float("nan"))
        for views, values in zip(kept, saved, strict=True):
            for name, value in values.items():
                views[name].copy_(value)

    def end(self):
        super().end()
        self.window.fill_(float("nan"))


def poisoned(transport, form, words, precision, linear=None):
    """Losses and gradients of two steps and an evaluation, in a window full of NaN."""
    with patch.object(applying, "ShardedWeights", Poisoned):
        context = stepper_on(transport, words, form, precision)
    with patch.object(ops._Linear, "backward", staticmethod(linear or ops._Linear.backward)):
        losses = [result.loss for result in steps(context, 2)]
    losses.append(held_out_loss(context, iter(batch(context)))[0])
    found = [unit.summed.numpy().copy() for unit in context.placed.units.values()]
    context.mesh.close()
    return losses, found


@pytest.mark.parametrize("words", ["zero3", "zero3 recompute=full", "zero3 release=step"])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_read_of_a_unit_that_was_released(workers, form, words):
    for losses, found in workers.run(poisoned, form, words, "float32", ranks=2):
        assert np.isfinite(losses).all() and all(np.isfinite(one).all() for one in found)


KEPT = {}


def keeps_a_view(ctx, gradient):
    """A linear that looks its weight up once, and never asks again."""
    (x,) = ctx.saved_tensors
    weight = KEPT.setdefault(ctx.weight.name, ctx.weight.value())
    rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)
    ctx.weight.add(lambda out: ops.add_product(out, rows.T, inputs))
    return gradient @ weight, None, None


def test_an_operation_that_keeps_a_view_is_caught(workers):
    results = workers.run(poisoned, "untied", "zero3", "float32", keeps_a_view, ranks=2)
    assert all(any(np.isnan(one).any() for one in found) for _, found in results)


# -- the order -------------------------------------------------------------------------


def turn_round(stages):
    """The blocks of the one stage come the other way round."""
    first, *blocks, last = stages[0]
    stages[0] = (first, *reversed(blocks), last)


def turned_round(transport):
    """Rank 1 runs its blocks the other way round."""
    context = stepper_on(transport, "zero3")
    if transport.rank == 1:
        turn_round(context.placed.executor.parts)
    with pytest.raises(UserError) as raised:
        steps(context, 1)
    context.mesh.close()
    return str(raised.value)


def test_ranks_that_want_different_units_are_told_before_any_is_gathered(workers):
    expected = (
        "a step of 2 micro-batches: the ranks use different weights as their unit 2: "
        "rank 0 layers.0, rank 1 layers.1; zero3 needs the same model and the same number of "
        "micro-batches on every rank"
    )
    assert workers.run(turned_round, ranks=2) == [expected] * 2


def another_order(transport):
    context = stepper_on(transport, "zero3")
    before = steps(context, 1)
    turn_round(context.placed.executor.parts)
    with pytest.raises(UserError) as raised:
        steps(context, 1)
    context.placed.gatherer.end()
    turn_round(context.placed.executor.parts)
    again = steps(context, 1, micros=1)  # another kind of pass, with an order of its own
    context.mesh.close()
    return str(raised.value), np.isfinite([before[0].loss, again[0].loss]).all()


def test_an_order_that_changes_is_refused_and_not_guessed(workers):
    expected = (
        "a step of 2 micro-batches uses layers.1 as its unit 2 where it used layers.0 before: a "
        "model that is shared out by zero3 must use its weights in one order; use zero2"
    )
    assert workers.run(another_order, ranks=2) == [(expected, True)] * 2


@pytest.mark.parametrize("words", ["zero3", "zero3 accumulate=whole"])
def test_one_replica_has_nobody_to_share_with(words):
    context = stepper_on(SingleRank(), words)
    assert not context.placed.sums.sums and context.placed.gatherer is None
    assert steps(context, 1)[0].norm > 0
    assert all(not unit.shared_out for unit in context.placed.units.values())
