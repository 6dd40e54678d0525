"""Two hosts, a cable, and what becomes of a run when the cable is slow or gone, or a rank stands.

The hosts are those of bench/cluster, whose ranks share nothing but the run folder. torchrun starts
a rank on each.

    slow     the link is shaped to 10 Mbit/s after the third step: the run goes on, with equal bits
    cut      the link is taken down after the third step: both sides say so within half a minute
    stopped  a rank is stopped (SIGSTOP) after the third step, while its kernel goes on answering:
             the other host says so within half a minute, and it when it is continued
    killed   rank 1 is killed: up to a second after the ranks have met, after the third step, or
             while a checkpoint is written. The other host says so within half a minute; both are
             started again, and end with equal bits. (A rank that dies before it has met the others
             is waited for, as one that was not started yet.)

Needs root, and the tools of bench/cluster.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

from family import LIMIT, Family, started
from small import checksums, environment, undisturbed, write_recipe

sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))
from box import CARD, SECRET, Box
from profiles import PROFILES

PORT = 29611
LAYOUTS = ("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2 sp", "pp2 x4")
KILLS = ("killed before a step", "killed after a step", "killed in a save")
TROUBLES = ("slow", "cut", "stopped", *KILLS)
TOLD_WITHIN = 30.0
TOLD = r"^howdah: rank {} .*(lost|link|heard of)"
MET = "talk without encryption"  # what rank 0 says when all have met
STEPS = 40


def on(box: Box, host: int, recipe: Path, run: Path, words: list[str]) -> list[str]:
    """The command line of one host."""
    agent = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={host}"]
    agent += ["--master-addr=host0", f"--master-port={PORT}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *agent]
    return box.words(host, [*torchrun, "-m", "howdah", "train", recipe, f"folder={run}", *words])


def strike(box: Box, what: str, process: int) -> None:
    """Makes the cable slow, cuts it, or stops or kills a process."""
    if what == "cut":
        box.ip(1, f"link set {CARD} down")
    elif what != "slow":
        os.kill(process, signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
    else:
        for host in (0, 1):
            shaped = "rate 10mbit burst 128kb latency 400ms"  # a packet of 64 KiB passes
            box.tc(host, f"qdisc replace dev {CARD} root tbf {shaped}")


def reached(what: str, run: Path, first: Family, draw: Random) -> bool:
    """Waits for the moment at which a fault comes; whether it came."""
    if what == "killed before a step":
        met = waited(lambda: MET in first.err.read_text(errors="replace"))
        time.sleep(draw.uniform(0, 1))
        return met
    begun = first.wait_for("\nstep:  3")  # ranks take each step together
    return begun and (
        what != "killed in a save" or waited(lambda: any(run.glob("checkpoints/step-*.tmp")))
    )


def waited(met: Callable[[], object]) -> bool:
    """Whether something is so in time."""
    until = time.monotonic() + LIMIT
    while not met():
        if time.monotonic() > until:
            return False
        time.sleep(0.0005)
    return True


def process_of(run: Path, rank: int) -> int:
    """The process of a rank, which torchrun started; 0: there is none."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes()
            given = (path / "environ").read_bytes().split(b"\0")
            trains = f"folder={run}".encode() in words and b"torch.distributed.run" not in words
            if trains and f"RANK={rank}".encode() in given:
                return int(path.name)
    return 0


def is_told(said: str, what: str, host: int) -> bool:
    """Whether a host says who is lost: rank 1, which is struck; of its cable or while it stands,
    rank 1 is told of rank 0.
    """
    other = "1" if host == 0 else "0" if what == "cut" else "[01]"
    return bool(re.search(TOLD.format(other), said, re.MULTILINE))


