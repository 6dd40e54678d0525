"""Pipeline schedules as data: the actions, the values that they make, and their dependencies.

A schedule lists, for every pipeline rank, the actions that the rank runs, in order. It contains no
tensors, devices or times. The executor runs these lists, the simulator times them, the plotter
draws them, and the tests check them.

    2F0       stage 2, forward of micro-batch 0
    2F0.1     stage 2, forward of token slice 1 of micro-batch 0
    0B3       stage 0, backward of micro-batch 3: both halves
    0I3 0W3   the same backward in its two halves: I computes the gradient of the stage's input,
              which another stage waits for; W computes the gradient of the weights, which no
              other stage waits for
    1U3       stage 1, update of the weights with the gradients up to micro-batch 3; listed only
              in schedules without a flush, otherwise one update ends the step

Sends and receives are not listed. They follow from the values that an action needs (`needs`) and
the values that actions on other ranks make (`makes`).
"""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does; the value is the letter in the action's spelling."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    UPDATE = "U"


class Action(NamedTuple):
    """One computation of a rank, for one (stage, micro-batch, token slice)."""

    kind: Kind
    stage: int
    micro: int
    slice: int = 0

    def __str__(self) -> str:
        part = f".{self.slice}" if self.slice else ""
        return f"{self.stage}{self.kind}{self.micro}{part}"


class Value(NamedTuple):
    """The result of one action, which other actions need as their input.

    name  activation (a stage's output), gradient (of a stage's input), weight (a stage's weight
          gradient) or version (updated weights)
    """

    name: str
    stage: int
    micro: int
    slice: int = 0


class Schedule(NamedTuple):
    """The actions of all pipeline ranks in one training step.

    name      name of the schedule's family, as in a layout
    stages    number of pipeline stages; stage s needs the activations of stage s - 1
    micros    number of micro-batches in a step of one pipeline
    slices    number of token slices of each micro-batch
    programs  programs[rank] is the rank's actions, in order
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
    """The value that `action` makes. Actions that depend on `action` wait for this value."""
    return Value(MADE[action.kind], action.stage, action.micro, action.slice)


def needs(action: Action, schedule: Schedule) -> list[Value]:
    """The values that must have been made before `action` can start.

    A token slice attends to the earlier slices of its micro-batch, so its forward needs their
    forwards. Its backward needs the backwards of the later slices, which contribute to the
    gradients of its keys and values.
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
    """For each stage, in order, the pipeline rank that runs it."""
    found = {action.stage: rank for rank, p in enumerate(schedule.programs) for action in p}
    return tuple(found[stage] for stage in range(schedule.stages))
