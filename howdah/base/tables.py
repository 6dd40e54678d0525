"""Reads nested tables, as TOML and JSON parsers return them, into frozen dataclasses.

    {"name": "a", "train": {"steps": "many"}}    ->    Run(...), ["train.steps is 'many'; it must be
                                                      a whole number"]

The fields of a dataclass define the keys and types of a table. Nothing is guessed: `true` is no
number, and "3" is a text. A wrong value is reported and left out, so that one call reports all
mistakes. A table without a required key is reported too, and gives None instead of a dataclass.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from math import inf
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from howdah.base.errors import nearest, shown
from howdah.base.files import path_problem, word_problem

NO_MORE: Mapping[str, tuple[str, ...]] = {}
NO_NAMES: Mapping[str, str] = {}
MANY_ROWS = 1000  # the most items of a list; the mix of data sources resolves thousandths
WANTED: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    Path: "a path in quotes",
}


class Read(NamedTuple):
    """The result of reading a table.

    value     the dataclass; None if a required key is missing or wrong
    problems  one sentence for each mistake
    """

    value: Any
    problems: list[str]


class _Wrong(Exception):
    """A value that a field cannot take; the text completes the sentence "it must be ..."."""


def read_table(
    kind: type,
    table: Mapping[str, Any],
    *,
    also: Mapping[str, tuple[str, ...]] = NO_MORE,
    renamed: Mapping[str, str] = NO_NAMES,
) -> Read:
    """Reads a table into the dataclass `kind`.

    also     by a table's dotted prefix ("model."): keys that the caller has already taken out of
             it; they too are suggested for a misspelled key
    renamed  the new names of dotted keys that are not read any more
    """
    reader = _Reader(kind, also, renamed)
    return Read(reader.table(kind, table, ""), reader.problems)


class _Reader:
    """Reads one table and those nested in it; `problems` collects all mistakes."""

    def __init__(
        self, root: type, also: Mapping[str, tuple[str, ...]], renamed: Mapping[str, str]
    ) -> None:
        self.problems: list[str] = []
        self._root, self._also, self._renamed = root, also, renamed

    def table(self, kind: type, table: object, path: str) -> Any:
        """The dataclass of the table at `path`, or None. `path` is empty or ends in a dot."""
        if isinstance(table, kind):
            return table
        if not isinstance(table, Mapping):
            raise _Wrong("a table")
        hints = get_type_hints(kind)
        known = (*hints, *self._also.get(path, ()))
        self.problems += [
            f"unknown key {shown(path + str(name))}{self._suggestion(path, str(name), known)}"
            for name in table
            if name not in hints
        ]
        values = {
            name: value
            for name, hint in hints.items()
            if name in table
            and (value := self._field(hint, table[name], path + name)) is not MISSING
        }
        must = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
        if lacking := [name for name in must if name not in table]:
            verb = "is" if len(lacking) == 1 else "are"
            self.problems.append(f"{path}{', '.join(lacking)} {verb} missing")
        return None if set(must) - set(values) else kind(**values)

    def _field(self, hint: object, value: object, name: str) -> Any:
        """The value of one field; MISSING if it is wrong, which is then in `problems`."""
        try:
            found = self._value(hint, value, name)
        except _Wrong as wrong:
            self.problems.append(f"{name} is {shown(value)}; it must be {wrong}")
            return MISSING
        return MISSING if found is None and value is not None else found

    def _value(self, hint: Any, value: object, name: str) -> Any:
        """`value` converted to the type `hint`. Raises _Wrong."""
        options = get_args(hint)
        if NoneType in options:
            rest = next(option for option in options if option is not NoneType)
            return None if value is None else self._value(rest, value, name)
        if is_dataclass(hint):
            assert isinstance(hint, type)
            return self.table(hint, value, f"{name}.")
        if get_origin(hint) is Literal:
            return _chosen(options, value)
        return (
            self._list(options, value, name) if get_origin(hint) is tuple else _plain(hint, value)
        )

    def _list(self, options: tuple[Any, ...], value: object, name: str) -> Any:
        """A list as a tuple; None if one of its items is wrong.

        options  the types of the items; (type, ...) allows any length
        """
        every = options[-1] is Ellipsis
        if not isinstance(value, list | tuple):
            raise _Wrong("a list" if every else _example(options))
        if len(value) > MANY_ROWS:
            raise _Wrong(f"a list of at most {MANY_ROWS:,}")
        if not every and len(value) != len(options):
            raise _Wrong(_example(options))
        hints = [options[0]] * len(value) if every else options
        found = [
            self._field(hint, item, f"{name}[{place}]")
            for place, (hint, item) in enumerate(zip(hints, value, strict=True))
        ]
        return None if any(item is MISSING for item in found) else tuple(found)

    def _suggestion(self, path: str, name: str, known: Iterable[str]) -> str:
        """What an unknown key could be: its new name, or else the most similar key of the same
        table, or else the same key of another table.
        """
        if path + name in self._renamed:
            return f"; it is called {self._renamed[path + name]!r} now"
        suggestion = nearest(name, known)
        elsewhere = [path for path in _paths(self._root, "") if path.rpartition(".")[2] == name]
        if "did you mean" in suggestion or not elsewhere:
            return suggestion
        return f"; did you mean {elsewhere[0]!r}?"


def _example(options: tuple[Any, ...]) -> str:
    return f"a list of {len(options)} numbers"


def _chosen(options: tuple[Any, ...], value: object) -> Any:
    if not isinstance(value, str) or value not in options:
        *most, last = map(repr, options)
        raise _Wrong(f"{', '.join(most)} or {last}")
    return value


def _plain(hint: Any, value: Any) -> Any:
    """A number, text, path or bool as the type `hint`. Raises _Wrong."""
    if hint is Path and isinstance(value, Path):
        return value
    if hint in (str, Path) and isinstance(value, str):
        problem = path_problem(value) if hint is Path else word_problem(value)
        if problem:
            raise _Wrong(f"{WANTED[hint]}, and {problem}")
        return hint(value)
    if hint is bool and isinstance(value, bool):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and number:
        return _float(value)
    if hint is int and number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    raise _Wrong(WANTED[hint])


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # hundreds of digits
        return inf if value > 0 else -inf


def _paths(kind: type, prefix: str) -> Iterator[str]:
    """The dotted names of all fields of a dataclass and of the dataclasses inside it."""
    for name, hint in get_type_hints(kind).items():
        yield prefix + name
        for inner in (hint, *get_args(hint)):
            if isinstance(inner, type) and is_dataclass(inner):
                yield from _paths(inner, f"{prefix}{name}.")
