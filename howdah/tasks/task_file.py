"""A task file: what a model is asked, and in which file the questions are.

kind = "multiple-choice"          perplexity, last-word or multiple-choice
file = "questions.jsonl"          beside the task file, one JSON object a line

perplexity        {"text": "..."}                        how likely are whole texts?
last-word         {"text": "..."}                        is the last word the likeliest?
multiple-choice   {"question": "...",                    which choice is the likeliest
                   "choices": ["...", "..."],            behind the question?
                   "answer": 1}                          its number from 0, or its text
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from howdah.base.bounds import Bound
from howdah.base.errors import UserError, named, nearest, several, shown
from howdah.base.files import no_file, parse_json, parse_toml, read_file
from howdah.base.tables import read_table
from howdah.text.readers import opened

Kind = Literal["perplexity", "last-word", "multiple-choice"]
LONGEST_LINE = 64 << 20  # bytes


@dataclass(frozen=True)
class Task:
    """What a model is asked.

    kind       perplexity of whole texts; accuracy of last words, as LAMBADA asks
               (https://arxiv.org/abs/1606.06031); or the likeliest of several choices
    file       a file of JSON lines, relative to the task file
    text       the field of a text
    question, choices, answer  the fields of a question, its choices and the right one
    separator  stands between a question and a choice
    begin      whether the token that begins a text is in front of each question
    too_long   what is done about a question that is longer than the context: stop, or cut its
               beginning off
    limit      most lines that are read; 0: all
    """

    kind: Kind
    file: str
    text: str = "text"
    question: str = "question"
    choices: str = "choices"
    answer: str = "answer"
    separator: str = " "
    begin: bool = True
    too_long: Literal["stop", "cut"] = "stop"
    limit: Annotated[int, Bound(0, 1 << 31)] = 0


@dataclass(frozen=True)
class Question:
    """One line: texts of which the model scores each behind `context`, and the number of the right
    one.

    where  file and line
    """

    where: str
    context: str
    choices: tuple[str, ...]
    answer: int = 0


def read_task(path: Path) -> Task:
    """The task of a TOML or JSON file; its own file is relative to it. Raises UserError."""
    if why := no_file(path):
        raise UserError(f"--task: {named(path)} {why}; name a task file (.toml or .json)")
    try:
        data = read_file(path)
        table = parse_json(data) if path.suffix == ".json" else parse_toml(data.decode())
    except (OSError, ValueError) as error:
        raise UserError(f"--task: cannot read {named(path)}: {error}") from error
    if not isinstance(table, dict):
        raise UserError(f"--task: {named(path)} is no table; write kind and file in it")
    read = read_table(Task, table, limits=True)
    if read.problems:
        raise UserError(f"{named(path)}: {several(read.problems)}")
    task: Task = read.value
    if why := no_file(path.parent / task.file):
        raise UserError(f"{named(path)}: file is {shown(task.file)}, which {why}; name JSON lines")
    return task


def questions(task: Task, folder: Path) -> list[Question]:
    """The questions of a task whose file is in `folder`. Raises UserError with file and line."""
    found = []
    for where, record in _records(folder / task.file):
        found.append(_question(task, where, record))
        if task.limit and len(found) == task.limit:
            break
    if not found:
        raise UserError(f"{named(folder / task.file)} holds no question; a line has one")
    return found


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    def bad(sentence: str) -> None:
        raise UserError(f"{sentence}; repair it")

    with opened(path, bad) as file:
        number = 0
        while raw := file.readline(LONGEST_LINE + 1):
            number += 1
            where = f"{path} line {number}"
            if not raw.strip():
                continue
            try:
                record = json.loads(raw.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON ({error}); a line is one object") from error
            if not isinstance(record, dict):
                raise UserError(f"{where}: not an object; every line must be one")
            yield where, record


def _question(task: Task, where: str, record: dict[str, Any]) -> Question:
    if task.kind != "multiple-choice":
        text = _field(record, task.text, where, str)
        if task.kind == "perplexity":
            if not text.strip():
                raise UserError(f"{where}: the field {shown(task.text)} is empty; leave it out")
            return Question(where, "", (text,))
        before, _, last = text.rstrip().rpartition(" ")
        if not before.strip():
            raise UserError(f"{where}: {shown(text)} has no word before its last; give a passage")
        return Question(where, before, (f" {last}",))
    question = _field(record, task.question, where, str)
    choices = _field(record, task.choices, where, list)
    if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise UserError(
            f"{where}: the field {shown(task.choices)} must be a list of 2 texts or more"
        )
    answer = record.get(task.answer)
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise UserError(
            f"{where}: the field {shown(task.answer)} is {shown(answer)}; it must be a choice, or "
            f"its number from 0 to {len(choices) - 1}"
        )
    return Question(where, question, tuple(choices), answer)


def _field(record: dict[str, Any], name: str, where: str, kind: type) -> Any:
    if name not in record:
        raise UserError(f"{where}: no field {shown(name)}{nearest(name, record)}")
    if not isinstance(record[name], kind):
        wanted = "a text" if kind is str else "a list"
        raise UserError(f"{where}: the field {shown(name)} must be {wanted}")
    return record[name]
