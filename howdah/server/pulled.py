"""The handle of a unit's weights that a worker has asked its servers for."""

from collections.abc import Sequence
from typing import Protocol

from howdah.base.stopwatch import HOST, Interval
from howdah.comm.handle import DONE, Note
from howdah.plan.recording import WAIT
from howdah.server.moments import Record


class Asked(Protocol):
    """A connection over which chunks of units were asked for."""

    def wait(self, unit: str) -> None:
        """Waits until the chunks of a unit are here."""
        ...

    def has(self, unit: str) -> bool:
        """Whether the chunks of a unit are here."""
        ...


class Pulled:
    """The weights of a unit, in parts from several servers.

    record  called with the time that `result` has waited
    """

    def __init__(self, links: Sequence[Asked], unit: str, record: Record) -> None:
        self._links, self._unit, self._record = links, unit, record

    def result(self) -> None:
        """Waits until the weights are here."""
        began = HOST.mark()
        for link in self._links:
            link.wait(self._unit)
        took = Interval(HOST, began, HOST.mark())
        self._record("servers", f"{WAIT} weights of {self._unit}", 0, took)

    def then(self, note: Note) -> None:
        """Calls `note` when the weights are here."""
        self.result()
        DONE.then(note)

    def done(self) -> bool:
        """Whether the weights are here."""
        return all(link.has(self._unit) for link in self._links)
