"""Streams of a GPU that is the CPU: copies between device and host are late, as they may be.

    copy_(…, non_blocking=True)     the target is poison; the source is looked at later
    synchronize() of an event       the copies before it are made, from what the source is by then

What is computed is there at once. So who reads a target early, or changes a source early, computes
other bits than without these streams. A copy on a stream that was not told to wait for an event of
the thread that computes is refused.
"""

from contextlib import ExitStack, contextmanager
from threading import get_ident
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from howdah.host import scratch
from howdah.parallel import home_lanes, homes

PIECE = 4096  # bytes of a room, and of a block of the disk: small models have several


class LateEvent:
    def record(self, stream):
        self.stream, self.thread, self.at = stream, get_ident(), stream.given

    def synchronize(self):
        self.stream.run(self.at)


class LateStream:
    """given: copies so far; made: how many of them were made; ordered: behind what was computed"""

    def __init__(self):
        self.given, self.made, self.ordered, self._copies = 0, 0, False, []

    def wait_event(self, event):
        assert event.thread != get_ident(), "an event of the lane itself orders nothing"
        self.ordered = True

    def synchronize(self):
        self.run(self.given)

    def copy(self, target, source):
        assert self.ordered, "a copy that is not behind what was computed"
        target.view(-1).view(torch.uint8).fill_(0xFF)  # NaN
        self._copies.append((target, source))
        self.given += 1

    def run(self, until):
        while self.made < until:
            target, source = self._copies.pop(0)
            target.copy_(source)
            self.made += 1


class Late(TorchDispatchMode):
    """Inside, copies that do not wait go to the stream."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and (args[2:] == (True,) or kwargs):
            self.stream.copy(*args[:2])
            return args[0]
        return func(*args, **(kwargs or {}))


class LateStreams:
    """As many streams as are asked for; copies: how many were made on all of them."""

    def __init__(self):
        self.streams = []

    @property
    def copies(self):
        return sum(stream.made for stream in self.streams)

    def current(self):
        return LateStream()

    def new(self):
        self.streams.append(LateStream())
        return self.streams[-1]

    @contextmanager
    def inside(self, stream):
        stream.ordered = False
        with Late(stream):
            yield

    def event(self):
        return LateEvent()


@contextmanager
def late_moves():
    """Inside, homes are those of a GPU. Yields its streams, and the addresses that are locked."""
    streams, locked = LateStreams(), set()
    replaced = [
        (homes, "streams_of", lambda device: streams),
        (homes, "SMALL", PIECE),
        (home_lanes, "ROOM", PIECE),
        (home_lanes, "register", lambda memory: locked.add(memory.data_ptr())),
        (home_lanes, "unregister", locked.remove),
        (scratch, "BLOCK", PIECE),
    ]
    with ExitStack() as stack:
        for where, name, new in replaced:
            stack.enter_context(patch.object(where, name, new))
        yield streams, locked
