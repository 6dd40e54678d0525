"""Guests of a server's host: connected workers, which have shown that they know the secret.

A hello says which place and rank a worker asks for, and what it runs; a guest has a seat once it
has joined. What is posted to it and not yet sent has a bound: a worker that asks for more than it
reads is not read either, until it does.
"""

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from threading import Thread
from time import sleep
from typing import NamedTuple

from torch import Tensor

from howdah.comm.frames import FrameError, Frames
from howdah.server.messages import REFUSED
from howdah.server.outbox import Outbox

LOOK = 0.01  # seconds between looks at what is to be sent to a worker
TOLD = 1 << 12  # bytes of a sentence


class Hello(NamedTuple):
    """What a worker asks for.

    process  its number among those that were started, as it says
    problem  why it is refused; empty: it is not
    """

    place: int
    rank: int
    process: int
    problem: str = ""


def read_hello(said: bytes, mine: Mapping[str, object], ranks: int) -> Hello:
    """A worker's hello.

    mine   what both must have in common
    ranks  of each worker
    """
    nobody = Hello(-1, 0, 0, "the hello is none of a worker")
    try:
        theirs = json.loads(said)
        place, rank, process = theirs.pop("place"), theirs.get("rank", 0), theirs.get("process", 0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return nobody
    if any(type(one) is not int for one in (place, rank, process)):
        return nobody
    problem = "" if 0 <= rank < ranks else f"rank {rank} is none of a worker's {ranks}"
    for name, value in mine.items():
        if theirs.get(name) != value:
            problem = f"the worker's {name} is {theirs.get(name)}, and the server's {value}"
            break
    return Hello(place, rank, process, problem)


class Guest:
    """A connected worker.

    seat         that it asked for in its hello
    process      its number among those that were started
    incarnation  once it has joined
    landing      where the payload of its latest push landed
    last         what it is told before its connection is ended
    held         how many letters to it are kept back until replicas have what led to them
    sender       the thread that sends to it
    """

    def __init__(self, frames: Frames, hello: Hello, *, fifo: bool) -> None:
        self.frames, self.place, self.rank = frames, hello.place, hello.rank
        self.seat, self.process = (hello.place, hello.rank), hello.process
        self.incarnation = self.held = 0
        self.outbox = Outbox(window=1 << 62, fifo=fifo)  # it asked for all that it gets
        self.landing: Tensor | None = None
        self.last = ""
        carry = partial(self.outbox.carry, frames, lambda: self.last)
        self.sender = Thread(target=carry, daemon=True, name=f"to worker {self.place}")

    def wait_for_room(self, most: int) -> None:
        """Waits until fewer than so many letters to it are still to be sent, or none will be."""
        while self.held + self.outbox.waiting >= most and not self.outbox.closed:
            sleep(LOOK)

    def turn_away(self, why: str) -> None:
        """Tells it why it is refused, and ends its connection when it has read that."""
        with suppress(FrameError, OSError):
            self.frames.send(REFUSED, why.encode(errors="replace")[:TOLD])
            self.frames.sock.shutdown(socket.SHUT_WR)
            self.frames.receive()
        self.frames.close()
