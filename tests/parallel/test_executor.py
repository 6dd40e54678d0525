"""The pipeline on its ranks: what each builds, how much it holds, when it lets go.

That a pipeline computes what one device does is proved in tests/distributed.
"""

import re
import time
import weakref
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from small_schedules import any_schedule
from strict_wire import check
from tiny import SHAPE, TIED, micro, plan_of

from howdah.base.errors import UserError
from howdah.comm.transport import SingleRank
from howdah.parallel.apply import apply
from howdah.parallel.executor import StepRun
from howdah.parallel.flat_params import random_init
from howdah.parallel.full_tensors import full_gradient, parameter_names
from howdah.parallel.mesh import connect_mesh
from howdah.plan.method import Method
from howdah.plan.program import (
    forward_only,
    schedule_of,
    stage_parts,
    tied_stages,
    with_schedule,
)
from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.held import peak_held
from howdah.plan.schedule.lowering import Verb, lower
from howdah.plan.schedule.text import parse_schedule
from howdah.shapes.weights import weights
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory
from howdah.train.report import measured_memory
from howdah.train.step import StepContext, accumulate, held_out_loss

MICROS = 6
SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved v2", "zb-h1", "zb-h2", "zb-v"]


def stepper_on(transport, words, shape=SHAPE, precision="float64"):
    """A context on a layout, for micro-batches of two rows of nine tokens."""
    method = Method(precision)
    plan = plan_of(shape, words, method)
    mesh = connect_mesh(plan.layout, transport, torch.device("cpu"))
    placed = apply(plan, mesh=mesh, fill=random_init(weights(shape), 5))
    return StepContext(placed, mesh, method, seed=5)


def run(context, micros=MICROS):
    """Gradients of some micro-batches, the same for every layout of one replica."""
    batch = [micro(n, shape=context.placed.plan.shape) for n in range(micros)]
    return accumulate(context, batch, step=0, tokens=100.0)


# -- cutting -----------------------------------------------------------------------


def built(transport, words, shape):
    """The parts of a rank, and the names of what it holds, by module and by weight."""
    placed = stepper_on(transport, words, shape).placed
    modules = {name for name, _ in placed.model.named_modules() if name.count(".") < 2} - {""}
    names = {name for unit in placed.units.values() for name in unit.buffer.names}
    parts = [part for parts in placed.executor.parts.values() for part in parts]
    return parts, modules, names


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", ["pp2", "pp4", "pp2 zb-v"])
@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
def test_a_rank_builds_its_own_parts_alone(workers, words, shape):
    shape = replace(shape, layers=3)
    found = workers.run(built, f"{words} x4", shape, ranks=int(words[2]))
    every = [part for parts, _, _ in found for part in parts]
    assert sorted(every) == sorted({*every}) and len(every) == shape.layers + 2
    for parts, modules, names in found:
        blocks = {part for part in parts if part.startswith("layers.")}
        assert {name for name in modules if name.startswith("layers.")} == blocks
        assert ("norm" in modules) == ("head" in parts)
        assert {".".join(n.split(".")[:2]) for n in names if n.startswith("layers.")} == blocks
        assert ("embedding.weight" in names) == (
            "embedding" in parts or (shape.tie_embeddings and "head" in parts)
        )
    together = set().union(*(names for _, _, names in found))
    assert together == {weight.name for weight in weights(shape)}


# -- holding -----------------------------------------------------------------------


def hold(transport, words):
    """What a rank held at most, by its own count and by tensors that are alive."""
    context, leaves, alive, counted = stepper_on(transport, f"{words} x{MICROS}"), [], [], []
    plan, place = context.placed.plan, context.mesh.index_of("pp")
    said = peak_held(schedule_of(plan), place)

    def living(most):
        """Leaves that live, when they are no more than that, or never will be: the thread that
        has brought one lets go of it a moment after it has handed it over.
        """
        for _ in range(60_000):
            count = sum(leaf() is not None for leaf in leaves)
            if count <= most:
                break
            time.sleep(0.001)
        return count

    class Watching(StepRun):
        def outputs(self, action):
            inputs, out = super().outputs(action)
            own = len(inputs)
            alive.append(living(said - own) + own)
            leaves.extend(map(weakref.ref, inputs.values()))
            return inputs, out

    def compute(made, instruction):
        StepRun.compute(made, instruction)
        counted.append(len(made.held) + len(made.late))

    watched = patch("howdah.parallel.executor.StepRun", Watching)
    with watched, patch.dict("howdah.parallel.executor.VERBS", {Verb.COMPUTE: compute}):
        run(context)
    assert living(0) == 0
    return max(counted), max(alive), said


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_holds_what_the_schedule_says(workers, schedule):
    """What a forward began with lives until its backward has ended, and not longer."""
    for counted, alive, said in workers.run(hold, f"pp2 {schedule}", ranks=2):
        assert counted == said
        assert alive <= said


def own_memory(one):
    """The micro-batch without the token more that its arrays are views past."""
    return replace(one, tokens=one.tokens.copy(), labels=one.labels.copy())


def remember(transport, words, precision):
    """Bytes by component, measured and predicted."""
    context = stepper_on(transport, f"{words} x{MICROS}", precision=precision)
    plan, rank = context.placed.plan, context.mesh.rank
    run(context)
    before = context.mesh.counters.sent()
    measured = measured_memory(context, own_memory(micro(0)))
    assert context.mesh.counters.sent() == before
    assert not context.placed.store._awaited.total()  # or no reduction would start early again
    predicted = {held.component: held.bytes for held in memory(plan, rank, kernels_of(plan))}
    run(context)  # it goes on after having been looked at
    return measured, predicted


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("words", ["pp2", "pp2 zb-v", "pp4 gpipe", "pp2 recompute=full"])
def test_measured_memory_is_what_was_predicted(workers, words, precision):
    for measured, predicted in workers.run(remember, words, precision, ranks=int(words[2])):
        predicted.pop("recomputed", None)
        assert measured == predicted


