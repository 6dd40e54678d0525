"""Reads fields of untrusted JSON rows, each with a check of its type and bounds.

A checksum shows that a row is unchanged since it was written, not who wrote it. So every field is
checked: a number is an int (no bool) from 0 to 63 bits, a text has one line. Each function raises
ValueError for a wrong value, and KeyError for a missing field.
"""

from typing import Any

Row = dict[str, Any]

LARGEST = (1 << 63) - 1
LONGEST = 1000  # characters of a text
MANY_DIMS = 8  # dims of a tensor at most


def table(value: object, what: str) -> Row:
    """`value`, which must be a table (JSON keys are always texts); `what` names it in the error."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no table")
    return value


def rows(owner: Row, name: str) -> list[Row]:
    """The field `name`: a list of tables."""
    if not isinstance(owner[name], list):
        raise ValueError(f"{name} is no list")
    return [table(value, name) for value in owner[name]]


def text(row: Row, name: str) -> str:
    """The field `name`: a text of one line."""
    value = row[name]
    if not isinstance(value, str) or len(value) > LONGEST or not value.isprintable():
        raise ValueError(f"{name} is no text of one line")
    return value


def whole(row: Row, name: str, most: int = LARGEST) -> int:
    """The field `name`: a whole number from 0 to `most`."""
    return _whole(row[name], name, most)


def sizes(row: Row, name: str) -> tuple[int, ...]:
    """The field `name`: a list of whole numbers, one for each dim of a tensor."""
    value = row[name]
    if not isinstance(value, list) or len(value) > MANY_DIMS:
        raise ValueError(f"{name} is no list of numbers")
    return tuple(_whole(size, name, LARGEST) for size in value)


def _whole(value: object, name: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is no whole number from 0 to {most}")
    return value
