"""What the engine says when an operation fails: who, in which call, made where.

A rank that fails writes the place of its call into the arena, and waits a moment for the other
side's. Nothing of this costs anything while all goes well.
"""

import time
from ctypes import CDLL, byref, c_int
from dataclasses import dataclass

from howdah.comm.library import REASONS, Label, Notice, words
from howdah.comm.signature import Disagreement
from howdah.comm.transport import PeerLost

WHAT_HAPPENED = {
    "died": "died",
    "left": "left the group",
    "stopped": "is stopped",
    "late": "did not come before the deadline",
}
PATIENCE = 1.0  # seconds that a rank waits to hear where the other one made its call


@dataclass(frozen=True)
class Failure:
    """A failed `call` in words, made at `site`, of an engine: its functions and its handle."""

    functions: CDLL
    handle: int
    call: str
    site: str
    processes: tuple[int, ...]

    def explain(self, code: int) -> Exception:
        """The exception for a `code` below zero that the engine gave."""
        reason = REASONS[-code]
        if reason == "busy":
            return RuntimeError("two threads used one engine at once: it serves one at a time")
        if reason == "no memory":
            return MemoryError("no memory is left for the messages of a group")
        pair, notices, label = (c_int * 2)(), (Notice(), Notice()), Label()
        self.functions.howdah_tell(self.handle, self.site.encode(errors="replace"))
        self.functions.howdah_explain(self.handle, pair, *map(byref, notices), byref(label))
        by, about = pair
        if reason == "disagree":
            return Disagreement(
                f"rank {by} called {self._said(by, notices[0])}, "
                f"but rank {about} {self._said(about, notices[1])}"
            )
        if reason == "mismatch":
            sent = words(label.kind, label.dtype, 0, 0, label.count)
            return Disagreement(
                f"rank {by} waits for another message{self._place(by)} than rank {about}'s "
                f"{sent}; this rank called {self.call} at {self.site}"
            )
        lost = f"rank {by} was interrupted"
        if reason == "gave up":
            lost = f"rank {by} gave up; what it says tells why"
        elif reason != "interrupted":
            process = self.processes[about]
            lost = f"rank {about} (process {process}) {WHAT_HAPPENED[reason]}, as rank {by} saw"
        return PeerLost(f"{lost}; this rank called {self.call} at {self.site}")

    def _said(self, rank: int, notice: Notice) -> str:
        call = words(notice.kind, notice.dtype, notice.op, notice.root, notice.count)
        return f"#{notice.sequence} {call}{self._place(rank)}"

    def _place(self, rank: int) -> str:
        """Where a rank made its call, if it tells within a moment."""
        until = time.monotonic() + PATIENCE
        while (told := self.functions.howdah_told(self.handle, rank)) is None:
            if time.monotonic() > until:
                return ""
            time.sleep(0.001)
        return f" at {told.decode()}"
