"""Exceptions and helpers for messages to the user.

A `UserError` is one sentence about wrong input: what is wrong, where, and what to do. It propagates
to the command line, which prints it and exits with code 2. A defect of howdah is never a
`UserError`: it is shown with its traceback.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from shlex import quote

MANY = 25  # the most names that a sentence lists
TOLD = 12  # the most problems that a sentence lists
LONGEST = 60  # the most characters of a value in a sentence


class UserError(Exception):
    """Wrong input, as one sentence for the user: what is wrong, where it is, what would work."""


class Unfinished(Exception):
    """The machine keeps a run from finishing, for example by a full disk; exit code 1.

    The message is one sentence. The input is correct, and the same command may work later.
    """


def nearest(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to a sentence: the known name most like `word`, or the known names.

    >>> nearest("stepz", ["steps", "seed"])
    "; did you mean 'steps'?"
    >>> nearest("q", ["steps", "seed"])
    '; known are: seed, steps'
    """
    names, word = sorted(known), word[:LONGEST]
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {shown(close[0])}?"
    if len(names) > MANY:
        near = get_close_matches(word, names, n=5, cutoff=0.0)
        return f"; of {len(names)} that are known the nearest are: {_listed(near)}"
    return f"; known are: {_listed(names)}"


def _listed(names: Iterable[str]) -> str:
    """Names joined by commas, each cut to LONGEST characters; unprintable names are escaped."""
    return ", ".join(name if name.isprintable() else shown(name) for name in map(_cut, names))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def shown(value: object) -> str:
    """The repr of a value, for an error message: on one line, and cut to about LONGEST characters.

    >>> shown("dp2 x4")
    "'dp2 x4'"
    """
    try:
        text = repr(_cut(value) if isinstance(value, str) else value)
    except (ValueError, RecursionError):  # thousands of digits; lists in lists in lists
        return f"{type(value).__name__} that is too long to show"
    limit = 4 * LONGEST if isinstance(value, str) else LONGEST  # escapes are longer than letters
    return text if len(text) <= limit else _cut(text)


def named(path: object) -> str:
    """A path for an error message: unchanged, unless it is unprintable or very long."""
    text = str(path)
    return text if text.isprintable() and len(text) <= 4 * LONGEST else shown(text)


def pasted(path: object) -> str:
    """A path in a command that is to be pasted into a shell."""
    return quote(str(path))


def brief(error: object) -> str:
    """The first line of another library's error message, cut where it is very long."""
    try:
        text = str(error).partition("\n")[0].rstrip(". ")
    except Exception:  # of a user's code
        text = "it cannot be shown"
    return text if text.isprintable() and len(text) <= 4 * LONGEST else shown(text)


def several(problems: Sequence[str]) -> str:
    """Problems joined into one sentence; of more than TOLD, the first TOLD and the number left out.

    >>> several(["seed is 'a'", "steps is 0"])
    "seed is 'a'; steps is 0"
    """
    told, rest = problems[:TOLD], len(problems) - TOLD
    return "; ".join([*told, f"and {rest} more"] if rest > 0 else told)
