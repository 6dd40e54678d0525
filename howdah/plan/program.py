"""A plan's pipeline: its schedule, the program of each rank, and the stages with shared weights.

layout pp2 1f1b x3      rank 0   0F0 0F1 0B0 0F2 0B1 0B2       training
                        rank 1   1F0 1B0 1F1 1B1 1F2 1B2
                        rank 0   0F0 0F1 0F2                   evaluation: the forwards alone,
                        rank 1   1F0 1F1 1F2                   in the same order

A user's own schedule can replace the one that the layout names (`with_schedule`).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from howdah.base.errors import UserError, several
from howdah.plan.layout import Layout, family_of
from howdah.plan.plan import Plan, make_stages
from howdah.plan.schedule.actions import Kind, Schedule, rank_of_stage
from howdah.plan.schedule.check import check_schedule
from howdah.plan.schedule.lowering import Instruction, Lowered, Verb, lower
from howdah.plan.schedule.registry import build
from howdah.shapes.part import Part
from howdah.shapes.weights import FROZEN, parts_of


def schedule_of(plan: Plan, micros: int | None = None) -> Schedule:
    """The order of a step's actions, for `micros` micro-batches; None: the plan's number.

    A step has fewer micro-batches than the plan while a ramp of the batch size lasts.
    """
    layout, micros = plan.layout, plan.micros if micros is None else micros
    if plan.schedule:
        return _first(plan.schedule, micros)
    return _built(_pipeline(layout, micros))


class _Pipeline(NamedTuple):
    """What a named schedule follows from."""

    name: str
    ranks: int
    micros: int
    virtual: int
    slices: int


def _pipeline(layout: Layout, micros: int) -> _Pipeline:
    name = layout.schedule or "1f1b"
    return _Pipeline(name, layout.pp, micros, layout.virtual, layout.slices)


@lru_cache(16)  # a search simulates many layouts of the same pipelines
def _built(one: _Pipeline) -> Schedule:
    how = {"micros": one.micros, "virtual": one.virtual, "slices": one.slices}
    return build(one.name, ranks=one.ranks, **how)


@lru_cache(16)
def _lowered(one: _Pipeline, reduce_each: bool, tied: tuple[int, ...] | None) -> Lowered:
    return lower(_built(one), reduce_each=reduce_each, tied=tied)


def steady_schedule(plan: Plan) -> Schedule:
    """The schedule of a step, without the micro-batches from which on a rank holds no more than
    before, where that is known.
    """
    layout, micros = plan.layout, plan.micros
    if family_of(layout).steady and not plan.schedule:
        micros = min(micros, 4 * layout.pp * layout.virtual)
    return schedule_of(plan, micros)


def program_of(plan: Plan, micros: int | None = None) -> Lowered:
    """Everything that each pipeline rank does in a training step, in order.

    The all-gathers of ZeRO-3 are not listed: they run unit by unit inside the actions.
    """
    layout, tied = plan.layout, tied_stages(plan)
    shares = layout.accumulate == "shard" and layout.sharers > 1
    each = layout.gradients != "device" or shares
    if plan.schedule:
        lowered = lower(schedule_of(plan, micros), reduce_each=each, tied=tied)
    else:
        count = plan.micros if micros is None else micros
        lowered = _lowered(_pipeline(layout, count), each, tied)
    if not any(map(plan.still, range(len(plan.stages.parts)))):
        return lowered

    def asked(one: Instruction) -> bool:
        """Whether a message has something to say: a stage that is still asks for no gradient."""
        told = {Verb.SEND, Verb.RECEIVE} & {one.verb, one.started}
        back = one.action.kind in (Kind.BACKWARD, Kind.INPUT)
        return not (told and back and plan.still(max(one.action.stage - 1, 0)))

    programs = (tuple(filter(asked, program)) for program in lowered.programs)
    return lowered._replace(programs=tuple(programs))


def with_schedule(plan: Plan, schedule: Schedule) -> Plan:
    """The plan with a user's own schedule, and its stages on the ranks that the schedule uses.

    Raises UserError with a sentence for each problem of the schedule.
    """
    problems = [*check_schedule(schedule), *_misfits(schedule, plan.layout)]
    if problems:
        raise UserError(several([f"schedule {schedule.name}: {what}" for what in problems]))
    stages = make_stages(plan.shape, plan.layout, plan.sequence, rank_of_stage(schedule))
    return replace(plan, schedule=schedule, stages=stages)


def _misfits(schedule: Schedule, layout: Layout) -> Iterator[str]:
    """Why a schedule that is correct by itself does not fit this layout, as sentences."""
    ranks, stages = len(schedule.programs), layout.pp * layout.virtual
    if ranks != layout.pp:
        yield f"it has {ranks} ranks and the layout pp{layout.pp}; say pp{ranks}"
    elif schedule.stages != stages:
        yield (
            f"it has {schedule.stages} stages and the layout {stages}; with v stages on each rank, "
            "say interleaved and v"
        )
    if ranks == layout.pp:
        empty = [rank for rank, program in enumerate(schedule.programs) if not program]
        for rank in empty:
            yield f"rank {rank} has no stage; give every rank one, or say pp{ranks - len(empty)}"
    if schedule.micros != layout.micros:
        yield (
            f"it has {schedule.micros} micro-batches and the layout x{layout.micros}; give the "
            f"layout x{schedule.micros}, or the batch other sizes"
        )
    if schedule.slices > 1:
        yield "it cuts micro-batches into token slices, which cannot be run yet; use slices 1"
    if any(a.kind is Kind.UPDATE for program in schedule.programs for a in program):
        yield "it updates weights before the step has ended, which is another method; drop its U"


def _first(schedule: Schedule, micros: int) -> Schedule:
    """The schedule without the micro-batches from `micros` on.

    It still runs, because no action depends on an action of another micro-batch.
    """
    programs = (
        tuple(action for action in program if action.micro < micros)
        for program in schedule.programs
    )
    return schedule._replace(micros=micros, programs=tuple(programs))


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without its backward passes, for evaluation."""
    programs = (
        tuple(action for action in program if action.kind is Kind.FORWARD)
        for program in schedule.programs
    )
    return schedule._replace(programs=tuple(programs))


def tied_stages(plan: Plan) -> tuple[int, ...] | None:
    """The stages that share weights with stages of other ranks, one of each rank: those of a tied
    embedding; of an encoder-decoder all that embed, and all blocks of a stack, which have one table
    of relative positions. None if there are none.
    """
    trained = {unit for unit in plan.ranks_of_unit if not unit.startswith(FROZEN)}
    shared = [unit for unit in trained if len(plan.ranks_of_unit[unit]) > 1]
    users = {part for unit in shared for part in parts_of(unit, plan.shape)}
    found: dict[int, int] = {}
    for stage, (parts, rank) in enumerate(zip(plan.stages.parts, plan.stages.where, strict=True)):
        if users & set(parts):
            found.setdefault(rank, stage)
    return tuple(found.values()) if found else None


def stage_parts(plan: Plan, pp_index: int) -> dict[int, tuple[Part, ...]]:
    """The stages of pipeline rank `pp_index`, each with its parts of the model."""
    pairs = zip(plan.stages.parts, plan.stages.where, strict=True)
    return {stage: parts for stage, (parts, home) in enumerate(pairs) if home == pp_index}
