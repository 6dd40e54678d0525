"""How a failure in the processes of a command is reported: as a sentence, or with a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from howdah.base.errors import Unfinished, UserError


def report(sentence: str) -> None:
    """Tells the user why a command ends otherwise than it was to."""
    print(f"howdah: {sentence}", file=sys.stderr)


@contextmanager
def in_words() -> Iterator[None]:
    """Converts the exceptions of its block, whichever process raised them: a mistake of the user to
    UserError, a failure of the machine or of another rank to Unfinished. A defect is raised again,
    with its traceback.
    """
    from howdah.comm.launch import explain
    from howdah.comm.spawn import WorkerError

    try:
        yield
    except Exception as error:
        if isinstance(error, WorkerError):
            kind, told = error.kind, str(error)
        else:
            failure = explain(error)
            kind, told = failure.kind, failure.told
        if kind == "mistake":
            raise UserError(told) from None
        if kind in ("killed", "lost", "limit"):
            raise Unfinished(told) from None
        raise
