"""howdah's contestants on each layout, and what bounds everyone.

A bound is howdah's own computing, with nothing exchanged, on as many processes at once:

    parts of tp     howdah on one process, training a model with this rank's part of the heads,
                    of the feed-forward's columns and of the vocabulary: what a part computes
    stages          each rank runs its own stage for all m micro-batches, and every other stage
                    once; then it clips and updates its own weights

The second is the shortest step of a pipeline of p stages that flushes, bubble and all. While the
slowest stage works on its m micro-batches without a pause, the first of them has been through all
other stages before, or the last goes through them after, forward and backward: m passes of the
slowest stage and one of each other. With equal stages that is m + p - 1 passes of one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from cases import RATE, SEED, method
from howdahs import CPU, HowdahStep, Place, Silent
from layouts import Form
from torch import Tensor

from howdah.comm.rendezvous import choose
from howdah.comm.transport import SingleRank
from howdah.optim.clip import clipped_update, squared_norm
from howdah.optim.optimizers import set_rate
from howdah.parallel.apply import ParallelModel, apply
from howdah.parallel.flat_params import publish, random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.layout import Layout, parse_layout
from howdah.plan.plan import Plan, make_plan
from howdah.text.batches import Micro
from howdah.train.feed import arrays_of

Step = Callable[[Sequence[Micro]], float | None]


def on_engine(case: Form, place: Place, words: str = "") -> HowdahStep:
    """`words` of the layout beside the case's."""
    assert place.transport.link == "shared", "the engine could not be built on this machine"
    return HowdahStep(case, _layout(case, words), place.transport)


def over_gloo(case: Form, place: Place, words: str = "") -> HowdahStep:
    store = dist.PrefixStore(f"over gloo {words}", place.store)
    wire = choose(store, rank=place.rank, size=place.size, transport="torch")
    return HowdahStep(case, _layout(case, words), wire)


def plan_of(case: Form, words: str = "") -> Plan:
    """howdah's plan of a case; its stages are those of all contestants."""
    layout = _layout(case, words)
    batch = Batch(layout.readers * case.rows, case.rows // case.micros)
    return make_plan(case.shape, layout, batch, sequence=case.sequence, method=method(case))


def _layout(case: Form, words: str) -> Layout:
    return parse_layout(f"{case.layout} {words} x{case.micros}")


# -- bounds --------------------------------------------------------------------------


def part_alone(case: Form, place: Place) -> Step:
    """A part of tp: a model of its own, of tokens that are in its part of the vocabulary."""
    shape, tp = case.shape, case.parsed.tp
    part = replace(
        shape,
        heads=shape.heads // tp,
        kv_heads=shape.k // tp,
        head_size=shape.d,
        ffn_size=shape.ffn_size // tp,
        vocab=shape.vocab // tp,
    )
    step = HowdahStep(replace(case, shape=part), Layout(dp=1, micros=case.micros), SingleRank())

    def alone(micros: Sequence[Micro]) -> float:
        return step([_within(micro, part.vocab) for micro in micros])

    return alone


def _within(micro: Micro, vocab: int) -> Micro:
    return replace(micro, tokens=micro.tokens % vocab, labels=micro.labels % vocab)


def half_alone(case: Form, place: Place) -> Step:
    """Whole rows, but half of them: as many tokens and pairs of tokens as a rank of cp2 has."""
    half = replace(case, rows=case.rows // 2)
    step = HowdahStep(half, Layout(dp=1, micros=case.micros), SingleRank())
    return lambda micros: step([_rows(micro, half.rows // case.micros) for micro in micros])


def experts_alone(case: Form, place: Place) -> Step:
    """A replica with a rank's number of experts, which take all of its tokens: as many rows as come
    to a rank where all experts are equally busy, and as many weights to update.
    """
    of = case.shape.experts
    assert of is not None
    part = replace(of, count=of.count // case.parsed.ep)
    few = replace(case, shape=replace(case.shape, experts=part))
    return HowdahStep(few, Layout(dp=1, micros=case.micros), SingleRank())


def _rows(micro: Micro, rows: int) -> Micro:
    arrays = ("tokens", "labels", "positions", "documents", "samples")
    return replace(micro, **{name: getattr(micro, name)[:rows] for name in arrays})


def stages_alone(case: Form, place: Place) -> Step:
    """A stage that is fed at once with whatever it waits for."""
    plan = plan_of(case)
    stages = [_stage(plan, rank) for rank in range(place.size)]
    mine, others = stages[place.rank], [s for r, s in enumerate(stages) if r != place.rank]
    limit, tokens = method(case).grad_clip, case.rows * case.sequence

    def step(micros: Sequence[Micro]) -> None:
        for unit in mine.units.values():
            unit.summed.zero_()
        for micro in micros:
            _pass(mine, micro, tokens)
        for other in others:
            _pass(other, micros[0], tokens)
        square = squared_norm(mine.gradients())
        set_rate(mine.optimizer, RATE)
        clipped_update(mine.optimizer, mine.gradients(), square=square, limit=limit)
        publish(mine.units.values())

    return step


def _stage(plan: Plan, rank: int) -> ParallelModel:
    """What `rank` of the pipeline holds, with nobody beside it."""
    mesh = connect_mesh(plan.layout, Silent(rank, plan.layout.world), CPU)
    return apply(plan, mesh=mesh, fill=random_init(plan.weights, SEED))


def _pass(placed: ParallelModel, micro: Micro, tokens: int) -> None:
    """Forward and backward of a stage, of made-up hidden states and gradients."""
    executor = placed.executor
    (stage,) = executor.parts
    outputs = executor.alone(stage, arrays_of(micro, CPU), placed.loss)
    end: Tensor | None = None
    if "loss" in outputs:
        out = outputs["loss"] / tokens
    else:
        out = outputs["hidden"]
        end = torch.zeros_like(out)
    torch.autograd.backward(out, end)
