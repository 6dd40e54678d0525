"""What was sent: calls, bytes and seconds, by axis, operation and class of link; and when.

Bytes are counted where a transport is told to send, so nothing can be sent uncounted. The
simulator predicts the same table from the plan, and a test compares the two.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from howdah.comm.clock import Clock
from howdah.sim.traffic import Traffic


@dataclass
class Counters:
    """The running table of one process. Each group adds to it on a thread of its own."""

    calls: Counter[Traffic] = field(default_factory=Counter)
    bytes: Counter[Traffic] = field(default_factory=Counter)
    seconds: Counter[Traffic] = field(default_factory=Counter)
    clock: Clock = field(default_factory=Clock)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, sent: Mapping[Traffic, int], seconds: float) -> None:
        """One finished call: what it sent, row by row. Its seconds are shared out by bytes."""
        total = sum(sent.values())
        with self._lock:
            for traffic, count in sent.items():
                part = count / total if total else 1 / len(sent)
                self.calls[traffic] += 1
                self.bytes[traffic] += count
                self.seconds[traffic] += seconds * part  # type: ignore[assignment]

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
