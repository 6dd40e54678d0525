"""How soon is a lost rank, host or link told to the others, between hosts?

    python bench/faults/hosts.py           every fault; hosts.md, hosts.json; some eight minutes
    python bench/faults/hosts.py --tiny    one kill; writes nothing
    python bench/faults/hosts.py --only killed   faults whose name holds this; writes nothing

Needs root: hosts are those of ../cluster, with cards of 1 Gbit/s; two ranks on each of two hosts,
or one on each of four, which all-reduce without an end. README.md says what must hold.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))

import quiet
from box import Box
from looping import Ranks, files_on
from machine import machine
from profiles import profile_named

from howdah.base.errors import UserError

HERE = Path(__file__).resolve().parent
PROFILE = "flat-1g"
NEAR = "hierarchical pieces=2"  # ranks of a host wait for each other in shared memory, too
SHAPES = {  # hosts, ranks of each, and the algorithm
    f"2 x 2, {NEAR}": (2, 2, NEAR),
    "4 x 1": (4, 1, ""),
    "2 x 2": (2, 2, ""),
}
SIZES = (1 << 10, 1 << 22)  # elements of an all-reduce
ELAPSE = (0.1, 1.0)  # seconds from the first call to the fault
SHORT = 2.0  # seconds of a cut or a stop that is survived


@dataclass(frozen=True)
class Fault:
    """What happens to a rank's process, its host, or the cable of that.

    goal   seconds within which the others are told; 0: nobody is, and all go on
    times  how often, on each shape
    words  what they are told about the lost rank
    """

    name: str
    goal: float
    times: int
    words: str = ""


ENDED = r"(\(process \d+\) )?(ended|died|left|does not answer|gave up|has not been heard of)"
# by the pulse, by a neighbour on its host, or by its peers' limits
STOPPED = r"(has not been heard of|does not answer|was silent|\(process \d+\) is stopped)"
FAULTS = (
    Fault("a process is killed", 0.1, 20, ENDED),
    Fault("a host is gone, its network with it", 30.0, 2, ENDED),
    Fault("a process is stopped", 30.0, 2, STOPPED),
    Fault("a cable is cut", 30.0, 2, ENDED),
    Fault("a cable is cut in one direction", 30.0, 2, ENDED),
    Fault("a process is killed while its cable is out", 30.0, 2, ENDED),
    Fault(f"a cable is cut for {SHORT:g} s", 0.0, 2),
    Fault(f"a process is stopped for {SHORT:g} s", 0.0, 2),
)


def strike(box: Box, name: str, host: int, process: int) -> None:
    """Does what the name of a fault says, to a host or to a process."""
    if name.endswith("its cable is out"):  # others keep their ends of connections that are gone
        box.unplug(host)
        os.kill(process, signal.SIGKILL)
        sleep(SHORT)
        box.plug(host)
    elif process:
        os.kill(process, signal.SIGKILL if "killed" in name else signal.SIGSTOP)
    elif name.startswith("a host"):
        box.end(host)
    elif "direction" in name:
        box.mute(host)
    else:
        box.unplug(host)


def mend(box: Box, host: int, process: int) -> None:
    """Takes it back."""
    if process:
        os.kill(process, signal.SIGCONT)
    else:
        box.plug(host)


def play(fault: Fault, shape: str, draw: random.Random) -> dict[str, Any]:
    """One fault: seconds until each survivor was told, and what was wrong."""
    hosts, each, algorithm = SHAPES[shape]
    victim = draw.randrange(each, hosts * each)  # the first host has the ranks' store
    elements = draw.choice(SIZES)
    with ExitStack() as stack, Box(profile_named(PROFILE, hosts), hosts) as box:
        before = files_on(box, range(hosts))
        ranks = Ranks(box, stack, each=each, elements=elements, words=algorithm)
        sleep(draw.uniform(*ELAPSE))
        process = 0 if fault.name.startswith(("a host", "a cable")) else ranks.process(victim)
        began = monotonic()
        strike(box, fault.name, victim // each, process)
        if not fault.goal:
            sleep(SHORT)
            mend(box, victim // each, process)
            ranks.finish()
            ranks.ended(range(hosts * each))
            return {"times": [], "wrong": [*left_behind(fault, shape, box, before)]}
        beside = {*range(victim // each * each, (victim // each + 1) * each)}  # of its host
        lost = {victim} if process else beside
        heard = {rank: ranks.heard(rank) for rank in range(hosts * each) if rank not in lost}
        times = [at - began for at, _ in heard.values()]
        ranks.ended(heard)
        if fault.name.startswith("a host"):
            del before[victim // each]
        named = beside if "cable" in fault.name else lost
        wrong = [*complaints(fault, shape, named, heard)]
        return {"times": times, "wrong": [*wrong, *left_behind(fault, shape, box, before)]}


def left_behind(fault: Fault, shape: str, box: Box, before: dict[int, set[str]]) -> Iterator[str]:
    """Yields what the ranks, which have ended, have left on hosts."""
    for host, files in files_on(box, before).items():
        if left := sorted(files - before[host]):
            yield f"{fault.name}, {shape}: host{host} has {', '.join(left)}"


def complaints(
    fault: Fault, shape: str, lost: set[int], heard: dict[int, tuple[float, str]]
) -> Iterator[str]:
    """Yields what a survivor was told wrongly."""
    names = "|".join(map(str, sorted(lost)))
    for rank, (_, said) in heard.items():
        if not re.search(rf"^lost .*rank ({names}) {fault.words}", said):
            yield f"{fault.name}, {shape}: rank {rank} was told: {said}"


def rows(only: str, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """What is found of every fault on every shape."""
    for fault in FAULTS[:1] if tiny else [one for one in FAULTS if only in one.name]:
        for shape in [*SHAPES][-1:] if tiny else SHAPES:
            draw = random.Random(f"{fault.name} {shape}")
            found = [play(fault, shape, draw) for _ in range(1 if tiny else fault.times)]
            times = sorted(time for one in found for time in one["times"])
            row = {**asdict(fault), "times": len(found), "shape": shape}
            row |= {"survivors": len(times), "wrong": [w for one in found for w in one["wrong"]]}
            row |= {"median": median(times), "worst": times[-1]} if times else {}
            print(row, file=sys.stderr, flush=True)
            yield row


HEAD = """# Faults between hosts: results

