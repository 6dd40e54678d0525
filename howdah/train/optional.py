"""Outputs that training does not depend on: log, metrics, pictures, traces. If one fails, training
continues.

A disk fills up; a folder is removed or becomes read-only. The first write of a kind that fails is
reported in a sentence. Later ones are tried as before, because space may become free, and are not
reported if they fail.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from howdah.base.errors import brief
from howdah.base.signals import stop_behind


@contextmanager
def importing(package: str) -> Iterator[None]:
    """The import of a package that training does not depend on. A broken one may raise anything
    (AttributeError, TypeError, RuntimeError): every error leaves the block as an ImportError. A
    stop signal that came during the import does not.
    """
    try:
        yield
    except Exception as error:
        if stop_behind(error):
            raise
        why = f"{type(error).__name__}: {brief(error)}".removesuffix(": ")
        raise ImportError(f"{package} cannot be imported: {why}") from error


class OptionalOutput:
    """Suppresses the errors of optional writes; `say` gets a sentence for the first of each
    kind.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    @contextmanager
    def writing(self, kind: str, *also: type[Exception]) -> Iterator[None]:
        """Ends the block at an OSError, an ImportError or one of `also`, and does not raise it."""
        kinds: tuple[type[Exception], ...] = (OSError, ImportError, *also)
        try:
            yield
        except kinds as error:
            if kind in self._said:
                return
            self._said.add(kind)  # first, because `say` may itself try to write, and fail
            self._say(
                f"{kind} can no longer be written ({getattr(error, 'strerror', None) or error}): "
                "training goes on without it"
            )
