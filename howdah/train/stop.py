"""Stop requests: SIGTERM and Ctrl-C ask, and the step's scalars carry the question to all.

A rank that is asked says so in the next step's token count, so that all ranks stop after the
same step, save, and leave. A second signal changes nothing: the save is under way.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class StopRequest:
    """Which signal has asked this process to stop; 0 for none."""

    signal: int = 0


@contextmanager
def listen() -> Iterator[StopRequest]:
    """Turns stop signals into a request while the block runs. For the main thread."""
    request = StopRequest()

    def ask(number: int, _: FrameType | None) -> None:
        request.signal = number

    before = {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