Written by `hosts.py`; README.md says what must hold. Seconds from the fault to the error in a
survivor. {about}

| fault | hosts x ranks | faults | survivors | median | worst | goal | |
|---|---|---|---|---|---|---|---|
"""


RIGHT = "Every survivor was told of the right rank or host, ended, and left no file on its host."


def is_met(row: dict[str, Any]) -> bool:
    """Whether all survivors were told in time."""
    return not row["goal"] or bool(row["worst"] <= row["goal"])


def line(row: dict[str, Any]) -> str:
    """A line of the table."""
    found = ["", "", "goes on", "met"]
    if row["goal"]:
        met = is_met(row)
        found = [f"{row['median']:.3f}", f"{row['worst']:.3f}", f"{row['goal']:g}"]
        found.append("met" if met else "**missed**")
    cells = [row["name"], row["shape"], row["times"], row["survivors"], *found]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="one kill; writes nothing")
    parser.add_argument("--only", default="", help="faults whose name holds this; writes nothing")
    quiet.add_option(parser)
    words = parser.parse_args()
    try:
        watch = quiet.Watch(writes=not (words.tiny or words.only), loaded=words.loaded)
        found = [*rows(words.only, tiny=words.tiny)]
    except UserError as problem:
        print(f"hosts: {problem}", file=sys.stderr)
        return 2
    wrong = [sentence for row in found for sentence in row["wrong"]]
    noise = watch.end()
    text = HEAD.format(about=f"{machine()} {quiet.sentence(noise)}") + "\n".join(map(line, found))
    rest = [*map("- {}".format, wrong)] or [RIGHT]
    print(text := "\n".join([text, "", *rest, ""]))
    if watch.writes:
        kept = {"machine": machine(), "noise": noise, "rows": found}
        (HERE / "hosts.md").write_text(text, "utf-8")
        (HERE / "hosts.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    missed = not (words.tiny or all(map(is_met, found)))  # one kill shows that it runs
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
