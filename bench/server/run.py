"""How fast is the wire of the parameter server, and what do its rules and its order gain?

    python bench/server/run.py           results.md, results.json
    python bench/server/run.py --tiny    small and short; writes nothing

README.md says what is done. For the wire, the server is a process of its own, the worker this one.
Orders are measured in a cluster in a box, which needs root; without, the results say so.
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

import orders
import peers
import quiet
import slowed
import torch
from machine import machine

from howdah.base.errors import UserError
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
    (chunks,) = chunks_of([whole(buffer_of(elements))], 1, element_bytes=4)
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
    chunks = chunks_of([whole(unit.buffer)], 1, element_bytes=4)
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


def wire(*, tiny: bool) -> dict[str, dict[str, float]]:
    """Seconds of a pull and a push, by size and by who carries them."""
    found = {}
    for name, elements in ({"8 B": 2, "1 MB": 1 << 18} if tiny else ELEMENTS).items():
        times = 3 if tiny else max(20, 1000 // elements)
        found[name] = {"howdah": median(timed(elements, times))}
        found[name] |= {peer: trip(elements, times) for peer, trip in peers.PEERS.items()}
        print(f"{name:>6s}  " + "  ".join(f"{w} {s * 1e6:,.0f} us" for w, s in found[name].items()))
    return found


def text_of(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """The results as tables."""
    wires, rules, kinds = rows["wire"], rows["rules"], rows["orders"]
    names = list(next(iter(wires.values())))
    lines = [f"| pull and push of | {' | '.join(f'{n}: µs, GB/s both ways' for n in names)} |"]
    lines += ["|---" * (1 + len(names)) + "|"]
    for size, by in wires.items():
        cells = [f"{by[n] * 1e6:,.0f}, {8 * ELEMENTS[size] / by[n] / 1e9:.2f}" for n in names]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    lines += ["", f"One of {slowed.WORKERS} workers takes {slowed.SLOWED} times as long:", ""]
    lines += [
        "| rule | steps/s of all | loss then | seconds to loss | staleness |",
        "|---" * 5 + "|",
    ]
    for rule, one in rules.items():
        lines.append(
            f"| {rule} | {one['steps_per_s']:.1f} | {one['loss']:.3f} | "
            f"{one['seconds_to_loss']:.1f} | {one['stale']:.2f} |"
        )
    lines.append("")
    if by_order := kinds.get("seconds"):
        gain = by_order["fifo"] / by_order["priority"] - 1
        said = ", ".join(f"{kind} {seconds:.3f} s" for kind, seconds in by_order.items())
        lines.append(f"A step on a link of 100 Mbit/s: {said}; priority is {gain:.0%} faster.")
    else:
        lines.append("No cluster in a box here: priority and FIFO are not compared.")
    return "\n".join(lines)


def main(*words: str) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small, short, writes nothing")
    quiet.add_option(parser)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    watch = quiet.Watch(writes=not options.tiny, loaded=options.loaded)
    rows: dict[str, dict[str, dict[str, float]]] = {"wire": wire(tiny=options.tiny)}
    rows["rules"] = slowed.measured(6 if options.tiny else 80)
    print(rows["rules"])
    try:
        rows["orders"] = {"seconds": orders.measured(1 if options.tiny else 8)}
    except UserError as error:
        print(error)
        rows["orders"] = {}
    print(rows["orders"])
    looks, tables = watch.end(), text_of(rows)
    if options.tiny:
        return 0
    text = f"{machine()}\n\n{quiet.sentence(looks)}\n\n{tables}\n"
    (HERE / "results.md").write_text(text)
    (HERE / "results.json").write_text(json.dumps({"noise": looks, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
