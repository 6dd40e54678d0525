"""The keys of a recipe: what each may be, what it is if it is left out, what it means.

All of it is read off the dataclasses that a recipe is read into: the annotations of their fields,
the defaults, and the lines of their docstrings.
"""

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import getdoc
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from howdah.base.bounds import Bound, Length
from howdah.base.their_words import KEYS, ours
from howdah.config.recipe import Run
from howdah.shapes.shape import ModelShape

PLAIN = {int: "whole number", float: "number", str: "text", bool: "true | false", Path: "path"}


class Key(NamedTuple):
    """One key of a recipe, by its dotted name.

    values   what it may be
    default  what it is if it is left out; empty if it must be given or follows from other keys
    about    what it means; empty where the name says it
    """

    name: str
    values: str
    default: str
    about: str


PRESET = Key(
    "model.preset", "text", "", "a named model (`howdah presets`); other keys change its sizes"
)


def recipe_keys(kind: type = Run, prefix: str = "") -> Iterator[Key]:
    """Every key of a recipe, table by table."""
    hints, notes = get_type_hints(kind, include_extras=True), _notes(kind)
    for one in fields(kind):
        hint = _without_none(hints[one.name])
        if is_dataclass(hint):
            assert isinstance(hint, type)
            if hint is ModelShape:
                yield PRESET
            yield from recipe_keys(hint, f"{prefix}{one.name}.")
        else:
            about = notes.get(one.name, "")
            yield Key(prefix + one.name, _values(hint), _default(one), about)


def find_keys(word: str) -> list[Key]:
    """The keys whose names or meanings contain `word`; for a word of another trainer, the key that
    is meant, and those whose names have the word, too.
    """
    wanted, meant = word.lower(), ours(word, KEYS).partition("=")[0]
    keys = list(recipe_keys())
    if exact := [key for key in keys if key.name == meant]:
        return exact + [key for key in keys if key not in exact and wanted in key.name.split(".")]
    return [key for key in keys if wanted in f"{key.name} {key.about}".lower()]


def _without_none(hint: Any) -> Any:
    options = [option for option in get_args(hint) if option is not NoneType]
    return options[0] if NoneType in get_args(hint) else hint


def _values(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        inner, limit = get_args(hint)[:2]
        if isinstance(limit, Bound):
            return f"{PLAIN[inner]}{_range(limit)}"
        return f"{_values(inner)}, {limit.least} to {limit.most}" * isinstance(limit, Length)
    if get_origin(hint) is Literal:
        return " | ".join(get_args(hint))
    return PLAIN.get(hint, "list")


def _range(bound: Bound) -> str:
    """The limits that a user may meet; those far above any run are not worth a word."""
    low = f"{'above' if bound.above else 'from'} {bound.least:g}" if bound.least > -1e9 else ""
    high = f"{'below' if bound.below else 'to'} {bound.most:g}" if bound.most < 1e6 else ""
    return f", {low} {high}".rstrip() if low else ""


def _default(one: "Field[Any]") -> str:
    value = one.default_factory() if one.default_factory is not MISSING else one.default
    if value is MISSING or value is None:
        return ""
    if isinstance(value, tuple):
        return f"[{', '.join(repr(getattr(item, 'path', item)) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value == "" else str(value)


def _notes(kind: type) -> dict[str, str]:
    """By field, its line of the docstring; lines that are indented further continue it."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (getdoc(kind) or "").splitlines():
        if match := re.match(r"(\w+(?:, \w+)*) {2,}(\S.*)", line):
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2])
        elif line.startswith("  ") and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found
