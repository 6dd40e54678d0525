"""Schedules as text: to save, to read, and to write by hand.

    1f1b stages 2 micros 3 slices 1
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

A header, then a line for each rank, with each action spelled as it prints. A schedule has exactly
one spelling: `parse_schedule` reverses `format_schedule`, and refuses any other text. Parsing does
not check that the schedule can run; `check_schedule` does.
"""

import re
from pathlib import Path

from howdah.base.errors import UserError, named, shown
from howdah.base.files import read_text
from howdah.plan.schedule.actions import Action, Kind, Schedule
from howdah.plan.schedule.check import out_of_range
from howdah.plan.schedule.registry import check_size

LARGEST = 8 << 20  # bytes of a schedule file

HEADER = re.compile(
    r"([\w.+-]+) stages ([1-9]\d{0,5}) micros ([1-9]\d{0,5}) slices ([1-9]\d{0,5})", re.A
)
ACTION = re.compile(r"(\d{1,6})([FBIWU])(\d{1,6})(?:\.(\d{1,6}))?", re.A)


def format_schedule(schedule: Schedule) -> str:
    """The schedule as text that `parse_schedule` reads. The schedule's name must be one word."""
    name, stages, micros, slices, programs = schedule
    lines = [f"{name} stages {stages} micros {micros} slices {slices}"]
    for rank, program in enumerate(programs):
        lines.append(" ".join([f"rank {rank}:", *map(str, program)]))
    return "\n".join(lines) + "\n"


def read_schedule(path: Path) -> Schedule:
    """The schedule in a file. Raises UserError if the file cannot be read or parsed."""
    try:
        return parse_schedule(read_text(path, LARGEST))
    except OSError as error:
        raise UserError(f"schedule {named(path)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"schedule {named(path)} is not UTF-8; give a text file") from None


def parse_schedule(text: str) -> Schedule:
    """The schedule that `text` spells. Raises UserError, which names the wrong line and word."""
    header, *lines = text.splitlines() or [""]
    match = HEADER.fullmatch(header)
    if match is None:
        raise UserError(
            f"schedule, line 1: {shown(header)} is no header; write a name and numbers from 1 on, "
            "such as '1f1b stages 4 micros 8 slices 1'"
        )
    name, (stages, micros, slices) = match[1], map(int, match.groups()[1:])
    check_size(shown(name), stages=max(stages, len(lines)), micros=micros, slices=slices)
    empty = Schedule(name, stages, micros, slices, ())
    return empty._replace(programs=tuple(_program(i, line, empty) for i, line in enumerate(lines)))


def _program(rank: int, line: str, schedule: Schedule) -> tuple[Action, ...]:
    start = f"rank {rank}:"
    if not line.startswith(start):
        raise UserError(
            f"schedule, line {rank + 2}: {shown(line)} must begin with {start!r}; "
            "write one line for each rank, in order"
        )
    words = line.removeprefix(start).split()
    return tuple(_action(word, rank + 2, schedule) for word in words)


def _action(word: str, line: int, schedule: Schedule) -> Action:
    match = ACTION.fullmatch(word)
    if match is None:
        raise UserError(
            f"schedule, line {line}: {shown(word)} is no action; write the stage, one of F B I W "
            "U, the micro-batch, and the slice if it is not 0, such as 2F0 or 2F0.1"
        )
    stage, kind, micro, part = match.groups()
    action = Action(Kind(kind), int(stage), int(micro), int(part or 0))
    if str(action) != word:
        raise UserError(f"schedule, line {line}: {word!r} is spelled {str(action)!r}")
    wrong = out_of_range(action, schedule)
    if wrong:
        raise UserError(f"schedule, line {line}: {word!r}: {wrong}")
    return action
