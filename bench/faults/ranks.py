"""A rank of the fault benchmark: it all-reduces until another rank is lost, and tells when.

What a rank says to the script, through its pipe, in order:

    ("ready", the number of the arena it maps)
    the rounds it has made, whenever it is asked
    Ending                                          when its call failed
"""

from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist

from howdah.comm.engine import connect_engine
from howdah.comm.meeting import meet, own_hello
from howdah.comm.transport import PeerLost, Transport

HOST = "127.0.0.1"

ASKED_EVERY = 16  # rounds between two looks into the pipe
STOPPED_FOR = 0.5  # seconds after which a stopped rank is given up, and a stop that is not:
SHORT_STOP = 0.2
SILENT_FOR = 20.0  # seconds: no rank is silent that long here but by a fault of howdah's


@dataclass(frozen=True)
class Case:
    """One fault: `how` (kill or stop) to rank `victim` of `size`, `delay` seconds into the loop."""

    transport: str
    how: str
    size: int
    victim: int
    delay: float
    bytes: int

    def __str__(self) -> str:
        return (
            f"{self.transport}, {self.how} rank {self.victim} of {self.size}, "
            f"{self.bytes} B, after {1000 * self.delay:.1f} ms"
        )


@dataclass(frozen=True)
class Ending:
    """The error's kind and sentence, when it was raised (CLOCK_MONOTONIC), rounds until then."""

    kind: str
    said: str
    at: float
    rounds: int
    right: bool  # all sums that were returned


def serve(case: Case, rank: int, port: int, name: str, pipe: Connection) -> None:
    """All-reduces until it fails. The mean of ones is one again, so nothing is in between."""
    torch.set_num_threads(1)
    store = dist.PrefixStore(name, dist.TCPStore(HOST, port, is_master=False))
    transport = _connect(case, store, rank)
    pipe.send(("ready", _arena()))
    x = torch.ones(case.bytes // 4)
    rounds = 0
    try:
        while True:
            transport.all_reduce(x, "mean")
            rounds += 1
            if rounds % ASKED_EVERY == 0 and pipe.poll():
                pipe.recv()
                pipe.send(rounds)
    except Exception as error:
        at = monotonic()
        kind = "PeerLost" if isinstance(error, PeerLost) else type(error).__name__
        pipe.send(Ending(kind, str(error), at, rounds, bool((x == 1).all())))
    transport.close()


def _connect(case: Case, store: dist.Store, rank: int) -> Transport:
    words = meet(store, own_hello(), rank=rank, size=case.size, seconds=SILENT_FOR)
    return connect_engine(
        store,
        [word.process for word in words],
        rank=rank,
        arena_bytes=1 << 24,
        deadline=SILENT_FOR,
        stopped_for=STOPPED_FOR,
    )


def _arena() -> str:
    """The inode of the arena that this process maps, which no other arena has."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return next(line.split()[4] for line in lines if "memfd:howdah" in line)
