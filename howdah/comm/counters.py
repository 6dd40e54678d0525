"""What was sent: calls, bytes and seconds, by axis, operation and class of link.

Bytes are counted where a transport is told to send, so nothing can be sent uncounted. The
simulator predicts the same table from the plan, and a test compares the two.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from howdah.sim.traffic import Traffic


@dataclass
class Counters:
    """The running table of one process. Each group adds to it on a thread of its own."""

    calls: Counter[Traffic] = field(default_factory=Counter)
    bytes: Counter[Traffic] = field(default_factory=Counter)
    seconds: Counter[Traffic] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, traffic: Traffic, *, bytes: int, seconds: float) -> None:
        """One finished call."""
        with self._lock:
            self.calls[traffic] += 1
            self.bytes[traffic] += bytes
            self.seconds[traffic] += seconds  # type: ignore[assignment]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is sent inside is not counted: it belongs to no training step. Nothing may be under
        way at either end.
        """
        tables = self.calls, self.bytes, self.seconds
        before = [table.copy() for table in tables]
        yield
        for table, then in zip(tables, before, strict=True):
            table.clear()
            table.update(then)

    def sent(self) -> dict[Traffic, int]:
        """Bytes sent so far by this process."""
        return {traffic: count for traffic, count in self.bytes.items() if count}
