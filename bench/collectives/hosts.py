"""Times of every algorithm between hosts, beside its price and gloo's own collectives.

    python bench/collectives/hosts.py                   every cell; writes hosts.md and hosts.json
    python bench/collectives/hosts.py --minutes 9       ends after so many; the next call goes on
    python bench/collectives/hosts.py --grid selector   the selector's cells, to selector.md, .json:
                                                        what was measured of them, from a round on
    python bench/collectives/hosts.py --grid selector --page      judges what was measured before
                                                        by today's selector; measures nothing
    python bench/collectives/hosts.py --tiny            a few small ones; writes nothing
    python bench/collectives/hosts.py --only "flat-1g 4x1 broadcast"     writes nothing

The hosts are those of ../cluster, each with processes and a network of its own. What is measured is
kept in build/collectives, cell by cell; --anew forgets it. README.md says what is compared.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))

import quiet
from box import Box
from host_cases import BLOCKS, DEFAULT, GRIDS, ROUND, Cell
from host_prices import Row, cluster_for, priced, program_for, sizes_of
from host_tables import CARDS, report, verdicts, wrong_here
from machine import machine
from profiles import profile_named

from howdah.base.errors import UserError
from howdah.collectives.counts import leaving
from howdah.sim.selector import Shape

HERE = Path(__file__).resolve().parent
PORT = 29730
BLOCK, MOST_CALLS = 0.05, 50  # seconds, and calls, of a block
SLOW = 0.25  # seconds of a call beside which a bucket of 2 ms is nothing: no call goes before it
FEW, FEW_SLOW = 3.0, 2.0  # times the best price: what is above is left out of the selector's cells
CROSSING, SMALL = 1 << 20, 1 << 14  # bytes: of an all-reduce, and of what comes beside it
STORE = HERE.parents[1] / "build" / "collectives"


class Ranks:
    """Ranks of howdah on the hosts of a box, which do what they are told.

    dealt  rank r is on host r mod hosts; else the ranks fill one host after the other
    """

    def __init__(self, box: Box, shape: Shape, wire: str, *, dealt: bool = False) -> None:
        self.box, world = box, shape.hosts * shape.each
        self._runs = []
        for rank in range(world):
            host, local = divmod(rank, shape.each)
            if dealt:
                local, host = divmod(rank, shape.hosts)
            facts = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local}
            facts |= {"LOCAL_WORLD_SIZE": shape.each, "MASTER_ADDR": "host0", "MASTER_PORT": PORT}
            facts |= {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "eth0"}
            facts |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            env = {name: str(value) for name, value in facts.items()}
            command = [sys.executable, HERE / "host_ranks.py", wire]
            self._runs.append(box.start(host, command, env, text=True, **pipes))

    def tell(self, do: str, **words: Any) -> Any:
        """What rank 0 answers."""
        for run in self._runs:
            run.stdin.write(json.dumps({"do": do, **words}) + "\n")
            run.stdin.flush()
        answer = self._runs[0].stdout.readline()
        if not answer:
            raise UserError("the ranks of the box have failed; their own words are above")
        return json.loads(answer)

    def close(self) -> None:
        for run in self._runs:
            with suppress(OSError):
                run.stdin.close()
        for run in self._runs:
            run.wait(60)


def measured(cell: Cell, ranks: Ranks, probe: str) -> Row:
    """A row of the store: five blocks of each contestant in turn, and bytes that cards sent."""
    row: Row = {**asdict(cell), "shape": str(cell.shape), "key": cell.key, "probe": probe}
    texts = [*cell.texts]
    if cell.grid == "selector":
        cluster = cluster_for(row)
        prices = {text: priced(row, text, cluster)[0] for text in texts}
        least = min(prices.values())
        most = least * (FEW_SLOW if least > SLOW else FEW)
        texts = [text for text in texts if prices[text] <= most]
    ranks.tell("cell", op=cell.op, size=cell.bytes, texts=texts)
    rows: Row = {}
    for text in texts:
        before = [ranks.box.sent(host) for host in range(cell.shape.hosts)]
        wrong = ranks.tell("check", text=text)
        sent = [ranks.box.sent(h) - was for h, was in enumerate(before)]
        rows[text] = {"sent": sent, "wrong": wrong, "blocks": []}
    took = {text: ranks.tell("block", text=text, calls=1, first=False) for text in texts}
    calls = {text: max(1, min(MOST_CALLS, int(BLOCK / took[text]))) for text in texts}
    for turn in range(BLOCKS):
        at = turn % len(texts)
        for text in texts[at:] + texts[:at]:
            first = took[text] < SLOW
            seconds = ranks.tell("block", text=text, calls=calls[text], first=first)
            rows[text]["blocks"].append(seconds)
    for one in rows.values():
        one["seconds"] = median(one["blocks"])
    return {**row, "contestants": rows}


def probed(ranks: Ranks, store: Path, cell: Cell) -> str:
    """What the links of a place were found to be. For the selector that of its first visit, with
    corrections: a run reads what `howdah doctor --hosts --measure` has kept.
    """
    if cell.grid != "selector":
        return str(ranks.tell("measure"))
    kept = store / f"tuned {cell.profile} {cell.shape}.json"
    if not kept.is_file():
        began = monotonic()
        store.mkdir(parents=True, exist_ok=True)
        kept.write_text(ranks.tell("tune"), "utf-8")
        print(f"{kept.stem}: {monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return kept.read_text("utf-8")


def require_crossing(ranks: Ranks, shape: Shape) -> None:
    """Before anything is timed: an all-reduce leaves each host by its card, as often as its program
    says. Raises UserError.
    """
    row: Row = {"op": "all_reduce", "bytes": CROSSING, "shape": str(shape)}
    program = program_for(row, DEFAULT)
    assert program is not None
    left = leaving(program, sizes_of(row, program), lambda rank: rank // shape.each)
    ranks.tell("cell", op=row["op"], size=CROSSING, texts=[DEFAULT])
    before = [ranks.box.sent(host) for host in range(shape.hosts)]
    if wrong := ranks.tell("check", text=DEFAULT):
        raise UserError(f"an all-reduce on {shape} ranks has {wrong} wrong elements")
    for host, was in enumerate(before):
        sent, wanted = ranks.box.sent(host) - was, left[host]
        if not CARDS[0] * wanted <= sent <= CARDS[1] * wanted + SMALL:
            raise UserError(
                f"host{host}'s card sent {sent:,} bytes of an all-reduce, not {wanted:,}"
            )


def take(cells: Sequence[Cell], wire: str, store: Path, minutes: float) -> Iterator[Row]:
    """Measures the cells that the store lacks, in their order, until the minutes are over. Those of
    one place that follow each other have the same processes.
    """
    until = monotonic() + 60 * minutes
    for (name, shape), group in groupby(cells, key=place):
        left = [cell for cell in group if not (store / f"{cell.key}.json").is_file()]
        if not left or monotonic() > until:
            continue
        profile = profile_named(name, shape.hosts)
        with Box(profile, shape.hosts) as box:
            ranks = Ranks(box, shape, wire)
            try:
                require_crossing(ranks, shape)
                probe = probed(ranks, store, left[0])
                for cell in left:
                    if monotonic() > until:
                        break
                    began = monotonic()
                    row = {**measured(cell, ranks, probe), "wire": wire}
                    store.mkdir(parents=True, exist_ok=True)
                    (store / f"{cell.key}.json").write_text(json.dumps(row), "utf-8")
                    took = monotonic() - began
                    print(f"{cell.key}: {took:.1f} s", file=sys.stderr, flush=True)
                    yield row
            finally:
                ranks.close()


def place(cell: Cell) -> tuple[str, Shape]:
    return cell.profile, cell.shape


def page(name: str, grid: str) -> int:
    """Writes a page again from its measured cells."""
    kept = json.loads((HERE / f"{name}.json").read_text("utf-8"))
    told = verdicts(kept["cells"], of=len([*GRIDS[grid]()]))
    text = report(f"{kept['machine']} {quiet.sentence(kept['noise'])}", kept["cells"], told)
    (HERE / f"{name}.md").write_text(text + "\n", "utf-8")
    (HERE / f"{name}.json").write_text(json.dumps(kept | {"goals": told}, indent=1) + "\n", "utf-8")
    print(text)
    return 0


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--grid", choices=GRIDS, default="link", help="link has the sweep with it")
    words.add_argument("--wire", choices=("tcp", "gloo"), default="tcp", help="of howdah")
    words.add_argument("--only", default="", help="cells whose name holds this; writes nothing")
    words.add_argument("--tiny", action="store_true", help="a few small cells; writes nothing")
    words.add_argument("--minutes", type=float, default=25.0)
    words.add_argument("--anew", action="store_true", help="forget what is kept of earlier calls")
    words.add_argument("--page", action="store_true", help="writes the page again, and no times")
    quiet.add_option(words)
    asked = words.parse_args()
    if asked.page:
        return page("selector" if asked.grid == "selector" else "hosts", asked.grid)
    grids = ["tiny"] if asked.tiny else ["link", "sweep"] if asked.grid == "link" else [asked.grid]
    cells = [cell for grid in grids for cell in GRIDS[grid]() if asked.only in cell.key]
    selects = asked.grid == "selector"
    if not selects:
        cells.sort(key=place)
    store, alone = STORE / asked.wire, asked.tiny or asked.only
    for cell in cells if asked.anew or asked.tiny else ():
        for name in (cell.key, f"tuned {cell.profile} {cell.shape}"):
            (store / f"{name}.json").unlink(missing_ok=True)
    try:
        watch = quiet.Watch(writes=not alone, loaded=asked.loaded)
        for _ in take(cells, asked.wire, store, asked.minutes):
            pass
    except UserError as problem:
        print(f"collectives: {problem}", file=sys.stderr)
        return 2
    noise = watch.end()
    files = [store / f"{cell.key}.json" for cell in cells]
    rows = [json.loads(file.read_text("utf-8")) for file in files if file.is_file()]
    told = verdicts(rows, of=len(cells))
    text = report(f"{machine()} {quiet.sentence(noise)}", rows, told)
    print(text)
    if spoilt := [row["key"] for row in rows if wrong_here(row)]:
        print(f"wrong elements, so nothing is written: {', '.join(spoilt)}", file=sys.stderr)
        return 1
    if missing := len(cells) - len(rows):
        print(f"{missing} of {len(cells)} cells are still to be measured", file=sys.stderr)
    if watch.writes and (not missing or (selects and len(rows) >= ROUND)):
        name = "selector" if selects else "hosts"
        kept = {"machine": machine(), "noise": noise, "goals": told, "cells": rows}
        (HERE / f"{name}.md").write_text(text + "\n", "utf-8")
        (HERE / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
