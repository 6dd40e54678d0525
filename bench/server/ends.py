"""A server and a worker of some units, as the benchmarks here use them: no model, no computing."""

import json
import socket
from collections.abc import Sequence

import torch

from howdah.comm.handshake import Door
from howdah.parallel.flat_params import FlatUnit
from howdah.plan.comm import Comm
from howdah.plan.flat_buffers import Buffer
from howdah.plan.method import Method, Optimizer, Sync
from howdah.plan.worker_ranks import whole
from howdah.server.addresses import Address
from howdah.server.chunks import chunks_of
from howdah.server.client import Client
from howdah.server.clocks import Clocks
from howdah.server.desk import Desk
from howdah.server.host import Host
from howdah.server.shard import Shard
from howdah.server.way import Way

SECRET, HELLO = bytes(32), {"bench": "server"}
WINDOW, CHUNK = Comm().push_window, Comm().push_chunk


def buffers(sizes: Sequence[int]) -> list[Buffer]:
    """Units of so many elements."""
    return [Buffer(f"unit{n}", (), size, size) for n, size in enumerate(sizes)]


def server(
    listener: socket.socket,
    sizes: Sequence[int],
    sync: Sync,
    *,
    of: tuple[int, Sequence[int]] = (0, (1,)),
    chunk: int = CHUNK,
    fifo: bool = False,
) -> Host:
    """A server, whose optimizer is SGD without momentum: one pass.

    of  its number, and how much each server keeps, beside the others
    """
    torch.set_num_threads(1)
    method = Method(optimizer=Optimizer("sgd", momentum=0.0), sync=sync, grad_clip=0.0)
    number, shares = of
    chunks = chunks_of([*map(whole, buffers(sizes))], shares, element_bytes=4, most=chunk)[number]
    shard = Shard(chunks, [torch.zeros(c.length) for c in chunks], method, lambda clock: 0.0)
    desk = Desk(Clocks(sync, len(chunks)), shard, fifo=fifo)
    return Host(
        desk, Door(listener, SECRET, json.dumps(HELLO).encode()), HELLO, dtype=torch.float32
    )


def worker(  # noqa: PLR0913 (facts that have nothing in common)
    addresses: Sequence[Address],
    sizes: Sequence[int],
    *,
    place: int = 0,
    shares: Sequence[int] = (),
    chunk: int = CHUNK,
    window: int = WINDOW,
    fifo: bool = False,
) -> Client:
    """A worker that has joined, with gradients of ones."""
    none = torch.empty(0)
    units = {
        one.unit: FlatUnit(one, 0, torch.zeros(one.length), none, torch.ones(one.length), none)
        for one in buffers(sizes)
    }
    ranges, shares = [*map(whole, buffers(sizes))], shares or (1,) * len(addresses)
    chunks = chunks_of(ranges, shares, element_bytes=4, most=chunk)
    way = Way(addresses, SECRET, HELLO, fifo=fifo, window=window)
    client = Client(way, place, chunks, units)
    client.join(max)  # all servers are new
    client.tokens = 1.0
    return client
