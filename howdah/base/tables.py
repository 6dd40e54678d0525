"""From nested tables, as TOML and JSON give them, to frozen dataclasses, and all that is wrong.

    {"name": "a", "pace": {"steps": "many"}}    ->    Run(...), ["pace.steps is 'many'; it must be
                                                      a whole number"]

The fields of a dataclass say what a table may hold. Nothing is guessed: `true` is no number, and
"3" is a text. A value that is wrong is told and left out, so that the other mistakes are told with
it; a table that lacks what it must have is no dataclass, but the sentence that says so.
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
MANY_ROWS = 1000  # of a list; the mix of sources knows thousandths
WANTED: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    Path: "a path in quotes",
}


class Read(NamedTuple):
    """What a table says: the dataclass, or None where it lacks something, and the problems."""

    value: Any
    problems: list[str]


class _Wrong(Exception):
    """A value that a field cannot take; the sentence goes behind the field's name."""


def read_table(
    kind: type, table: Mapping[str, Any], *, also: Mapping[str, tuple[str, ...]] = NO_MORE
) -> Read:
    """The dataclass `kind` that a table spells.

    also  keys that a table may have had before, to be suggested too, by its dotted name
    """
    reader = _Reader(kind, also)
    return Read(reader.table(kind, table, ""), reader.problems)


class _Reader:
    """Collects problems on the way down."""

    def __init__(self, root: type, also: Mapping[str, tuple[str, ...]]) -> None:
        self.problems: list[str] = []
        self._root, self._also = root, also

    def table(self, kind: type, table: object, path: str) -> Any:
        """The dataclass at `path`, which ends in a dot unless it is the top; or None."""
        if isinstance(table, kind):
            return table
        if not isinstance(table, Mapping):
            raise _Wrong("a table")
        hints = get_type_hints(kind)
        known = (*hints, *self._also.get(path, ()))
        self.problems += [
            f"unknown key {shown(path + str(name))}{self._suggestion(str(name), known)}"
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
        """The value of one field; MISSING where it is wrong, which has been told."""
        try:
            found = self._value(hint, value, name)
        except _Wrong as wrong:
            self.problems.append(f"{name} is {shown(value)}; it must be {wrong}")
            return MISSING
        return MISSING if found is None and value is not None else found

    def _value(self, hint: Any, value: object, name: str) -> Any:
        """`value` as `hint` says it. Raises _Wrong."""
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
        """A list, of any length where its hint ends in `...`; None if an entry of it is wrong."""
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

    def _suggestion(self, name: str, known: Iterable[str]) -> str:
        """The nearest key of the same table; else the same key of another table."""
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
    """A number, a text, a path, or true or false."""
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
    """The dotted names of all keys of a dataclass and of those inside it."""
    for name, hint in get_type_hints(kind).items():
        yield prefix + name
        for inner in (hint, *get_args(hint)):
            if isinstance(inner, type) and is_dataclass(inner):
                yield from _paths(inner, f"{prefix}{name}.")
