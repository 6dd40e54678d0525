"""Laps: what each rank did in a step, as its clock measured it, and their text.

RUN/trace/rank-0.json      the last laps of one rank, in one line of JSON
    trace/rank-1.json

A rank writes its own file, and whoever draws a step reads all of them. Where all ranks ran on one
machine, their clocks are one; elsewhere a lap's beginning is the common moment: it begins when all
ranks have exchanged the step's number of tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from howdah.base.errors import BadInput, brief
from howdah.base.files import parse_json, read_file
from howdah.plan.recording import Call, Lap, Laps, Span
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.schedule.lowering import Instruction, Verb

FOLDER = "trace"
LARGEST = 128 << 20  # bytes of a file
MOST = (1 << 63) - 1
MOST_SECONDS = 1e10
LONGEST = 1000  # characters of a name


def write_laps(folder: Path, rank: int, laps: Laps) -> None:
    """Writes the file of `rank`; a reader sees the old one or the new one. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"layout": laps.layout, "machine": laps.machine, "laps": [*map(_plain, laps.laps)]}
    fresh = _path(folder, rank).with_suffix(".new")
    try:
        fresh.write_text(json.dumps(content), encoding="utf-8")
        fresh.replace(_path(folder, rank))
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def read_laps(folder: Path, layout: str, world: int) -> list[Laps]:
    """Those of all ranks, of the steps that all have. Raises BadInput where there is none."""
    found = [_read(_path(folder, rank)) for rank in range(world)]
    for rank, laps in enumerate(found):
        if laps.layout != layout:
            raise BadInput(
                f"{_path(folder, rank)} is of layout '{laps.layout}', and the run's is '{layout}'; "
                "train a step in that layout first"
            )
    numbers = set.intersection(*({lap.number for lap in laps.laps} for laps in found))
    if not numbers:
        raise BadInput(f"the ranks' files in {folder} have no step in common; train on first")
    return [
        laps._replace(laps=[lap for lap in laps.laps if lap.number in numbers]) for laps in found
    ]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _plain(lap: Lap) -> dict[str, object]:
    spans = [
        [i.verb, i.action.kind, *i.action[1:], i.peer, start, end] for i, start, end in lap.spans
    ]
    return {"number": lap.number, "began": lap.began, "spans": spans, "calls": lap.calls}


def _read(path: Path) -> Laps:
    try:
        content = parse_json(read_file(path, LARGEST))
        laps = [*map(_lap, _list(content["laps"]))]
        return Laps(_text(content["layout"]), _text(content["machine"]), laps)
    except OSError as error:
        raise BadInput(
            f"cannot read {path}: {error.strerror}; a run writes it when it saves, "
            "after a step in its layout"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{path} is damaged ({brief(error)}); train on to have it written anew"
        ) from None


# -- what a file says, which anybody may have written --------------------------


def _lap(plain: dict[str, Any]) -> Lap:
    """A lap of a step. It has at least as many spans as micro-batches."""
    spans = [*map(_span, _list(plain["spans"]))]
    if not spans or max(span.instruction.action.micro for span in spans) >= len(spans):
        raise ValueError("a step has too few spans")
    calls = [*map(_call, _list(plain["calls"]))]
    return Lap(_whole(plain["number"]), _seconds(plain["began"]), spans, calls)


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


# -- the laps of one step ------------------------------------------------------
