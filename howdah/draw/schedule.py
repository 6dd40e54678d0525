"""Pipelines drawn as text from their timeline: a row for each rank, time to the right.

    1f1b: 3 ranks, 4 micro-batches
    rank 0  F0F1F2        B0··F3B1··  B2··  B3··
    rank 1    F0F1    B0··F2B1··F3B2··  B3··
    rank 2      F0B0··F1B1··F2B2··F3B3··

The label of a box is the action: its kind and micro-batch, with the token slice after a point. If
each rank has one stage, the rank determines the stage. If it has two, the letters of the second
stage are small. If it has more, the stage precedes the letter, as in the spelling of an action.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from howdah.plan.recording import COMPUTES
from howdah.plan.schedule.actions import Action, Kind, Schedule
from howdah.plan.schedule.held import peak_held
from howdah.sim.timeline import Timeline

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward: input",
    Kind.WEIGHT: "backward: weights",
    Kind.UPDATE: "update",
}


class Computation(NamedTuple):
    """A box of the drawing; its stage is number `turn` of the `turns` of its rank."""

    action: Action
    turn: int
    turns: int
    start: float
    end: float

    @property
    def label(self) -> str:
        spelled = str(self.action)
        if self.turns > 2:
            return spelled
        spelled = spelled.lstrip("0123456789")
        return spelled.lower() if self.turn else spelled

    @property
    def number(self) -> str:
        """The micro-batch, with the token slice after a point."""
        return str(self.action).lstrip("0123456789")[1:]


def computations(timeline: Timeline, rank: int) -> Iterator[Computation]:
    """All computations of a rank that take time, in order."""
    stages = sorted({action.stage for action in timeline.schedule.programs[rank]})
    for (verb, action, *_), start, end in timeline.spans[rank]:
        if verb in COMPUTES and end > start:
            yield Computation(action, stages.index(action.stage), len(stages), start, end)


def title(schedule: Schedule) -> str:
    """The title of the drawing, such as: interleaved: 4 ranks of 2 stages, 8 micro-batches."""
    ranks = len(schedule.programs)
    each = f" of {schedule.stages // ranks} stages" if schedule.stages > ranks else ""
    slices = f" of {schedule.slices} slices" if schedule.slices > 1 else ""
    return (
        f"{schedule.name}: {ranks} rank{'s' * (ranks != 1)}{each}, "
        f"{schedule.micros} micro-batch{'es' * (schedule.micros != 1)}{slices}"
    )


def figures(timeline: Timeline) -> str:
    """The line of main figures: time of the step, and its bubble by both measures."""
    return (
        f"{timeline.makespan:.4g} s, bubble {timeline.bubble:.1%} of all time, "
        f"{timeline.bubble_to_ideal:.1%} of the ideal"
    )


def draw(timeline: Timeline, *, width: float | None = None) -> str:
    """The drawing as text, with a legend and the figures of the timeline below.

    width  characters per second; without it, as many as the longest label needs
    """
    ranks = range(len(timeline.spans))
    drawn = [list(computations(timeline, rank)) for rank in ranks]
    every = [each for rank in drawn for each in rank]
    if width is None:
        wanted = (
            (len(each.label) + (each.turns > 2)) / (each.end - each.start)  # 0F0·2F0, not 0F02F0
            for each in every
            if each.action.kind is not Kind.UPDATE
        )
        width = max(wanted, default=1.0)
    margin = len(f"rank {ranks[-1]}  ")
    rows = [_row(f"rank {rank}".ljust(margin), drawn[rank], width) for rank in ranks]
    kinds = {each.action.kind for each in every}
    legend = [f"{kind} {name}" for kind, name in NAMES.items() if kind in kinds]
    if any(each.label.islower() for each in every):
        legend.append("small letters: the rank's second stage")
    held = " ".join(str(peak_held(timeline.schedule, rank)) for rank in ranks)
    feet = [", ".join(legend), f"{figures(timeline)}, held at most {held}"]
    return "\n".join([title(timeline.schedule), *rows, *feet])


def _row(row: str, drawn: Sequence[Computation], width: float) -> str:
    """The text `row` with the computations of a rank behind it."""
    margin = len(row)
    for each in drawn:
        first, last = (margin + round(moment * width) for moment in (each.start, each.end))
        row = row.ljust(first) + each.label[: last - first].ljust(last - first, "·")
    return row
