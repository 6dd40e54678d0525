"""Stages and token slices by time, for a layout that a search has found.

A layout's stages have equal FLOPs, and its slices equal lengths. Seconds are another measure: a
head passes its logits through memory, a block waits for its exchanges, late tokens attend to more.

    stages   the cut of the parts by their seconds, on the same ranks (`plan/stages.py`), and beside
             it PipeDream's, which may also give a stage several replicas (`stage_partition.py`)
    slices   TeraPipe's cut of one sequence (`token_slices.py`)

Both are told, with what a simulation makes of them; no layout can spell them yet.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from howdah.machines.cluster import attained
from howdah.plan.stages import by_cost
from howdah.search.part_tables import PartTables, Shape
from howdah.search.search import Choice
from howdah.search.space import RECOMPUTE, Question, context_number
from howdah.search.stage_partition import Profile as Costs
from howdah.search.stage_partition import pipedream
from howdah.search.token_slices import best_slices, latency
from howdah.shapes.part import Part
from howdah.shapes.products import part_flops
from howdah.shapes.weights import parts_of
from howdah.sim.profile import Profile
from howdah.sim.step_time import step_time

GAIN = 0.005  # of a step, from which on another cut is told
PLACES = 32  # at which a sequence may be cut
WORKERS = 64  # most that PipeDream's programme is asked for: beyond, it takes seconds


def part_seconds(question: Question, choice: Choice, profile: Profile) -> dict[Part, float]:
    """Seconds of every part of the model, forward and backward, for one micro-batch of a layout."""
    layout, tables = choice.plan.layout, PartTables(question, profile)
    again, context = RECOMPUTE.index(layout.recompute), context_number(layout)
    sizes = layout.tp, layout.cp, layout.ep, int(layout.sp), choice.plan.micro_batch
    return tables.seconds_of(Shape(*sizes, again, context))


def uneven(question: Question, choice: Choice, profile: Profile) -> Iterator[str]:
    """Yields what stages and slices by time would bring to a layout with a pipeline, as
    sentences.
    """
    plan = choice.plan
    if plan.layout.pp == 1:
        return
    seconds = part_seconds(question, choice, profile)
    stages = by_cost(seconds, plan.stages.where)
    time = step_time(replace(plan, stages=stages), question.cluster, profile).seconds
    if time < choice.seconds * (1 - GAIN):
        counts = " ".join(str(len(parts)) for parts in stages.parts)
        yield (
            f"stages of {counts} parts would have equal seconds in place of equal FLOPs, and a "
            f"step take {1 - time / choice.seconds:.1%} less; a layout cannot say so yet"
        )
    yield from _replicated(question, choice, seconds)
    yield from _sliced(question, choice, profile, seconds)


def _replicated(question: Question, choice: Choice, seconds: Mapping[Part, float]) -> Iterator[str]:
    """PipeDream's stages, where they have other numbers of replicas than the layout."""
    plan, counted = choice.plan, attained(question.cluster)
    workers = plan.layout.pp * plan.layout.readers
    width, tokens = plan.compute_bytes, plan.sequence * plan.micro_batch
    sent = float(tokens * question.shape.width * width) / (plan.layout.cp * plan.layout.tp)
    held = dict.fromkeys(seconds, 0.0)
    for weight in plan.weights:
        for part in parts_of(weight.unit, question.shape):
            held[part] += weight.elements * float(plan.sent_gradient_bytes) / plan.layout.tp
    costs = {
        str(part): Costs(time, sent, held[part] / plan.micros) for part, time in seconds.items()
    }
    if workers > WORKERS:
        return
    found, period = pipedream(costs, workers, bandwidth=counted.between.bandwidth)
    if len(found) > 1 and {stage.replicas for stage in found} != {plan.layout.readers}:
        spelled = ", ".join(f"{len(one.parts)} parts on {one.replicas}" for one in found)
        yield (
            f"PipeDream's programme would cut it into {spelled} replicas, a micro-batch each "
            f"{period * 1e3:,.3g} ms; howdah runs the same number of replicas for every stage"
        )


def _sliced(
    question: Question, choice: Choice, profile: Profile, seconds: Mapping[Part, float]
) -> Iterator[str]:
    """TeraPipe's slices, where few micro-batches leave a pipeline empty."""
    plan, shape = choice.plan, question.shape
    if plan.micros >= plan.layout.pp or shape.family != "decoder" or plan.layout.cp > 1:
        return
    length, stages = plan.sequence, plan.layout.pp
    step = -(-length // PLACES)
    block = next(part for part in seconds if part.is_block)
    pairs = 1 - part_flops(shape, block, 1) * length / part_flops(shape, block, length)
    among = pairs * sum(seconds.values()) / stages  # of all pairs of the sequence
    alone = {  # of slices without tokens before them, on one stage
        size: sum(part_seconds(replace(question, sequence=size), choice, profile).values()) / stages
        for size in {min(n * step, length) for n in range(1, PLACES + 1)}
    }

    def time(size: int, before: int) -> float:
        """Of a slice: that of a sequence of its length, and of the pairs with tokens before it."""
        near = min(alone, key=lambda known: abs(known - size))
        return alone[near] + among * 2 * before * size / length**2

    cut = best_slices(length, time, stages=stages, granularity=step)
    if len(cut) > 1:
        gain = 1 - latency(cut, time, stages=stages) / latency((length,), time, stages=stages)
        spelled = " ".join(map(str, cut[:8])) + " ..." * (len(cut) > 8)
        yield (
            f"TeraPipe's programme would cut a sequence into {len(cut)} slices ({spelled}), with "
            f"which a micro-batch passes the pipeline in {gain:.0%} less; token slices can be "
            "planned, but not run yet"
        )
