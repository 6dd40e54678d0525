"""Two hosts, a cable, and what becomes of a run when the cable is slow or gone, or a rank stands.

The hosts are those of bench/cluster, whose ranks share nothing but the run folder. torchrun starts
a rank on each.

    slow     the link is shaped to 10 Mbit/s after the third step: the run goes on, with equal bits
    cut      the link is taken down after the third step: both sides say so within half a minute
    stopped  a rank is stopped (SIGSTOP) after the third step, while its kernel goes on answering:
             the other host says so within half a minute, and it when it is continued

Needs root, and the tools of bench/cluster.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from family import LIMIT, started
from small import checksums, environment, undisturbed, write_recipe

sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))
from box import CARD, SECRET, Box
from profiles import PROFILES

PORT = 29611
LAYOUTS = ("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2 sp", "pp2 x4")
TROUBLES = ("slow", "cut", "stopped")
TOLD_WITHIN = 30.0
TOLD = re.compile(r"^howdah: rank \d+ .*(lost|link|heard of)", re.MULTILINE)
STEPS = 40


def on(box: Box, host: int, recipe: Path, run: Path, words: list[str]) -> list[str]:
    """The command line of one host."""
    agent = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={host}"]
    agent += ["--master-addr=host0", f"--master-port={PORT}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *agent]
    return box.words(host, [*torchrun, "-m", "howdah", "train", recipe, f"folder={run}", *words])


def strike(box: Box, what: str, run: Path) -> None:
    """Makes the cable slow, cuts it, or stops rank 1."""
    if what == "cut":
        box.ip(1, f"link set {CARD} down")
    elif what == "stopped":
        os.kill(process_of(run, 1), signal.SIGSTOP)
    else:
        for host in (0, 1):
            shaped = "rate 10mbit burst 128kb latency 400ms"  # a packet of 64 KiB passes
            box.tc(host, f"qdisc replace dev {CARD} root tbf {shaped}")


def process_of(run: Path, rank: int) -> int:
    """The process of a rank, which torchrun started."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes()
            given = (path / "environ").read_bytes().split(b"\0")
            trains = f"folder={run}".encode() in words and b"torch.distributed.run" not in words
            if trains and f"RANK={rank}".encode() in given:
                return int(path.name)
    raise SystemExit(f"rank {rank} of {run} is not there")


def one(folder: Path, recipe: Path, layout: str, what: str) -> dict[str, Any]:
    """One run on two hosts whose cable is struck."""
    run, words = folder / "run", [f"layout={layout}", f"train.steps={STEPS}"]
    given = {**environment(folder), "TORCH_CPP_LOG_LEVEL": "ERROR", "HOWDAH_SECRET_FILE": SECRET}
    with Box(PROFILES["flat-10g"], 2) as box, ExitStack() as stack:
        lines = [on(box, host, recipe, run, words) for host in (0, 1)]
        sides = [
            stack.enter_context(started(line, folder / str(host), environment=given))
            for host, line in enumerate(lines)
        ]
        begun = sides[0].wait_for("\nstep:  3")  # ranks take each step together
        if begun:
            strike(box, what, run)
        began = time.monotonic()
        told, ends = [-1.0, -1.0], [-1.0, -1.0]
        while time.monotonic() - began < 3 * LIMIT and min(ends) < 0:
            for host, side in enumerate(sides):
                said = side.err.read_text(errors="replace")
                if told[host] < 0 and TOLD.search(said):
                    told[host] = time.monotonic() - began
                if ends[host] < 0 and side.process.poll() is not None:
                    ends[host] = time.monotonic() - began
                    if begun and (what, host) == ("stopped", 0):
                        os.kill(process_of(run, 1), signal.SIGCONT)
            time.sleep(0.05)
        whole = [side.err.read_text(errors="replace") for side in sides]
        late = [end if TOLD.search(text) else -1.0 for end, text in zip(ends, whole, strict=True)]
        told = [max(pair) if min(pair) < 0 else pair[0] for pair in zip(told, late, strict=True)]
        said = [text[:1000] for text in whole]
        aborted = any("terminate called" in text for text in whole)
        codes = [side.process.poll() for side in sides]
    row: dict[str, Any] = {"kind": "host", "layout": layout, "what": what, "begun": begun}
    row |= {"told": told, "ended": ends, "codes": codes, "said": said, "aborted": aborted}
    if what == "slow":
        wanted = undisturbed(recipe, folder / "ref", words, STEPS)
        row["equal"] = codes == [0, 0] and checksums(run, STEPS) == wanted
    return row | {"survived": survived(row)}


def survived(row: Mapping[str, Any]) -> bool:
    """Whether a row is as it must be: the fault came when the ranks were training; under a slow
    cable they ended with the same bits; of all else both hosts told in a sentence, in time, and
    ended with exit code 1. A rank that was stopped is continued when the first host has ended.
    """
    if not row["begun"] or row["aborted"]:
        return False
    if row["what"] == "slow":
        return row["codes"] == [0, 0] and bool(row["equal"])
    since = [0.0, row["ended"][0] if row["what"] == "stopped" else 0.0]
    took = [end - start for end, start in zip(row["ended"], since, strict=True)]
    in_time = min(row["ended"]) >= 0 and max(took) <= TOLD_WITHIN
    return in_time and min(row["told"]) >= 0 and row["codes"] == [1, 1]


def hosts(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each layout and kind of trouble."""
    recipe = write_recipe(folder)
    for number, layout in enumerate(LAYOUTS):
        for what in TROUBLES:
            yield one(folder / f"host{number}{what}", recipe, layout, what)


if __name__ == "__main__":
    for row in hosts(Path(sys.argv[1])):
        print(row, flush=True)