def one(folder: Path, recipe: Path, layout: str, what: str, draw: Random) -> dict[str, Any]:
    """One run on two hosts that are struck, or their cable."""
    run, words = folder / "run", [f"layout={layout}", f"train.steps={STEPS}"]
    given = {**environment(folder), "TORCH_CPP_LOG_LEVEL": "ERROR", "HOWDAH_SECRET_FILE": SECRET}
    with Box(PROFILES["flat-10g"], 2) as box, ExitStack() as stack:
        lines = [on(box, host, recipe, run, words) for host in (0, 1)]
        sides = [
            stack.enter_context(started(line, folder / str(host), environment=given))
            for host, line in enumerate(lines)
        ]
        begun = reached(what, run, sides[0], draw)
        if begun and (struck := process_of(run, 1)):
            strike(box, what, struck)
        began = time.monotonic()
        told, ends = [-1.0, -1.0], [-1.0, -1.0]
        while time.monotonic() - began < 3 * LIMIT and min(ends) < 0:
            for host, side in enumerate(sides):
                said = side.err.read_text(errors="replace")
                if told[host] < 0 and is_told(said, what, host):
                    told[host] = time.monotonic() - began
                if ends[host] < 0 and side.process.poll() is not None:
                    ends[host] = time.monotonic() - began
                    if begun and (what, host) == ("stopped", 0):
                        os.kill(process_of(run, 1), signal.SIGCONT)
            time.sleep(0.05)
        whole = [side.err.read_text(errors="replace") for side in sides]
        late = [
            ends[host] if is_told(text, what, host) else -1.0 for host, text in enumerate(whole)
        ]
        told = [max(pair) if min(pair) < 0 else pair[0] for pair in zip(told, late, strict=True)]
        said = [text[:1000] for text in whole]
        aborted = any("terminate called" in text for text in whole)
        codes = [side.process.poll() for side in sides]
        again = go_on(stack, lines, folder, given) if what in KILLS else codes
    row: dict[str, Any] = {"kind": "host", "layout": layout, "what": what, "begun": begun}
    row |= {"told": told, "ended": ends, "codes": codes, "said": said, "aborted": aborted}
    if what in ("slow", *KILLS):
        wanted = undisturbed(recipe, folder / "ref", words, STEPS)
        row["equal"] = again == [0, 0] and checksums(run, STEPS) == wanted
    return row | {"survived": survived(row)}


def go_on(
    stack: ExitStack, lines: Sequence[list[str]], folder: Path, given: dict[str, str]
) -> list[int | None]:
    """Starts both hosts again; their exit codes."""
    sides = [
        stack.enter_context(started(line, folder / f"again{host}", environment=given))
        for host, line in enumerate(lines)
    ]
    for side in sides:
        side.end(LIMIT)
    return [side.process.poll() for side in sides]


def survived(row: Mapping[str, Any]) -> bool:
    """Whether a row is as it must be: the fault came when the ranks were training; under a slow
    cable they ended with the same bits; of all else both hosts told in a sentence, in time, and
    ended with exit code 1. A rank that was stopped is continued when the first host has ended; one
    that was killed tells nothing, and the run that goes on must end with the same bits.
    """
    if not row["begun"] or row["aborted"]:
        return False
    if row["what"] == "slow":
        return row["codes"] == [0, 0] and bool(row["equal"])
    since = [0.0, row["ended"][0] if row["what"] == "stopped" else 0.0]
    took = [end - start for end, start in zip(row["ended"], since, strict=True)]
    in_time = min(row["ended"]) >= 0 and max(took) <= TOLD_WITHIN
    told = row["told"][:1] if row["what"] in KILLS else row["told"]
    went_on = row["what"] not in KILLS or bool(row["equal"])
    return in_time and min(told) >= 0 and row["codes"] == [1, 1] and went_on


def hosts(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each layout and kind of trouble."""
    recipe, draw = write_recipe(folder), Random(1)
    for number, layout in enumerate(LAYOUTS):
        for what in TROUBLES:
            yield one(folder / f"host{number}{what}", recipe, layout, what, draw)


if __name__ == "__main__":
    for row in hosts(Path(sys.argv[1])):
        print(row, flush=True)
