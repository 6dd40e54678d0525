"""Priority beside FIFO, on a link that is the bound: one worker and one server, each on a host of a
cluster in a box.

    step    forward: waits for the weights of each unit in turn, and computes
            backward: computes the units from the last on, and pushes each

The first unit is large, as an embedding is. Under FIFO its gradient, which comes last, waits behind
all others, and the next forward pass waits for it: nothing of that pass is hidden. The link takes
2.8 s for the bytes of a step, computing 1.9 s, of which the forward pass is a third. Computing is a
pause.

Runs on one host of the box:  orders.py serve ADDRESS   or   orders.py work ADDRESS fifo|priority
"""

import json
import socket
import sys
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter, sleep

import torch

from howdah.comm.handshake import Door
from howdah.parallel.flat_params import FlatUnit
from howdah.plan.flat_buffers import Buffer
from howdah.plan.method import Method, Optimizer, Sync
from howdah.plan.worker_ranks import whole
from howdah.server.chunks import chunks_of
from howdah.server.client import Client, Way
from howdah.server.clocks import Clocks
from howdah.server.desk import Desk
from howdah.server.host import Host
from howdah.server.shard import Shard

SECRET, HELLO, PORT = bytes(32), {"bench": "orders"}, 29500
SYNC = Sync("bsp", workers=1)
MEBI = 1 << 18  # elements of 4 bytes
SIZES = [8 * MEBI, *[3 * MEBI] * 8]  # the embedding and eight blocks: 32 MiB in all
PAUSE = 0.07  # seconds of a unit's forward pass; its backward pass takes two
WINDOW = 1 << 20
KINDS = ("fifo", "priority")


def buffers() -> list[Buffer]:
    """The units."""
    return [Buffer(f"unit{n}", (), size, size) for n, size in enumerate(SIZES)]


def serve(address: str, *, fifo: bool, end: Event) -> None:
    """A server, until `end` is set."""
    torch.set_num_threads(1)
    method = Method(optimizer=Optimizer("sgd", momentum=0.0), sync=SYNC, grad_clip=0.0)
    (chunks,) = chunks_of([*map(whole, buffers())], 1, element_bytes=4, most=1 << 18)
    shard = Shard(chunks, [torch.zeros(c.length) for c in chunks], method, lambda clock: 0.0)
    with socket.create_server((address, PORT + fifo)) as listener:
        door = Door(listener, SECRET, json.dumps(HELLO).encode())
        desk = Desk(Clocks(SYNC, len(chunks)), shard, fifo=fifo)
        host = Host(desk, door, HELLO, dtype=torch.float32)
        while not end.is_set():
            host.look(0.01)
        host.close()


def work(address: str, *, fifo: bool, steps: int) -> list[float]:
    """A worker; seconds of each step after the first two."""
    none = torch.empty(0)
    units = {
        one.unit: FlatUnit(one, 0, torch.zeros(one.length), none, torch.ones(one.length), none)
        for one in buffers()
    }
    chunks = chunks_of([*map(whole, buffers())], 1, element_bytes=4, most=1 << 18)
    way = Way([(address, PORT + fifo)], SECRET, HELLO, fifo=fifo, window=WINDOW)
    client, found = Client(way, 0, chunks, units), []
    client.join()
    for clock in range(steps + 2):
        began = perf_counter()
        client.clock, client.tokens = clock, 1.0
        pulls = [(unit, client.pull(unit)) for unit in units]
        for _, (handle,) in pulls:
            handle.result()
            sleep(PAUSE)
        for unit in reversed(units):
            sleep(2 * PAUSE)
            client.push(unit)
        found.append(perf_counter() - began)
    client.drain()
    client.close()
    return found[2:]


def measured(steps: int, rate: str = "edge-100m") -> dict[str, float]:
    """Seconds of a step, by kind, on a link of the box. Raises UserError where there is none."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))
    from box import Box
    from profiles import profile_named

    me = str(Path(__file__).resolve())
    with Box(profile_named(rate, 2), 2) as box:
        server = box.start(0, [sys.executable, me, "serve", "10.77.0.1"])
        try:
            said = {
                kind: json.loads(box.run(1, [sys.executable, me, "work", "10.77.0.1", kind, steps]))
                for kind in KINDS
            }
        finally:
            server.kill()
            server.wait()
    return {kind: median(seconds) for kind, seconds in said.items()}


if __name__ == "__main__":
    role, address, *rest = sys.argv[1:]
    if role == "serve":
        over = Event()
        for wanted in (False, True):
            arguments = {"fifo": wanted, "end": over}
            Thread(target=serve, args=(address,), kwargs=arguments).start()
    else:
        seconds = work(address, fifo=rest[0] == "fifo", steps=int(rest[1]))
        print(json.dumps(seconds))
