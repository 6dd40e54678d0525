"""What is written beside training: log, metrics, pictures, traces. It may fail; training goes on.

A disk fills up, a folder is removed or becomes read-only. The first write of a kind that fails is
said in a sentence; the later ones are tried as before, for space may come back, and say nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OptionalOutput:
    """Takes the errors of writes that training can do without; `say` is told of the first ones."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    @contextmanager
    def writing(self, kind: str) -> Iterator[None]:
        """An OSError ends the block, and nothing else; so does a library that is not there."""
        try:
            yield
        except (OSError, ImportError) as error:
            if kind in self._said:
                return
            self._said.add(kind)  # first: whoever is told may want to write it down, in vain
            self._say(
                f"{kind} can no longer be written ({getattr(error, 'strerror', None) or error}): "
                "training goes on without it"
            )
