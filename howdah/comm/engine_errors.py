"""The errors of the engine: which rank failed, in which call, made at which line.

A rank whose operation fails writes the line of its call into the arena, and waits a moment for the
line of the other rank. This has no cost while operations succeed. Numbers that another rank wrote
are checked before they are used, because its memory may be corrupted.
"""

import time
from ctypes import CDLL, byref, c_int, create_string_buffer
from dataclasses import dataclass

from howdah.base.errors import UserError
from howdah.comm.engine_abi import (
    KINDS,
    OP,
    REASONS,
    SITE_BYTES,
    Label,
    Notice,
    choice,
    describe_call,
    known,
)
from howdah.comm.signature import BY_RANK, Disagreement, both_ways, different_counts, number
from howdah.comm.transport import PeerLost, gave_up

WHAT_HAPPENED = {
    "died": "died",
    "left": "left the group",
    "stopped": "is stopped",
    "late": "did not come before the deadline",
    "garbled": "has numbers in the arena that cannot be (they were overwritten)",
}
EXCHANGE = KINDS.index("all_to_all")
PATIENCE = 1.0  # seconds that a rank waits for the line at which the other rank made its call


@dataclass(frozen=True)
class Failure:
    """A failed operation of an engine.

    functions, handle  of the engine
    call, site         the call as text, and the line that made it
    processes          process numbers, by rank
    """

    functions: CDLL
    handle: int
    call: str
    site: str
    processes: tuple[int, ...]

    def explain(self, code: int) -> Exception:
        """The exception for a negative return `code` of the engine."""
        reason = REASONS[-code]
        if reason == "busy":
            return RuntimeError("two threads used one engine at once: it serves one at a time")
        if reason == "no memory":
            return MemoryError("no memory is left for the messages of a group")
        if reason == "elsewhere":
            return UserError("this engine belongs to the process that forked this one")
        pair, notices, label = (c_int * 2)(), (Notice(), Notice()), Label()
        self.functions.howdah_tell(self.handle, self.site.encode(errors="replace"))
        self.functions.howdah_explain(self.handle, pair, *map(byref, notices), byref(label))
        by, about = pair
        if reason == "disagree" and all(known(n.kind, n.dtype, n.op) for n in notices):
            return self._disagreement(by, about, *notices)
        if reason == "mismatch" and known(label.kind, label.dtype, 0):
            sent = describe_call(label.kind, label.dtype, [label.count])
            return Disagreement(
                f"rank {by} waits for another message{self._place(by)} than rank {about}'s "
                f"{sent}; this rank called {self.call} at {self.site}"
            )
        return self._lost(by, about, "garbled" if reason in ("disagree", "mismatch") else reason)

    def _lost(self, by: int, about: int, reason: str) -> PeerLost:
        lost, dead = f"rank {by} was interrupted", 0
        if reason == "gave up":
            lost = gave_up(by)
        elif reason != "interrupted":
            process = self.processes[about]
            lost = f"rank {about} (process {process}) {WHAT_HAPPENED[reason]}, as rank {by} saw"
            dead = process if reason == "died" else 0
        return PeerLost(f"{lost}; this rank called {self.call} at {self.site}", dead)

    def _disagreement(self, by: int, about: int, mine: Notice, theirs: Notice) -> Disagreement:
        counts, where = [n.counts[: len(self.processes)] for n in (mine, theirs)], ""
        if mine.kind == theirs.kind and KINDS[mine.kind] in BY_RANK:
            where = different_counts(*counts)
        said = self._said(by, about, mine), self._said(about, by, theirs)
        return Disagreement(f"rank {by} called {said[0]}, but rank {about} {said[1]}{where}")

    def _said(self, rank: int, other: int, notice: Notice) -> str:
        """The call of `rank` and its line, as text. For an all-to-all it contains only the counts
        between `rank` and `other`.
        """
        counts, chosen = [notice.count], choice(notice.kind, notice.op, notice.root)
        if KINDS[notice.kind] in BY_RANK:
            counts = notice.counts[: len(self.processes)]
        elif notice.kind == EXCHANGE:
            counts = [notice.counts[other], notice.received[other]]
            counts, chosen = both_ways(rank, other, counts)
        call = describe_call(notice.kind, notice.dtype, counts, chosen)
        return f"{number(notice.sequence, call)}{self._place(rank)}"

    def _place(self, rank: int) -> str:
        """The line at which a rank made its call; empty if the rank does not write it in time."""
        site, until = create_string_buffer(SITE_BYTES), time.monotonic() + PATIENCE
        while not self.functions.howdah_told(self.handle, rank, site):
            if time.monotonic() > until:
                return ""
            time.sleep(0.001)
        return f" at {site.value.decode(errors='replace')}"


def spoken(calls: bytes) -> str:
    """The first of some packed calls, as text."""
    kind, dtype, op, _, root, count = OP.unpack_from(calls)[:6]
    counts = [] if kind == EXCHANGE else [count]  # an exchange may differ by rank
    return describe_call(kind, dtype, counts, choice(kind, op, root))
