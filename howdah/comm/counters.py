"""What was sent: calls, bytes and seconds, by axis, operation and class of link.

Bytes are counted where a transport is told to send, so nothing can be sent uncounted. The
simulator predicts the same table from the plan, and a test compares the two.
"""

from collections import Counter
from dataclasses import dataclass, field

from howdah.sim.traffic import Traffic


@dataclass
class Counters:
    """The running table of one process. Only the thread that communicates adds to it."""

    calls: Counter[Traffic] = field(default_factory=Counter)
    bytes: Counter[Traffic] = field(default_factory=Counter)
    seconds: Counter[Traffic] = field(default_factory=Counter)

    def add(self, traffic: Traffic, *, bytes: int, seconds: float) -> None:
        """One finished call."""
        self.calls[traffic] += 1
        self.bytes[traffic] += bytes
        self.seconds[traffic] += seconds  # type: ignore[assignment]

    def sent(self) -> dict[Traffic, int]:
        """Bytes sent so far by this process."""
        return {traffic: count for traffic, count in self.bytes.items() if count}
