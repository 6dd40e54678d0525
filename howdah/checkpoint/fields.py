"""Fields of rows that somebody else may have written, each by its type and its bounds.

A checksum says that a row is what was written, not that it was written by us. So nothing is
believed: a number is an int and no bool, not below 0 and not beyond 63 bits, a text has one line.
Whatever else stands there is a ValueError, or a KeyError where nothing does.
"""

from typing import Any

Row = dict[str, Any]

LARGEST = (1 << 63) - 1
LONGEST = 1000  # characters of a name
MANY_DIMS = 8  # of a tensor


def table(value: object, what: str) -> Row:
    """A table, whose names are all texts in JSON."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no table")
    return value


def rows(owner: Row, name: str) -> list[Row]:
    """A list of tables."""
    if not isinstance(owner[name], list):
        raise ValueError(f"{name} is no list")
    return [table(value, name) for value in owner[name]]


def text(row: Row, name: str) -> str:
    """A text of one line."""
    value = row[name]
    if not isinstance(value, str) or len(value) > LONGEST or not value.isprintable():
        raise ValueError(f"{name} is no text of one line")
    return value


def whole(row: Row, name: str, most: int = LARGEST) -> int:
    """A whole number from 0 to `most`."""
    return _whole(row[name], name, most)


def sizes(row: Row, name: str) -> tuple[int, ...]:
    """A list of whole numbers, one for each dim of a tensor."""
    value = row[name]
    if not isinstance(value, list) or len(value) > MANY_DIMS:
        raise ValueError(f"{name} is no list of numbers")
    return tuple(_whole(size, name, LARGEST) for size in value)


def _whole(value: object, name: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is no whole number from 0 to {most}")
    return value
