"""Replicas of stages and token slices by time, for a layout that a search has found.

    stages   PipeDream's cut, which may give a stage several replicas (`stage_partition.py`)
    slices   TeraPipe's cut of one sequence (`token_slices.py`): late tokens attend to more

Both are told; no layout can spell them yet.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from howdah.machines.cluster import attained
from howdah.search.part_tables import PartTables
from howdah.search.search import Choice
from howdah.search.space import Question
from howdah.search.stage_cut import part_seconds
from howdah.search.stage_partition import Profile as Costs
from howdah.search.stage_partition import pipedream
from howdah.search.token_slices import best_slices, latency
from howdah.shapes.part import Part
from howdah.shapes.products import part_flops
from howdah.shapes.weights import parts_of
from howdah.sim.profile import Profile

PLACES = 32  # at which a sequence may be cut
WORKERS = 64  # most that PipeDream's programme is asked for: beyond, it takes seconds


def uneven(question: Question, choice: Choice, profile: Profile) -> Iterator[str]:
    """Yields what replicas of stages and slices by time would bring to a layout with a pipeline, as
    sentences.
    """
    plan = choice.plan
    if plan.layout.pp == 1:
        return
    seconds = part_seconds(PartTables(question, profile), plan)
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
        size: sum(_of_length(question, choice, profile, size).values()) / stages
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


def _of_length(
    question: Question, choice: Choice, profile: Profile, length: int
) -> dict[Part, float]:
    """Seconds of every part for a sequence of another length."""
    return part_seconds(PartTables(replace(question, sequence=length), profile), choice.plan)
