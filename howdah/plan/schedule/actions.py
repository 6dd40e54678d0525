"""What a pipeline schedule is made of, and what its actions hand to each other.

A schedule lists, for every pipeline rank, the actions it runs in order. It knows nothing of
tensors, devices or seconds. The executor runs it, the simulator times it, the plotter draws it
and the tests check it, all from the same lists.

    2F0       stage 2, forward of micro-batch 0
    2F0.1     … of its token slice 1
    0B3       stage 0, backward of micro-batch 3: both halves
    0I3 0W3   the same backward in two: the gradient of the input, which another stage is waiting
              for, and the gradient of the weights, for which nobody is
    1U3       stage 1, update of the weights with the gradients up to micro-batch 3; written down
              only where there is no flush, else one update ends the step

Sends and receives are never written down. They follow from what an action needs and what
another action made on a different rank: `needs` and `makes`.
"""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The letters of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    UPDATE = "U"


class Action(NamedTuple):
    """One thing that a rank does to (stage, micro-batch, token slice)."""

    kind: Kind
    stage: int
    micro: int
    slice: int = 0

    def __str__(self) -> str:
        part = f".{self.slice}" if self.slice else ""
        return f"{self.stage}{self.kind}{self.micro}{part}"


class Value(NamedTuple):
    """What one action makes and others need.

    name  activation (a stage's output), gradient (of a stage's input), weight (a stage's weight
          gradient) or version (updated weights)
    """

    name: str
    stage: int
    micro: int
    slice: int = 0


class Schedule(NamedTuple):
    """The actions of one step.

    name      of the family, as the layout spells it
    stages    of the model; stage s needs the activations of stage s - 1
    micros    micro-batches that each pipeline takes in a step
    slices    token slices of each micro-batch
    programs  programs[rank] is that rank's actions, in order
    """

    name: str
    stages: int
    micros: int
    slices: int
    programs: tuple[tuple[Action, ...], ...]


MADE = {
    Kind.FORWARD: "activation",
    Kind.BACKWARD: "gradient",
    Kind.INPUT: "gradient",
    Kind.WEIGHT: "weight",
    Kind.UPDATE: "version",
}


def makes(action: Action) -> Value:
    """The value by which others wait for `action`."""
    return Value(MADE[action.kind], action.stage, action.micro, action.slice)


def needs(action: Action, schedule: Schedule) -> list[Value]:
    """What must have been made before `action` can start.

    A token slice attends to the slices before it: its forward needs theirs, and its backward
    the backward of the slices after it, through which its keys and values get gradients.
    """
    kind, stage, micro, part = action
    if kind is Kind.FORWARD:
        before = [Value("activation", stage, micro, part - 1)] if part > 0 else []
        return before + ([Value("activation", stage - 1, micro, part)] if stage > 0 else [])
    if kind in (Kind.WEIGHT, Kind.UPDATE):
        return [Value("gradient", stage, micro, part)]
    later = [Value("gradient", stage + 1, micro, part)] if stage < schedule.stages - 1 else []
    if part < schedule.slices - 1:
        later.append(Value("gradient", stage, micro, part + 1))
    return [Value("activation", stage, micro, part), *later]


def rank_of_stage(schedule: Schedule) -> tuple[int, ...]:
    """rank_of_stage[stage] is the rank that runs the stage."""
    found = {action.stage: rank for rank, p in enumerate(schedule.programs) for action in p}
    return tuple(found[stage] for stage in range(schedule.stages))
