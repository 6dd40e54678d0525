"""Timelines as a trace for ui.perfetto.dev and chrome://tracing.

    process rank 0              compute       |0F0 |0F1 |
                                to 1               |send 0F0 |
    process rank 1              compute                     `->|1F0 |
    process rank 0, simulated   compute       |0F0 |0F1 |

A rank is a process, its lanes are threads, a span is a complete event ("X"), and an arrow ("s" to
"f") leads from a message to the computation that uses it. The calls of a rank's groups are events
that may overlap ("b" to "e"). Times are in microseconds.
The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from howdah.plan.recording import Call, Span
from howdah.plan.schedule.actions import Value, makes, needs
from howdah.plan.schedule.lowering import Verb
from howdah.sim.timeline import Timeline

MICROSECONDS = 1e6

Event = dict[str, object]


class Part(NamedTuple):
    """One of the timelines in a trace.

    names  the names of its ranks
    calls  for each rank, the calls of its groups; empty if not recorded
    """

    timeline: Timeline
    names: Sequence[str]
    calls: Sequence[Sequence[Call]] = ()


def trace(timeline: Timeline) -> str:
    """The JSON text of a trace of one timeline."""
    return trace_all([Part(timeline, [f"rank {rank}" for rank in range(len(timeline.spans))])])


def trace_all(parts: Sequence[Part]) -> str:
    """The JSON text of a trace of several timelines, one below the other."""
    events: list[Event] = []
    first = 0
    for part in parts:
        events += _Part(part, first).events()
        first += len(part.names)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


class _Part:
    """The events of one timeline in a trace; its processes are numbered from `first` on."""

    def __init__(self, part: Part, first: int) -> None:
        self.timeline, self.names, self.calls = part
        self.first = first
        self.lanes = [_lanes(spans) for spans in self.timeline.spans]

    def events(self) -> Iterator[Event]:
        yield from self._names()
        yield from self._complete()
        yield from self._arrows()
        yield from self._calls()

    def _names(self) -> Iterator[Event]:
        for rank, (name, threads) in enumerate(
            zip(self.names, self.lanes, strict=True), self.first
        ):
            process = {"process_name": {"name": name}, "process_sort_index": {"sort_index": rank}}
            for what, about in process.items():
                yield {"ph": "M", "name": what, "pid": rank, "args": about}
            for number, lane in enumerate(threads):
                thread = {"pid": rank, "tid": number}
                yield {"ph": "M", **thread, "name": "thread_name", "args": {"name": lane}}

    def _complete(self) -> Iterator[Event]:
        for rank, spans in enumerate(self.timeline.spans):
            for span in spans:
                verb, action, *_ = span.instruction
                computes = verb is Verb.COMPUTE
                yield {
                    "ph": "X",
                    "name": str(action if computes else span.instruction),
                    "cat": action.kind.name.lower() if computes else verb,
                    "pid": self.first + rank,
                    "tid": self.lanes[rank].index(span.lane),
                    "ts": span.start * MICROSECONDS,
                    "dur": (span.end - span.start) * MICROSECONDS,
                }

    def _arrows(self) -> Iterator[Event]:
        used: dict[tuple[int | None, Value], float] = {
            (rank, value): span.start
            for rank, spans in enumerate(self.timeline.spans)
            for span in spans
            if span.instruction.verb is Verb.COMPUTE
            for value in needs(span.instruction.action, self.timeline.schedule)
        }
        for rank, spans in enumerate(self.timeline.spans):
            for span in spans:
                verb, action, peer, *_ = span.instruction
                if verb is not Verb.SEND or peer is None:
                    continue
                arrow = {"name": str(action), "cat": "message", "id": f"{action} {self.first}"}
                thread, sent = self.lanes[rank].index(span.lane), span.start * MICROSECONDS
                arrives = used[peer, makes(action)] * MICROSECONDS
                yield {"ph": "s", "pid": self.first + rank, "tid": thread, "ts": sent, **arrow}
                at = {"pid": self.first + peer, "tid": 0, "ts": arrives}
                yield {"ph": "f", "bp": "e", **at, **arrow}

    def _calls(self) -> Iterator[Event]:
        for rank, calls in enumerate(self.calls, self.first):
            for number, (axis, operation, sent, start, end) in enumerate(calls):
                name = f"{axis} {operation}" + (f" {sent / 1e6:.3g} MB" if sent else "")
                both = {"name": name, "cat": axis, "id": f"{rank} {number}", "pid": rank}
                yield {"ph": "b", "tid": 0, "ts": start * MICROSECONDS, **both}
                yield {"ph": "e", "tid": 0, "ts": end * MICROSECONDS, **both}


def _lanes(spans: Sequence[Span]) -> list[str]:
    """The lanes of a rank, computation first; the index of a lane is its thread's number."""
    return ["compute", *sorted({span.lane for span in spans} - {"compute"})]
