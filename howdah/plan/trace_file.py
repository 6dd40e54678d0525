"""The files that hold a RankTrace: what a rank did in its last steps, by its own clock.

RUN/trace/rank-0.json      the traces of one rank, in one line of JSON
    trace/rank-1.json
    trace/worker-0.json    of a run whose workers do not wait for each other: of each member
    trace/server-0.json

Each rank writes its own file, and a drawing of a step needs all of them. Ranks on one machine share
a clock. On several machines, the start of a step is the common moment: a step starts when all ranks
have exchanged its number of tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from howdah.base.errors import UserError, brief
from howdah.base.files import parse_json, read_file
from howdah.plan.recording import Call, RankTrace, Span, StepTrace
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.schedule.lowering import Instruction, Verb

FOLDER = "trace"
SERVER = "server-"  # how files of servers begin, which compute nothing
LARGEST = 128 << 20  # bytes of a file
MOST = (1 << 63) - 1
MOST_SECONDS = 1e10
LONGEST = 1000  # characters of a name


def trace_text(traces: RankTrace) -> str:
    """What the file of a rank holds."""
    content = {
        "layout": traces.layout,
        "machine": traces.machine,
        "algorithms": traces.algorithms,
        "steps": [*map(_plain, traces.steps)],
    }
    return json.dumps(content)


def write_trace(folder: Path, of: int | str, traces: RankTrace) -> None:
    """Writes the file of a rank, or of a member such as `worker-0`. Raises OSError."""
    write_trace_text(folder, of, trace_text(traces))


def write_trace_text(folder: Path, of: int | str, text: str) -> None:
    """Writes what `trace_text` has given; readers find either the old or the new file. Raises
    OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = folder / f"{of}.json" if isinstance(of, str) else _path(folder, of)
    fresh = there.with_suffix(".new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(there)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def read_traces(folder: Path, layout: str, world: int) -> list[RankTrace]:
    """The traces of all ranks, of the steps that every rank has. Raises UserError if there are no
    such steps, or if a file is missing, damaged, or of another layout.
    """
    found = [_read(_path(folder, rank)) for rank in range(world)]
    for rank, one in enumerate(found):
        if one.layout != layout:
            raise UserError(
                f"{_path(folder, rank)} is of layout '{one.layout}', and the run's is '{layout}'; "
                "train a step in that layout first"
            )
    numbers = set.intersection(*({step.number for step in traces.steps} for traces in found))
    if not numbers:
        raise UserError(f"the ranks' files in {folder} have no step in common; train on first")
    return [
        traces._replace(steps=[step for step in traces.steps if step.number in numbers])
        for traces in found
    ]


def read_members(folder: Path, layout: str, *, workers: int, servers: int) -> dict[str, RankTrace]:
    """By name, the traces of the members of a run with `method.sync`, of those that have written
    one. Raises UserError if no worker has, or if a file is damaged, or of another layout.
    """
    names = [f"worker-{n}" for n in range(workers)] + [f"{SERVER}{n}" for n in range(servers)]
    paths = {name: folder / f"{name}.json" for name in names}
    found = {name: _read(path) for name, path in paths.items() if path.is_file()}
    if not any(name.startswith("worker") for name in found):
        raise UserError(
            f"{folder} has no worker's file; workers that howdah train starts itself write it when "
            "they save and at their end"
        )
    for name, one in found.items():
        if one.layout != layout:
            raise UserError(
                f"{paths[name]} is of layout '{one.layout}', and the run's is '{layout}'; train a "
                "step in that layout first"
            )
    return found


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _plain(step: StepTrace) -> dict[str, object]:
    spans = [
        [i.verb, i.action.kind, *i.action[1:], i.peer, start, end] for i, start, end in step.spans
    ]
    return {"number": step.number, "began": step.began, "spans": spans, "calls": step.calls}


def _read(path: Path) -> RankTrace:
    try:
        content = parse_json(read_file(path, LARGEST))
        computes = not path.name.startswith(SERVER)
        traces = [_step(step, computes=computes) for step in _list(content["steps"])]
        chosen = _text(content.get("algorithms", ""))
        return RankTrace(_text(content["layout"]), _text(content["machine"]), traces, chosen)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; a run writes it when it saves, "
            "after a step in its layout"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({brief(error)}); train on to have it written again"
        ) from None


# -- validation: anyone may have written a file ----------------------------------


def _step(plain: dict[str, Any], *, computes: bool) -> StepTrace:
    """One step of a file, which must have at least as many spans as micro-batches where it
    computes.
    """
    spans, calls = [*map(_span, _list(plain["spans"]))], [*map(_call, _list(plain["calls"]))]
    most = max((span.instruction.action.micro for span in spans), default=computes - 1)
    if most >= len(spans):
        raise ValueError("a step has too few spans")
    return StepTrace(_whole(plain["number"]), _seconds(plain["began"]), spans, calls)


def _call(fields: Sequence[Any]) -> Call:
    axis, operation, sent, *moments = _list(fields)
    return Call(_text(axis), _text(operation), _whole(sent), *_from_to(moments))


def _span(fields: Sequence[Any]) -> Span:
    verb, kind, stage, micro, part, peer, *moments = _list(fields)
    action = Action(Kind(_text(kind)), _whole(stage), _whole(micro), _whole(part))
    told = Instruction(Verb(_text(verb)), action, None if peer is None else _whole(peer))
    start, end = _from_to(moments)
    if told.verb is Verb.COMPUTE and start == end:
        raise ValueError(f"{action} took no time")
    return Span(told, start, end)


def _from_to(moments: Sequence[object]) -> tuple[float, float]:
    start, end = map(_seconds, moments)
    if start > end:
        raise ValueError("a span ends before it starts")
    return start, end


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list is missing")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > LONGEST or not value.isprintable():
        raise ValueError("a name is no text of one line")
    return value


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError("a number is no whole one")
    return value


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not abs(value) <= MOST_SECONDS:  # type: ignore[arg-type]
        raise ValueError("a moment is no number of seconds")
    return float(value)  # type: ignore[arg-type]
