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

import ends

from howdah.plan.method import Sync

PORT = 29500
SYNC = Sync("bsp", workers=1)
MEBI = 1 << 18  # elements of 4 bytes
SIZES = [8 * MEBI, *[3 * MEBI] * 8]  # the embedding and eight blocks: 32 MiB in all
PAUSE = 0.07  # seconds of a unit's forward pass; its backward pass takes two
WINDOW, CHUNK = 1 << 20, 1 << 18
KINDS = ("fifo", "priority")


def serve(address: str, *, fifo: bool, end: Event) -> None:
    """A server, until `end` is set."""
    with socket.create_server((address, PORT + fifo)) as listener:
        host = ends.server(listener, SIZES, SYNC, chunk=CHUNK, fifo=fifo)
        while not end.is_set():
            host.look(0.01)
        host.close()


def work(address: str, *, fifo: bool, steps: int) -> list[float]:
    """A worker; seconds of each step after the first two."""
    there = [(address, PORT + fifo)]
    client, found = ends.worker(there, SIZES, chunk=CHUNK, window=WINDOW, fifo=fifo), []
    units = [one.unit for one in ends.buffers(SIZES)]
    for clock in range(steps + 2):
        began = perf_counter()
        client.clock, client.trades = clock, clock < steps + 1  # as a run does under bsp
        pulls = [client.pull(unit)[0] for unit in units]
        for handle in pulls:
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
