"""How what goes wrong in processes of a command is said: a sentence, or a defect's traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

from howdah.base.errors import Unfinished, UserError


@contextmanager
def in_words() -> Iterator[None]:
    """What the machine or a peer does to a command is Unfinished, whoever noticed it; a mistake is
    UserError. A defect keeps its traceback.
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
