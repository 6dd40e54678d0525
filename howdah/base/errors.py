"""What is said to a user whose input cannot work.

A `UserError` is one sentence: what is wrong, where, and what to do. It travels up to the
command line, which prints it and exits with code 2. It is never a defect of howdah: those
keep their traceback.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

MANY = 25  # names that a sentence can list
TOLD = 12  # problems that it can tell
LONGEST = 60  # characters of a value in it


class UserError(Exception):
    """One sentence for the user: what is wrong, where it stands, what would work."""


class Unfinished(Exception):
    """A run that its machine does not let finish, as one sentence; exit code 1.

    A disk is full, say: nobody has made a mistake, and the same command may work later.
    """


def nearest(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to a sentence.

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
    """Names as they are, but for those of somebody's file that no sentence could hold."""
    return ", ".join(name if name.isprintable() else shown(name) for name in map(_cut, names))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def shown(value: object) -> str:
    """A value as a sentence shows it: on one line, and not longer than a reader wants.

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
    """A path as a sentence shows it: as it is, unless it would break the sentence."""
    text = str(path)
    return text if text.isprintable() and len(text) <= 4 * LONGEST else shown(text)


def brief(error: object) -> str:
    """What another library says of a file: its first line, and not all of a long one."""
    text = str(error).partition("\n")[0].rstrip(". ")
    return text if text.isprintable() and len(text) <= 4 * LONGEST else shown(text)


def several(problems: Sequence[str]) -> str:
    """Problems as one sentence; of many the first ones, and how many more there are.

    >>> several(["seed is 'a'", "steps is 0"])
    "seed is 'a'; steps is 0"
    """
    told, rest = problems[:TOLD], len(problems) - TOLD
    return "; ".join([*told, f"and {rest} more"] if rest > 0 else told)
