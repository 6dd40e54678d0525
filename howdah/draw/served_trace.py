"""What workers and servers that do not wait for each other did last, as they recorded it.

    worker 0   computes   |0F0|0B0|      |0F0|0B0|      its last steps, at its own pace
               calls         push of layers.0   pull of layers.0   wait for weights of layers.0
    server 0   calls      worker 0 push of layers.0 0    worker 1 pull of layers.0 0

There is no common step to compare with a simulated one: these are the times alone. Members of one
machine share a clock; those of another are drawn from their own start on.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import mean

from howdah.draw.columns import columns
from howdah.draw.perfetto import Part, trace_all
from howdah.plan.plan import Plan
from howdah.plan.program import schedule_of
from howdah.plan.recording import COMPUTES, WAIT, Call, RankTrace, Span, StepTrace, later
from howdah.sim.timeline import Timeline

Members = Mapping[str, RankTrace]
MEGA = 1e6


def report(members: Members, layout: str, kind: str) -> Iterator[str]:
    """The traces as lines of text.

    kind  of method.sync
    """
    yield f"layout      {layout} {kind}, the last steps of each worker and pushes of each server"
    head: tuple[str, ...] = ("", "last step", "computes", "waits", "pushes", "pulls")
    workers = [(_named(name), *_worker(one.steps)) for name, one in members.items() if _works(name)]
    yield from columns([head, *workers], "<" + 5 * ">")
    head = ("", "pushes", "of each", "pulls", "wait of each", "longest", "at once", "stale")
    calls = {name: one.steps[0].calls for name, one in members.items() if not _works(name)}
    servers = [(_named(name), *_server(made, kind)) for name, made in calls.items()]
    yield from columns([head, *servers], "<" + 7 * ">")
    for name, made in calls.items():
        if pulls := _of("pull", made):
            most = max(pulls, key=lambda one: one.end - one.start)
            yield f"{_named(name)}: the longest wait is {most.axis}'s, {most.operation}"


def to_perfetto(members: Members, plan: Plan) -> str:
    """The JSON for ui.perfetto.dev: a process for each member."""
    first: dict[str, float] = {}
    for one in members.values():
        began = min(step.began for step in one.steps)
        first[one.machine] = min(began, first.get(one.machine, began))
    spans, calls = list[tuple[Span, ...]](), list[tuple[Call, ...]]()
    for one in members.values():
        steps = [later(step, step.began - first[one.machine]) for step in one.steps]
        spans.append(tuple(span for step in steps for span in step.spans))
        calls.append(tuple(call for step in steps for call in step.calls))
    timeline = Timeline(schedule_of(plan), tuple(spans))
    return trace_all([Part(timeline, [*map(_named, members)], calls)])


def _works(name: str) -> bool:
    return name.startswith("worker")


def _named(name: str) -> str:
    return name.replace("-", " ")


def _worker(steps: Sequence[StepTrace]) -> tuple[str, ...]:
    """The cells of a worker: means of its steps."""
    spans = [[s for s in step.spans if s.instruction.verb in COMPUTES] for step in steps]
    waits = [_of(WAIT, step.calls) for step in steps]
    sent = [[sum(c.sent for c in _of(way, s.calls)) for s in steps] for way in ("push", "pull")]
    return (
        str(steps[-1].number),
        f"{mean(map(_seconds, spans)):.4f}s",
        f"{mean(map(_seconds, waits)):.4f}s",
        *(f"{mean(each) / MEGA:.3f} MB" for each in sent),
    )


def _server(calls: Sequence[Call], kind: str) -> tuple[str, ...]:
    """The cells of a server: how many pushes and pulls, how long each took, one pull at most; how
    many were under way at once, at most; the mean and the largest staleness of pushes.
    """
    pushes, pulls = _of("push", calls), _of("pull", calls)
    longest = max((one.end - one.start for one in pulls), default=0.0)
    each = (_seconds(some) / max(len(some), 1) for some in (pushes, pulls))
    counts = zip((len(pushes), len(pulls)), each, strict=True)
    cells = (cell for count, seconds in counts for cell in (str(count), f"{seconds:.4f}s"))
    ages = [] if kind == "bsp" else [*_ages(calls)]  # there, a round is one version
    stale = f"{mean(ages):.2f} (at most {max(ages)})" if ages else "-"
    return (*cells, f"{longest:.4f}s", str(_at_once([*pushes, *pulls])), stale)


def _at_once(calls: Sequence[Call]) -> int:
    """The most calls that were under way together."""
    changes = sorted((at, by) for call in calls for at, by in ((call.start, 1), (call.end, -1)))
    return max(accumulate(by for _, by in changes), default=0)


def _ages(calls: Sequence[Call]) -> Iterator[int]:
    """Yields the staleness of pushes of which the pull before is known: how many of other workers
    came to the same chunk between.
    """
    came, own = Counter[str](), Counter[tuple[str, str]]()  # by chunk; by chunk and worker
    had: dict[tuple[str, str], int] = {}  # of others, when a worker pulled
    for call in sorted(calls, key=lambda one: one.end):
        what, _, chunk = call.operation.partition(" of ")
        mine = chunk, call.axis
        others = came[chunk] - own[mine]
        if what == "pull":
            had[mine] = others
        elif what == "push":
            if mine in had:
                yield others - had[mine]
            came[chunk] += 1
            own[mine] += 1


def _of(way: str, calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.operation.startswith(way)]


def _seconds(timed: Sequence[Span] | Sequence[Call]) -> float:
    return sum(one.end - one.start for one in timed)
