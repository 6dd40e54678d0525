"""What a step leaves behind, as records: who sent how much over which link, and what took how long.

`comm` and `train` write them while a run goes on, `sim` predicts the same ones, `draw` shows both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from howdah.plan.schedule.lowering import Instruction, Verb

COMPUTES = (Verb.COMPUTE, Verb.UPDATE)


class Traffic(NamedTuple):
    """One row's name: what the dp axis sends in a reduce-scatter over tcp, say."""

    axis: str
    operation: str
    link: str


class Wires(NamedTuple):
    """The class of link between ranks: `inside` a node of `node` ranks, or `between` nodes.

    nodes  which node each rank is on, where a group has one transport for all of its messages:
           what carries them `inside` if all of its ranks share a node. Left out, each message
           takes the wire between its two ranks
    """

    inside: str = "tcp"
    between: str = "tcp"
    node: int = 1
    nodes: tuple[int, ...] = ()

    def near(self, rank: int, group: np.ndarray) -> np.ndarray:
        """Which messages of `rank` to the others of a group stay inside its node."""
        if not self.nodes:
            return np.asarray(group // self.node == rank // self.node)
        return np.full(len(group), len({self.nodes[r] for r in (rank, *group)}) == 1)


TCP = Wires()


class Span(NamedTuple):
    """What takes time, with the seconds from the start of the step at which it starts and ends."""

    instruction: Instruction
    start: float
    end: float

    @property
    def lane(self) -> str:
        """What is on one lane of a rank never overlaps: compute, collectives, to 1."""
        if self.instruction.verb in COMPUTES:
            return "compute"
        return (
            f"to {self.instruction.peer}" if self.instruction.verb is Verb.SEND else "collectives"
        )


class Call(NamedTuple):
    """An operation of a group: its axis, and the bytes that this rank sent in it."""

    axis: str
    operation: str
    sent: int
    start: float
    end: float


@dataclass
class StepTrace:
    """One step of one rank. Moments are seconds after `began`, by the clock of its machine.

    number  of the step
    spans   what it computed, what it waited for in the end, and when its messages travelled
    calls   of its groups
    """

    number: int
    began: float
    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


class RankTrace(NamedTuple):
    """The last traces of one rank.

    layout   of the run, spelled
    machine  the same for ranks that share a clock
    """

    layout: str
    machine: str
    steps: list[StepTrace]


def common(traces: Sequence[RankTrace], number: int) -> list[StepTrace]:
    """The traces of one step, by rank, with moments counted from where the first of them began."""
    chosen = [next(step for step in one.steps if step.number == number) for one in traces]
    if len({one.machine for one in traces}) > 1:
        return chosen
    first = min(step.began for step in chosen)
    return [_later(step, step.began - first) for step in chosen]


def _later(step: StepTrace, by: float) -> StepTrace:
    spans = [s._replace(start=s.start + by, end=s.end + by) for s in step.spans]
    calls = [c._replace(start=c.start + by, end=c.end + by) for c in step.calls]
    return StepTrace(step.number, step.began - by, spans, calls)
