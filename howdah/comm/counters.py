"""What was sent: calls, bytes and seconds, by axis, operation and class of link; and when.

Bytes are counted where a transport is told to send, so nothing can be sent uncounted. The
simulator predicts the same table from the plan, and a test compares the two.

Each group writes in a table of its own, for it does one operation at a time, and groups work on
threads of their own: no lock stands in the way of a call of some microseconds.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from howdah.comm.recorder import Recorder
from howdah.plan.recording import Traffic


@dataclass
class Row:
    """A line of a table."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


Table = dict[Traffic, Row]


def add(table: Table, sent: Mapping[Traffic, int], seconds: float) -> None:
    """One finished call: what it sent, row by row. Its seconds are shared out by bytes."""
    total = sum(sent.values())
    for traffic, count in sent.items():
        row = table.get(traffic)
        if row is None:
            row = table[traffic] = Row()
        row.calls += 1
        row.bytes += count
        row.seconds += seconds * (count / total if total else 1 / len(sent))


@dataclass
class Counters:
    """The tables of one process, added up when somebody looks; and its clock."""

    recorder: Recorder = field(default_factory=Recorder)
    _tables: list[Table] = field(default_factory=list)

    def table(self) -> Table:
        """A table for a group to write in."""
        self._tables.append({})
        return self._tables[-1]

    @property
    def calls(self) -> Counter[Traffic]:
        """Finished calls."""
        return self._sums("calls")

    @property
    def bytes(self) -> Counter[Traffic]:
        """Bytes sent."""
        return self._sums("bytes")

    @property
    def seconds(self) -> Counter[Traffic]:
        """Seconds that calls took."""
        return self._sums("seconds")

    def sent(self) -> dict[Traffic, int]:
        """Bytes sent so far by this process, where there are any."""
        return {traffic: count for traffic, count in self.bytes.items() if count}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is sent inside is not counted: it belongs to no training step. Nothing may be under
        way at either end.
        """
        before = [{name: replace(row) for name, row in table.items()} for table in self._tables]
        yield
        for table in self._tables:
            table.clear()
        for table, then in zip(self._tables, before, strict=False):  # groups may have come
            table.update(then)

    def _sums(self, name: str) -> Counter[Traffic]:
        total: Counter[Traffic] = Counter()
        for table in self._tables:
            for traffic, row in list(table.items()):  # a thread may add a row
                total[traffic] += getattr(row, name)
        return total
