"""How fast is the wire of the parameter server, on one host?

    python bench/server/run.py           results.md, results.json
    python bench/server/run.py --tiny    small and short; writes nothing

README.md says what is done. The server is a process of its own, the worker this one.
"""

import argparse
import json
import multiprocessing
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet
import torch
from machine import machine

from howdah.comm.handshake import Door
from howdah.parallel.flat_params import FlatUnit
from howdah.plan.flat_buffers import Buffer
from howdah.plan.method import Method, Optimizer, Sync
from howdah.server.chunks import chunks_of
from howdah.server.client import Client, Way
from howdah.server.clocks import Clocks
from howdah.server.desk import Desk
from howdah.server.host import Host
from howdah.server.shard import Shard

HERE = Path(__file__).resolve().parent
SECRET, HELLO = bytes(32), {"bench": "server"}
ELEMENTS = {"8 B": 2, "1 MB": 1 << 18, "16 MB": 1 << 22, "64 MB": 1 << 24}


def buffer_of(elements: int) -> Buffer:
    """A unit of one range."""
    return Buffer("unit", (), elements, elements)


def serve(pipe: Connection, elements: int) -> None:
    """A server of one unit, until the pipe is closed."""
    torch.set_num_threads(1)
    method = Method(optimizer=Optimizer("sgd", momentum=0.0), sync=Sync("asp"), grad_clip=0.0)
    (chunks,) = chunks_of([buffer_of(elements)], 1, element_bytes=4)
    shard = Shard(chunks, [torch.zeros(c.length) for c in chunks], method, lambda clock: 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = Door(listener, SECRET, json.dumps(HELLO).encode())
        host = Host(Desk(Clocks(Sync("asp"), len(chunks)), shard), door, HELLO, dtype=torch.float32)
        pipe.send(listener.getsockname())
        while not pipe.poll():
            host.look(0.01)
        host.close()


def timed(elements: int, times: int) -> list[float]:
    """Seconds of each pull and push of one unit, after the first."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve, args=(theirs, elements))
    server.start()
    address = ours.recv()
    weights, none = torch.zeros(elements), torch.empty(0)
    unit = FlatUnit(buffer_of(elements), 0, weights, none, torch.ones(elements), none)
    chunks = chunks_of([unit.buffer], 1, element_bytes=4)
    client = Client(Way([address], SECRET, HELLO), 0, chunks, {"unit": unit})
    client.join()
    found = []
    for clock in range(times + 1):
        client.clock, client.tokens, began = clock, 1.0, perf_counter()
        client.pull("unit")[0].result()
        client.push("unit")
        client.drain()
        found.append(perf_counter() - began)
    client.close()
    ours.send("end")
    server.join()
    return found[1:]


def main(*words: str) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small, short, writes nothing")
    quiet.add_option(parser)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    watch = quiet.Watch(writes=not options.tiny, loaded=options.loaded)
    sizes = {"8 B": 2, "1 MB": 1 << 18} if options.tiny else ELEMENTS
    rows = {}
    for name, elements in sizes.items():
        seconds = median(timed(elements, 3 if options.tiny else max(20, 1000 // elements)))
        rows[name] = {"seconds": seconds, "gb_per_s": 8 * elements / seconds / 1e9}
        print(f"{name:>6s}  {seconds * 1e6:10,.0f} us  {rows[name]['gb_per_s']:.2f} GB/s")
    looks = watch.end()
    if options.tiny:
        return 0
    table = [f"| {n} | {r['seconds'] * 1e6:,.0f} | {r['gb_per_s']:.2f} |" for n, r in rows.items()]
    head = "| pull and push of | µs | GB/s, both ways together |\n|---|---|---|\n"
    text = f"{machine()}\n\n{quiet.sentence(looks)}\n\n{head}" + "\n".join(table) + "\n"
    (HERE / "results.md").write_text(text)
    (HERE / "results.json").write_text(json.dumps({"noise": looks, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
