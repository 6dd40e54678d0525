"""A timeline as a trace that ui.perfetto.dev and chrome://tracing open.

    process rank 0    compute       |0F0 |0F1 |
                      to 1               |send 0F0 |
    process rank 1    compute                     `->|1F0 |

A rank is a process, its lanes are threads, what takes time is a complete event ("X"), and an
arrow ("s" to "f") leads from a message to the computation that uses it. Times are microseconds.
The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator

from howdah.plan.schedule.actions import Value, makes, needs
from howdah.plan.schedule.lowering import Verb
from howdah.sim.timeline import Span, Timeline

MICROSECONDS = 1e6

Event = dict[str, object]


def trace(timeline: Timeline) -> str:
    """The JSON text of the trace."""
    lanes = [_lanes(spans) for spans in timeline.spans]
    events = [*_names(lanes), *_complete(timeline, lanes), *_arrows(timeline, lanes)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _lanes(spans: tuple[Span, ...]) -> list[str]:
    """The lanes of a rank, computation first; their numbers are those of the threads."""
    return ["compute", *sorted({span.lane for span in spans} - {"compute"})]


def _names(lanes: list[list[str]]) -> Iterator[Event]:
    for rank, threads in enumerate(lanes):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for number, lane in enumerate(threads):
            name = {"name": "thread_name", "args": {"name": lane}}
            yield {"ph": "M", "pid": rank, "tid": number, **name}


def _complete(timeline: Timeline, lanes: list[list[str]]) -> Iterator[Event]:
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            verb, action, *_ = span.instruction
            computes = verb is Verb.COMPUTE
            yield {
                "ph": "X",
                "name": str(action if computes else span.instruction),
                "cat": action.kind.name.lower() if computes else verb,
                "pid": rank,
                "tid": lanes[rank].index(span.lane),
                "ts": span.start * MICROSECONDS,
                "dur": (span.end - span.start) * MICROSECONDS,
            }


def _arrows(timeline: Timeline, lanes: list[list[str]]) -> Iterator[Event]:
    used: dict[tuple[int | None, Value], float] = {
        (rank, value): span.start
        for rank, spans in enumerate(timeline.spans)
        for span in spans
        if span.instruction.verb is Verb.COMPUTE
        for value in needs(span.instruction.action, timeline.schedule)
    }
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            verb, action, peer, *_ = span.instruction
            if verb is not Verb.SEND:
                continue
            arrow = {"name": str(action), "cat": "message", "id": str(action)}
            thread, sent = lanes[rank].index(span.lane), span.start * MICROSECONDS
            arrives = used[peer, makes(action)] * MICROSECONDS
            yield {"ph": "s", "pid": rank, "tid": thread, "ts": sent, **arrow}
            yield {"ph": "f", "bp": "e", "pid": peer, "tid": 0, "ts": arrives, **arrow}