# -- running -----------------------------------------------------------------------


def evaluated(transport, words, micros):
    context = stepper_on(transport, words)
    return held_out_loss(context, (micro(n) for n in range(micros)))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("micros", [1, 3, 7])
def test_a_held_out_loss_is_that_of_one_device(workers, micros):
    whole = evaluated(SingleRank(), "single x3", micros)
    for words in ("pp2 x3", "pp2 interleaved v2 x3", "pp2 zb-v x3"):
        for loss, tokens in workers.run(evaluated, words, micros, ranks=2):
            assert loss == pytest.approx(whole[0], rel=1e-12)
            assert tokens == whole[1]


def fewer(transport, words, micros):
    """Gradients of a step with fewer micro-batches than the plan has, after one with all."""
    context = stepper_on(transport, words)
    run(context, 4)
    loss = run(context, micros)
    (total,) = context.mesh.world.sum_scalars([loss])
    placed = context.placed
    return total, {n: full_gradient(placed, n).numpy() for n in parameter_names(placed)}


def test_a_step_may_have_fewer_micro_batches(workers):
    """While the batch grows at the start of a run."""
    total, whole = fewer(SingleRank(), "single x4", 2)
    for words in ("pp2 x4", "pp2 zb-v x4"):
        for loss, gradients in workers.run(fewer, words, 2, ranks=2):
            assert loss == pytest.approx(total, rel=1e-12)
            for name, gradient in gradients.items():
                torch.testing.assert_close(
                    torch.from_numpy(gradient), torch.from_numpy(whole[name]), rtol=1e-9, atol=1e-14
                )


def spans(transport):
    context = stepper_on(transport, "pp2 zb-h1 x4")
    with context.recorder.step(0):
        run(context, 4)
    return [span for span in context.recorder.steps[-1].spans if span.lane == "compute"]


def test_what_ran_when_is_kept_in_the_order_of_the_schedule(workers):
    plan = plan_of(SHAPE, "pp2 zb-h1 x4", Method())
    for place, found in enumerate(workers.run(spans, ranks=2)):
        assert tuple(s.instruction.action for s in found) == schedule_of(plan).programs[place]
        assert all(s.start <= s.end for s in found)
        assert all(a.end <= b.start for a, b in pairwise(found))


# -- deciding ----------------------------------------------------------------------


@settings(max_examples=60)
@given(any_schedule())
def test_the_forwards_of_any_schedule_can_run_alone(schedule):
    forwards = forward_only(schedule)
    assert {a.kind for program in forwards.programs for a in program} == {Kind.FORWARD}
    assert check(lower(forwards)) == []


def test_stages_that_share_an_embedding():
    tied = replace(TIED, layers=4)
    assert tied_stages(plan_of(tied, "pp2 x2", Method())) == (0, 1)
    assert tied_stages(plan_of(tied, "pp2 interleaved v2 x2", Method())) == (0, 3)
    assert tied_stages(plan_of(tied, "pp2 zb-v x2", Method())) is None  # on one rank
    assert tied_stages(plan_of(SHAPE, "pp2 x2", Method())) is None
    plan = plan_of(tied, "pp2 zb-v x2", Method())
    assert sorted(stage_parts(plan, 0)) == [0, 3]


TURNED = """mine stages 2 micros 2 slices 1
rank 0: 1F0 1F1 1B1 1B0
rank 1: 0F0 0F1 0B1 0B0
"""


def test_a_schedule_of_ones_own_takes_the_place_of_the_layouts():
    plan = with_schedule(plan_of(SHAPE, "pp2 x2", Method()), parse_schedule(TURNED))
    assert schedule_of(plan) == parse_schedule(TURNED)
    assert plan.stages.where == (1, 0) and plan.rank_of_part["embedding"] == 1
    assert (
        schedule_of(plan, 1).programs
        == parse_schedule(
            "mine stages 2 micros 1 slices 1\nrank 0: 1F0 1B0\nrank 1: 0F0 0B0\n"
        ).programs
    )


@pytest.mark.parametrize(
    ("layout", "old", "new", "sentence"),
    [
        ("pp3 x2", "", "", "it has 2 ranks and the layout pp3; say pp2"),
        ("pp2 x3", "", "", "it has 2 micro-batches and the layout x3; give the layout x2"),
        ("pp2 zb-v x2", "", "", "it has 2 stages and the layout 4; with v stages"),
        ("pp2 x2", "0B1 0B0", "0B1 0B0 0U1", "it updates weights before the step has ended"),
        ("pp2 x2", "1B1 1B0", "1B1", "rank 0 leaves out 1B0"),
        ("pp2 x2", "1F1 1B1", "1B1 1F1", "rank 0 runs 1B1 before 1F1; swap them"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(layout, old, new, sentence):
    plan = plan_of(replace(SHAPE, layers=4), layout, Method())
    with pytest.raises(UserError, match=re.escape(f"schedule mine: {sentence}")):
        with_schedule(plan, parse_schedule(TURNED.replace(old, new)))


ALONE = """mine stages 2 micros 2 slices 1
rank 0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1
rank 1:
"""


def test_a_schedule_that_leaves_a_rank_without_a_stage_is_refused():
    """Its optimizer would have nothing to update, and said only that."""
    plan = plan_of(replace(SHAPE, layers=4), "pp2 x2", Method())
    sentence = "schedule mine: rank 1 has no stage; give every rank one, or say pp1"
    with pytest.raises(UserError, match=f"^{sentence}$"):
        with_schedule(plan, parse_schedule(ALONE))
