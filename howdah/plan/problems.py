"""What is said to a user whose input cannot work.

A `BadInput` is one sentence: what is wrong, where, and what to do. It travels up to the
command line, which prints it and exits with code 2. It is never a defect of howdah: those
keep their traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches

MANY = 25  # names that a sentence can list


class BadInput(Exception):
    """One sentence for the user: what is wrong, where it stands, what would work."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to a sentence.

    >>> nearest("stepz", ["steps", "seed"])
    "; did you mean 'steps'?"
    >>> nearest("q", ["steps", "seed"])
    '; known are: seed, steps'
    """
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    if len(names) > MANY:
        near = get_close_matches(word, names, n=5, cutoff=0.0)
        return f"; of {len(names)} that are known the nearest are: {', '.join(near)}"
    return f"; known are: {', '.join(names)}"
