"""The ledger: the calls that one rank has made on a wire that does not compare them.

    rank 0   41 calls, checksum 7f3a90c1      … 40 all_reduce(float32 [1000], sum)   at zero.py:54
    rank 1   40 calls, checksum 22e10b9d      … 40 broadcast(float32 [1000], root 0) at own.py:9

Ranks whose checksums are equal have called the same operations in the same order. They are
compared over the host's wire: after the first pass of each kind, and before each call in checked
mode. When a wire hangs, the ledgers tell which rank has not made which call.

Sends and receives differ between the ranks of a group, so they are not in the checksum.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

from howdah.comm.signature import Disagreement, number

KEPT = 32  # calls, with the lines that made them


class Entry(NamedTuple):
    """What ranks tell one another: the number of calls, their checksum, and the last call."""

    calls: int
    checksum: int
    last: str


class Ledger:
    """The calls of one rank in one group.

    calls     number of collective calls so far
    checksum  of their texts, in their order
    """

    def __init__(self) -> None:
        self.calls = self.checksum = 0
        self._kept: deque[str] = deque(maxlen=KEPT)

    def note(self, call: str, site: str, *, pair: int | None = None) -> None:
        """Notes a call made at `site`.

        pair  the other rank of a send or receive
        """
        if pair is not None:
            self._kept.append(f"{call} with rank {pair} at {site}")
            return
        self.calls += 1
        self.checksum = crc32(call.encode(), self.checksum)
        self._kept.append(f"{number(self.calls, call)} at {site}")

    @property
    def last(self) -> str:
        """The last call, with its line."""
        return self._kept[-1] if self._kept else "nothing yet"

    @property
    def kept(self) -> list[str]:
        """The last KEPT calls, the newest last."""
        return list(self._kept)

    @property
    def entry(self) -> Entry:
        """What this rank tells the others."""
        return Entry(self.calls, self.checksum, self.last)


def check_equal(entries: Sequence[Entry]) -> None:
    """Raises Disagreement, which names two ranks and their calls, unless all ranks have made the
    same calls.
    """
    first = entries[0]
    for rank, entry in enumerate(entries):
        if entry[:2] != first[:2]:
            raise Disagreement(
                f"ranks called different operations: rank 0 made {first.calls} calls, the last "
                f"{first.last}, but rank {rank} {entry.calls}, the last {entry.last}"
            )


def behind(entries: Mapping[int, Entry]) -> str:
    """Who has not made which call, of ranks by number, as the end of an error message; empty if all
    made the same number.
    """
    most = max(entries, key=lambda rank: entries[rank].calls)
    late = [rank for rank, entry in entries.items() if entry.calls < entries[most].calls]
    if not late:
        return ""
    who = f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(map(str, late))} have"
    return f"{who} not made the call {entries[most].last} of rank {most}"
