"""How fast is the wire of the parameter server, and what do its rules and its order gain?

    python bench/server/run.py           results.md, results.json
    python bench/server/run.py --tiny    small and short; writes nothing
    python bench/server/run.py --only wire    one part (wire, rules, orders, links); writes nothing

README.md says what is done. For the wire, the server is a process of its own, the worker this one.
Orders and links are measured in a cluster in a box, which needs root; without, the results say so.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import ends
import links
import orders
import peers
import plotted
import quiet
import slowed
import torch
from machine import machine

from howdah.base.errors import UserError
from howdah.plan.method import Sync
from howdah.server.addresses import address_of, bound

HERE = Path(__file__).resolve().parent
SYNC = Sync("bsp", workers=1)
ELEMENTS = {"8 B": 2, "1 MB": 1 << 18, "16 MB": 1 << 22, "64 MB": 1 << 24}
ROUNDS = 3
DIGITS = {"steps_per_s": 1, "loss": 3, "seconds_to_loss": 1, "stale": 2}
PARTS = ("wire", "rules", "orders", "links")
Rows = dict[str, dict[str, dict[str, Any]]]


def serve(pipe: Connection, elements: int) -> None:
    """A server of one unit, until the pipe is closed."""
    with bound() as listener:  # as the servers of a run on one machine
        listener.listen()
        host = ends.server(listener, [elements], SYNC)
        pipe.send(address_of(listener))
        while not pipe.poll():
            host.look(0.01)
        host.close()


def timed(elements: int, times: int) -> list[float]:
    """Seconds of each push and pull of one unit, after the first: a gradient goes, and the weights
    that contain it come.
    """
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve, args=(theirs, elements))
    server.start()
    client, found = ends.worker([ours.recv()], [elements]), []
    client.trades = True  # as runs under bsp do: a push asks for the weights that follow from it
    for clock in range(times + 1):
        client.clock, began = clock, perf_counter()
        client.push("unit0")
        client.clock = clock + 1
        client.pull("unit0")[0].result()
        client.drain()
        found.append(perf_counter() - began)
    client.close()
    ours.send("end")
    server.join()
    return found[1:]


def wire(*, tiny: bool) -> dict[str, dict[str, float]]:
    """Seconds of a push and a pull, by size and by who carries them: the median of rounds, in each
    of which all take their turn.
    """
    found = {}
    carriers = {"howdah": lambda *given: median(timed(*given)), **peers.PEERS}
    for name, elements in ({"8 B": 2, "1 MB": 1 << 18} if tiny else ELEMENTS).items():
        times = 3 if tiny else max(10, min(300, (1 << 25) // elements))
        rounds = [
            {who: trip(elements, times) for who, trip in carriers.items()}
            for _ in range(1 if tiny else ROUNDS)
        ]
        found[name] = {who: median(one[who] for one in rounds) for who in carriers}
        print(f"{name:>6s}  " + "  ".join(f"{w} {s * 1e6:,.0f} us" for w, s in found[name].items()))
    return found


def shown(name: str, value: float) -> str:
    """A number of the rules' table; a loss that was not reached took no seconds."""
    never = name == "seconds_to_loss" and not value
    return "not reached" if never else f"{value:.{DIGITS[name]}f}"


def text_of(rows: Rows) -> str:
    """The results as tables."""
    wires = rows["wire"]
    names = list(next(iter(wires.values())))
    lines = [f"| push and pull of | {' | '.join(f'{n}: µs, GB/s both ways' for n in names)} |"]
    lines += ["|---" * (1 + len(names)) + "|"]
    for size, by in wires.items():
        cells = [f"{by[n] * 1e6:,.0f}, {8 * ELEMENTS[size] / by[n] / 1e9:.2f}" for n in names]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    lines += [
        "",
        f"One of {slowed.WORKERS} workers takes {slowed.SLOWED} times as long; medians of",
    ]
    lines += [f"{len(slowed.SEEDS)} seeds, least to most. Under bsp a step of all workers is one"]
    lines += [f"update, and {slowed.WORKERS} under the others, so it has as many more steps:", ""]
    lines += [
        "| rule | steps/s of all | loss then | seconds to loss | staleness |",
        "|---" * 5 + "|",
    ]
    for rule, one in rows["rules"].items():
        cells = (
            f"{shown(name, one[name])} ({shown(name, min(every))} to {shown(name, max(every))})"
            for name in DIGITS
            for every in [[each[name] for each in one["seeds"]]]
        )
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    lines += ["", "![loss over time](rules.svg)", ""]
    if not rows["orders"]:
        return "\n".join([*lines, "No cluster in a box here: links are not measured."])
    by_order = rows["orders"]["seconds"]
    gain = by_order["fifo"] / by_order["priority"] - 1
    said = ", ".join(f"{kind} {seconds:.3f} s" for kind, seconds in by_order.items())
    lines.append(f"A step on a link of 100 Mbit/s: {said}; priority is {gain:.0%} faster.")
    return "\n".join([*lines, "", *_links_text(rows["links"])])


def _links_text(found: dict[str, dict[str, float]]) -> list[str]:
    """The lines of what pushes and pulls reach of their links."""
    lines = [
        f"Steps of {links.SIZE >> 20} MiB on links of 100 Mbit/s, how much of two bounds they "
        "reach, and how much bare sockets do that carry the same bytes between as many processes:",
        "",
        "| | seconds | of servers alone | of OSDI'20 | bare sockets, of OSDI'20 |",
        "|---" * 5 + "|",
    ]
    for name, row in found.items():
        shares = [row.get(of, 0.0) / row["seconds"] for of in ("alone", "osdi20")]
        shares.append(row["osdi20"] / row["bare"] if row.get("bare") else 0.0)
        cells = " | ".join(f"{share:.1%}" if share else "" for share in shares)
        lines.append(f"| {name} | {row['seconds']:.3f} | {cells} |")
    return lines


def on_links(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is measured in a cluster in a box; nothing where there is none."""
    try:
        return measure()
    except UserError as error:
        print(error)
        return {}


def main(*words: str) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small, short, writes nothing")
    parser.add_argument("--only", choices=PARTS, help="one part, writes nothing")
    quiet.add_option(parser)
    options = parser.parse_args(words)
    tiny, writes = options.tiny, not (options.tiny or options.only)
    torch.set_num_threads(1)
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "wire": lambda: wire(tiny=tiny),
        "rules": lambda: slowed.measured(6, [1]) if tiny else slowed.measured(80),
        "orders": lambda: on_links(lambda: {"seconds": orders.measured(1 if tiny else 8)}),
        "links": lambda: on_links(lambda: links.measured(1 if tiny else 3, few=tiny)),
    }
    watch, rows = quiet.Watch(writes=writes, loaded=options.loaded), Rows()
    for part in [options.only] if options.only else PARTS:
        rows[part] = measures[part]()
        print(part, rows[part])
    looks = watch.end()
    if not writes:
        return 0
    text = f"{machine()}\n\n{quiet.sentence(looks)}\n\n{text_of(rows)}\n"
    curves = {rule: one["curve"] for rule, one in rows["rules"].items()}
    title = f"Loss over time: one of {slowed.WORKERS} workers takes {slowed.SLOWED} times as long"
    drawn = plotted.loss_over_time(curves, title, "means of five steps")
    (HERE / "rules.svg").write_text(drawn, "utf-8")
    (HERE / "results.md").write_text(text)
    (HERE / "results.json").write_text(json.dumps({"noise": looks, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
