"""Counters of communication: calls, bytes and seconds, by axis, operation and class of link.

Bytes are counted where the transport sends, so every sent byte is counted. The simulator predicts
the same table from the plan, and a test compares the two.

Each group has its own table. A group runs one operation at a time, and groups run on different
threads. So no lock is needed, which would slow down calls of some microseconds.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from howdah.base.stopwatch import KEPT, Interval
from howdah.comm.recorder import Recorder
from howdah.plan.recording import Traffic


@dataclass
class Row:
    """The totals of one kind of traffic: finished calls, bytes sent, and seconds they took."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


Table = dict[Traffic, Row]


def add(table: Table, sent: Mapping[Traffic, int], seconds: float) -> None:
    """Adds one finished call to a table.

    sent     bytes for each kind of traffic in the call
    seconds  duration of the call, divided among the rows in proportion to their bytes
    """
    for traffic, count in sent.items():
        row = table.get(traffic)
        if row is None:
            row = table[traffic] = Row()
        row.calls += 1
        row.bytes += count
    _divide(table, sent, seconds)


def _divide(table: Table, sent: Mapping[Traffic, int], seconds: float) -> None:
    total = sum(sent.values())
    for traffic, count in sent.items():
        if traffic in table:
            table[traffic].seconds += seconds * (count / total if total else 1 / len(sent))


@dataclass
class Counters:
    """The tables of all groups of one process, added up when they are read; and its recorder.

    rows_sent   rows of an embedding's gradient that were sent by their numbers (comm.sparse)
    dense_sums  sums of it that were dense, because too many rows were not zero
    """

    recorder: Recorder = field(default_factory=Recorder)
    rows_sent: int = 0
    dense_sums: int = 0
    _tables: list[Table] = field(default_factory=list)
    _later: list[tuple[Table, Mapping[Traffic, int], Interval]] = field(default_factory=list)

    def table(self) -> Table:
        """A new, empty table for one group."""
        self._tables.append({})
        return self._tables[-1]

    def time_later(self, table: Table, sent: Mapping[Traffic, int], took: Interval) -> None:
        """Adds the seconds that a call in `table` took, when seconds are asked for."""
        self._later.append((table, sent, took))
        if len(self._later) > KEPT:
            self._time()

    @property
    def calls(self) -> Counter[Traffic]:
        """Number of finished calls, by traffic."""
        return self._sums("calls")

    @property
    def bytes(self) -> Counter[Traffic]:
        """Bytes sent, by traffic."""
        return self._sums("bytes")

    @property
    def seconds(self) -> Counter[Traffic]:
        """Seconds spent in calls, by traffic."""
        self._time()
        return self._sums("seconds")

    def sent(self) -> dict[Traffic, int]:
        """Bytes sent so far by this process, without the rows of zero bytes."""
        return {traffic: count for traffic, count in self.bytes.items() if count}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Does not count what is sent inside the block, because it belongs to no training step. No
        operation may be running when the block starts or ends.
        """
        before = [{name: replace(row) for name, row in table.items()} for table in self._tables]
        yield
        for table in self._tables:
            table.clear()
        for table, then in zip(self._tables, before, strict=False):  # not those of new groups
            table.update(then)

    def _time(self) -> None:
        later, self._later = self._later, []
        for table, sent, took in later:
            _divide(table, sent, took.seconds)

    def _sums(self, name: str) -> Counter[Traffic]:
        total: Counter[Traffic] = Counter()
        for table in self._tables:
            for traffic, row in list(table.items()):  # a thread may add a row
                total[traffic] += getattr(row, name)
        return total
