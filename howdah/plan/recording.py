"""Records of a step: how many bytes each rank sent over which link, and when it did what.

`comm` and `train` write these records during a run, `sim` predicts them, and `draw` shows both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from howdah.plan.schedule.lowering import Instruction, Verb

COMPUTES = (Verb.COMPUTE, Verb.UPDATE)
WAIT = "wait for"  # how the operation of a call begins in which the rank waits for a home
IDLE = "waits for others"  # the operation of a call in which computation waits for other ranks


class Traffic(NamedTuple):
    """The key of a row in a table of traffic, such as (dp, reduce_scatter, tcp)."""

    axis: str
    operation: str
    link: str


class Wires(NamedTuple):
    """The class of link between ranks: `inside` a node of `node` ranks, or `between` nodes.

    nodes  the node of each rank, where a group uses one transport for all its messages: `inside`
           if all ranks of the group are on one node, otherwise `between`. Empty: each message
           uses the link between its two ranks
    cards  the class of link of the GPUs' tensors; empty: they go the way of everything else
    """

    inside: str = "tcp"
    between: str = "tcp"
    node: int = 1
    nodes: tuple[int, ...] = ()
    cards: str = ""

    def near(self, rank: int, group: np.ndarray) -> np.ndarray:
        """For each rank of `group`, whether a message from `rank` to it stays inside the node."""
        if not self.nodes:
            return np.asarray(group // self.node == rank // self.node)
        return np.full(len(group), len({self.nodes[r] for r in (rank, *group)}) == 1)


TCP = Wires()


class Span(NamedTuple):
    """An instruction that takes time. `start` and `end` are seconds after the start of the step."""

    instruction: Instruction
    start: float
    end: float

    @property
    def lane(self) -> str:
        """The lane of the rank that shows the span: `compute`, `collectives`, or `to 1` for a
        message to rank 1. Spans of one lane never overlap.
        """
        if self.instruction.verb in COMPUTES:
            return "compute"
        return (
            f"to {self.instruction.peer}" if self.instruction.verb is Verb.SEND else "collectives"
        )


class Call(NamedTuple):
    """An operation of the group along `axis`, in which this rank sent `sent` bytes. Of homes, it
    names the unit or the block: `fetch weights of layers.1`.
    """

    axis: str
    operation: str
    sent: int
    start: float
    end: float


Times = list[tuple[float, float]]  # from when to when; in order, none within another


def times_of(some: Iterable[Call | Span]) -> Times:
    """When at least one of them is under way."""
    found: Times = []
    for one in sorted(some, key=lambda one: one.start):
        if found and one.start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], one.end)
        else:
            found.append((one.start, one.end))
    return found


def both(some: Times, others: Times) -> Times:
    """The times that are in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return [(start, end) for start, end in pairs if start < end]


def seconds_of(times: Times) -> float:
    """How long they are together."""
    return sum(end - start for start, end in times)


@dataclass
class StepTrace:
    """One step of one rank. The times of spans and calls are seconds after `began`.

    number  the number of the step
    began   the start of the step, in seconds, by the clock of the rank's machine
    spans   its computations, its waits at the end of the step, and the sending of its messages
    calls   the operations of its groups
    """

    number: int
    began: float
    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


class RankTrace(NamedTuple):
    """The traces of the last steps of one rank.

    layout   the spelling of the run's layout
    machine  the name of a machine; ranks with equal names share a clock
    algorithms  those that were chosen for collectives, or empty
    """

    layout: str
    machine: str
    steps: list[StepTrace]
    algorithms: str = ""


def common(traces: Sequence[RankTrace], number: int) -> list[StepTrace]:
    """The traces of step `number`, by rank. On one machine, all times are counted from the start of
    the rank that started first; ranks on several machines keep their own starts.
    """
    chosen = [next(step for step in one.steps if step.number == number) for one in traces]
    if len({one.machine for one in traces}) > 1:
        return chosen
    first = min(step.began for step in chosen)
    return [later(step, step.began - first) for step in chosen]


def later(step: StepTrace, by: float) -> StepTrace:
    """A step whose times are counted from `by` seconds earlier on."""
    spans = [s._replace(start=s.start + by, end=s.end + by) for s in step.spans]
    calls = [c._replace(start=c.start + by, end=c.end + by) for c in step.calls]
    return StepTrace(step.number, step.began - by, spans, calls)
