"""Questions of a command that an option can answer: on a terminal they are asked, with the usual
answer shown, and asked again where the answer is wrong; elsewhere the usual answer is taken.

    howdah cluster new FILE     howdah init FILE
"""

import sys
from collections.abc import Callable
from typing import TypeVar

from howdah.base.errors import UserError

Value = TypeVar("Value")


def answer(
    option: str, given: str | None, question: str, usual: str, read: Callable[[str], Value]
) -> Value:
    """What `read` makes of the answer to a question.

    option  that answers it, without its dashes
    given   what the option says; None or empty: it was not given
    usual   the answer if nothing else is said; empty: there is none
    read    raises UserError for a wrong answer

    Raises UserError for a wrong option, and where nobody can be asked what has no usual answer.
    """
    if given:
        return read(given)
    if not sys.stdin.isatty():
        return read(ask(option, question, usual))
    while True:
        try:
            return read(ask(option, question, usual))
        except UserError as problem:
            if isinstance(problem.__cause__, EOFError):
                raise
            print(problem)


def ask(option: str, question: str, usual: str) -> str:
    """The answer as a text: of the user on a terminal, elsewhere the usual one. Raises UserError if
    there is none, and at the end of the input.
    """
    if not sys.stdin.isatty():
        if not usual:
            raise UserError(f"--{option} is missing, and there is no terminal to ask on; give it")
        return usual
    from rich.prompt import Prompt

    try:
        said = Prompt.ask(question, default=usual) if usual else Prompt.ask(question)
    except EOFError as error:
        raise UserError(f"--{option} was not answered; give it") from error
    return said.strip()


def number(option: str) -> Callable[[str], int]:
    """Reads a number from 1 on."""

    def read(said: str) -> int:
        if not said.isdecimal() or not 0 < int(said[:9]) < 10**6:
            raise UserError(f"--{option} is {said!r}; it must be a number from 1 on")
        return int(said)

    return read
