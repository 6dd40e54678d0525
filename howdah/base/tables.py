"""Reads nested tables, as TOML and JSON parsers return them, into frozen dataclasses.

    {"name": "a", "train": {"steps": "many"}}    ->    Run(...), ["train.steps is 'many'; it must be
                                                      a whole number"]

The fields of a dataclass define the keys of a table, and their annotations the types, limits and
units (`bounds.py`). Nothing is guessed: `true` is no number, and "3" is a text. A wrong value is
reported and left out, so that one call reports all mistakes. A table without a required key is
reported too, and gives None.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from howdah.base.bounds import Unit
from howdah.base.errors import UserError, nearest, shown
from howdah.base.files import path_problem, word_problem
from howdah.base.quantities import parse_quantity
from howdah.base.their_words import otherwise, our_key

NO_MORE: Mapping[str, tuple[str, ...]] = {}
NO_NAMES: Mapping[str, str] = {}
MANY_KEYS = 12  # unknown keys that are named
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
    limits: bool = False,
) -> Read:
    """Reads a table into the dataclass `kind`.

    also     by a table's dotted prefix ("model."): keys that the caller has already taken out of
             it; they too are suggested for a misspelled key
    renamed  the names now of older dotted keys, which are read by them
    limits   a value out of bounds is a mistake too; otherwise the caller asks `out_of_bounds`
    """
    reader = _Reader(kind, also, limits=limits)
    table, _ = with_new_names(table, renamed)
    return Read(reader.table(kind, table, ""), reader.problems)


def with_new_names(
    table: Mapping[str, Any], renamed: Mapping[str, str]
) -> tuple[Mapping[str, Any], list[str]]:
    """A table with the keys of `renamed` under their new names, and those that were there. A value
    that is there under its new name already is kept.

    >>> with_new_names({"pace": {"keep": 2}}, {"pace": "train", "train.keep": "train.last"})
    ({'train': {'last': 2}}, ['pace', 'train.keep'])
    """
    found: list[str] = []
    for old, new in renamed.items():
        inner, last = _inside(table, old)
        if inner is None or last not in inner:
            continue
        if not found:
            table = _copied(table)
            inner, _ = _inside(table, old)
        found.append(old)
        assert isinstance(inner, dict)
        value = inner.pop(last)
        owner, name = _inside(table, new)
        if isinstance(owner, dict):
            owner.setdefault(name, value)
    return table, found


def _inside(table: Any, name: str) -> tuple[Mapping[str, Any] | None, str]:
    """The table that has, or could have, a dotted key, and the last part of the key."""
    *path, last = name.split(".")
    for part in path:
        table = table.get(part) if isinstance(table, Mapping) else None
    return table if isinstance(table, Mapping) else None, last


def _copied(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copied(value) if isinstance(value, Mapping) else value
        for name, value in table.items()
    }


def out_of_bounds(value: object, path: str = "", kind: object = None) -> list[str]:
    """One sentence for each value that its annotation does not allow, in a dataclass or nested.

    path  the dotted name of `value`, such as "model"; empty for a complete run
    kind  the annotation of `value`, if it is no dataclass
    """
    reader = _Reader(type(value), NO_MORE, limits=True)
    reader.read(kind or type(value), value, path)
    return reader.problems


class _Reader:
    """Reads one table and those nested in it; `problems` collects all mistakes."""

    def __init__(self, root: type, also: Mapping[str, tuple[str, ...]], *, limits: bool) -> None:
        self.problems: list[str] = []
        self._root, self._also, self._limits = root, also, limits

    def table(self, kind: type, table: object, path: str) -> Any:
        """The dataclass of the table at `path`, or None. `path` is empty or ends in a dot."""
        hints = _hints(kind)
        if isinstance(table, kind):
            table = {name: getattr(table, name) for name in hints}
        if not isinstance(table, Mapping):
            raise _Wrong("a table")
        known = (*hints, *self._also.get(path, ()))
        unknown: dict[str, list[str]] = {}  # by what is suggested: a list of keys is said once
        for name in map(str, table):
            if name not in hints:
                unknown.setdefault(self._suggestion(path, name, known), []).append(path + name)
        for suggestion, names in unknown.items():
            keys = "unknown key" + "s" * (len(names) > 1)
            more = f" and {len(names) - MANY_KEYS:,} more" if len(names) > MANY_KEYS else ""
            listed = ", ".join(map(shown, names[:MANY_KEYS]))
            self.problems.append(f"{keys} {listed}{more}{suggestion}")
        values = {
            name: value
            for name, hint in hints.items()
            if name in table and (value := self.read(hint, table[name], path + name)) is not MISSING
        }
        must = _required(kind)
        if lacking := [part for name in must if name not in table for part in _parts(kind, name)]:
            verb = "is" if len(lacking) == 1 else "are"
            self.problems.append(f"{path}{', '.join(lacking)} {verb} missing")
        return None if set(must) - set(values) else kind(**values)

    def _here(self, word: str) -> str:
        """What is done here in place of another trainer's word; recipes alone are asked for it."""
        return otherwise(word) if "layout" in _hints(self._root) else ""

    def read(self, hint: object, value: object, name: str) -> Any:
        """The value of one field; MISSING if it is wrong, which is then in `problems`."""
        try:
            found = self._value(hint, value, name)
        except _Wrong as wrong:
            said = self._here(value) if isinstance(value, str) else ""
            self.problems.append(f"{name} is {shown(value)}; {said or f'it must be {wrong}'}")
            return MISSING
        except UserError as problem:
            self.problems.append(str(problem))
            return MISSING
        return MISSING if found is None and value is not None else found

    def _value(self, hint: Any, value: object, name: str) -> Any:
        """`value` converted to the type `hint`. Raises _Wrong; UserError for a quantity."""
        if value is None and NoneType in get_args(hint):
            return None
        hint, limit = _limited(hint)
        if isinstance(limit, Unit):
            return parse_quantity(value, limit.kind, where=name, positive=limit.positive)
        found = self._converted(hint, value, name)
        if self._limits and limit and found is not None and (wanted := limit.wanted(found)):
            raise _Wrong(wanted)
        return found

    def _converted(self, hint: Any, value: object, name: str) -> Any:
        if is_dataclass(hint):
            assert isinstance(hint, type)
            return self.table(hint, value, f"{name}." if name else "")
        if get_origin(hint) is Literal:
            return _chosen(get_args(hint), value)
        return self._list(hint, value, name) if get_origin(hint) is tuple else _plain(hint, value)

    def _list(self, hint: Any, value: object, name: str) -> Any:
        """A list as a tuple; None if one of its items is wrong."""
        options = get_args(hint)
        every = options[-1] is Ellipsis
        if not isinstance(value, list | tuple):
            raise _Wrong("a list" if every else _example(options))
        if len(value) > MANY_ROWS:
            raise _Wrong(f"a list of at most {MANY_ROWS:,}")
        if not every and len(value) != len(options):
            raise _Wrong(_example(options))
        hints = options[:1] * len(value) if every else options
        found = [
            self.read(inner, item, f"{name}[{place}]")
            for place, (inner, item) in enumerate(zip(hints, value, strict=True))
        ]
        return None if any(item is MISSING for item in found) else tuple(found)

    def _suggestion(self, path: str, name: str, known: Iterable[str]) -> str:
        """What an unknown key could be: howdah's word for another trainer's, or the most similar
        key of the same table, or else the same key of another table.
        """
        if (here := our_key(name)) and re.split("[.=]", here)[0] in _hints(self._root):
            word = here.removeprefix("layout=")
            return f"; here it is {here!r}" if word == here else f"; in a layout it is {word!r}"
        if said := self._here(name):
            return f"; {said}"
        suggestion = nearest(name, known)
        elsewhere = [path for path in _paths(self._root, "") if path.rpartition(".")[2] == name]
        if "did you mean" in suggestion or not elsewhere:
            return suggestion.replace("did you mean '", f"did you mean '{path}")
        return f"; did you mean {elsewhere[0]!r}?"


@lru_cache
def _hints(kind: type) -> Mapping[str, Any]:
    """The annotations of a dataclass by field."""
    return get_type_hints(kind, include_extras=True)


def _required(kind: type) -> list[str]:
    """The fields of a dataclass that have no default."""
    return [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]


def _parts(kind: type, name: str) -> list[str]:
    """What a field must have: of a table that has required keys, their dotted names."""
    inner = _hints(kind)[name]
    keys = _required(inner) if is_dataclass(inner) and isinstance(inner, type) else []
    return [f"{name}.{part}" for key in keys for part in _parts(inner, key)] or [name]


def _limited(hint: Any) -> tuple[Any, Any]:
    """The type that an annotation gives besides None, and its Bound, Length, Unit or None."""
    if NoneType in get_args(hint):
        hint = next(option for option in get_args(hint) if option is not NoneType)
    return get_args(hint) if get_origin(hint) is Annotated else (hint, None)


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
    for name, hint in _hints(kind).items():
        yield prefix + name
        for inner in (hint, *get_args(hint)):
            if isinstance(inner, type) and is_dataclass(inner):
                yield from _paths(inner, f"{prefix}{name}.")
