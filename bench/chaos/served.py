"""Kills of workers and servers of an asynchronous run, at moments that nobody chose.

    python bench/chaos/served.py --write               three runs of ten minutes of kills each, and
                                                       as many steps in peace; served.json
    python bench/chaos/served.py --write --seed 2    one of them, beside what was written
    python bench/chaos/served.py --minutes 1 --runs 1  shorter; without --write nothing is written
    python bench/chaos/served.py --tiny                a few kills in 100 steps

A run goes in legs: each goes on from the checkpoint of the one before it, with more steps. In a leg
workers are killed (-9) every few seconds and, once all are at work, one server: with `replicas = 1`
one may die, and those that live have all that was acknowledged. The next leg has all servers again.
Nobody is struck before all workers have pushed something, as the ledgers say: a place whose worker
is killed five times without a step between ends a run, as it should.
When the time is over, as many steps are trained by a run that is left alone. What must be:

    lost      0: every update of every worker, step and chunk is in the ledgers
    twice     0: none of them was applied again
    loss      held out, the mean of all runs: within two hundredths of that of those left alone
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from fcntl import LOCK_EX, flock
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from family import LIMIT, Family, started
from small import environment, left, train, write_recipe

from howdah.server.ledger import read_ledger, twice

HERE = Path(__file__).parent
WORKERS, SERVERS = 3, 3
LEG = 500  # steps of each worker
PAUSE = (1.0, 4.0)  # seconds between kills
WITHIN = 0.02
Row = dict[str, Any]
Pause = tuple[float, float]


def words_of(steps: int, seed: int) -> list[str]:
    """The changes to the recipe for a run until `steps`."""
    sync = f'{{kind = "asp", workers = {WORKERS}, replicas = 1}}'
    return [
        *(f"layout=server{SERVERS}", "method.grad_clip=0.0", f"method.sync={sync}"),
        *("batch.global_batch=4", "method.lr.peak=1e-3", "method.lr.schedule=constant"),
        *("train.log_every=10", "train.save_every=0", "train.evaluate_samples=0"),
        *(f"train.steps={steps}", f"seed={seed}"),
    ]


class Leg:
    """A leg that is under way.

    killed  how many workers, and how many servers
    """

    def __init__(self, family: Family, ledgers: Path, start: int, draw: random.Random) -> None:
        self.family, self.killed, self._draw = family, [0, 0], draw
        self._ledgers, self._names = ledgers, f"server-*-from-{start}*"

    def strike(self) -> None:
        """Kills a worker, or the one server that may die; nobody before all are at work."""
        there = sorted(self.family.ranks(), key=began)
        servers = SERVERS - self.killed[1]
        if len(there) <= servers or self._at_work() < WORKERS + self.killed[0]:
            return
        whom = int(self.killed[1] == 0 and self._draw.random() < 1 / 3)
        victim = self._draw.choice(there[:servers] if whom else there[servers:])
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            self.killed[whom] += 1

    def _at_work(self) -> int:
        """How many processes of workers have pushed something so far."""
        found: set[tuple[str, str]] = set()
        for path in self._ledgers.glob(self._names):
            with suppress(OSError):
                found.update(re.findall(r"^push (\d+) (\d+) ", path.read_text(), re.MULTILINE))
        return len(found)


def began(pid: int) -> float:
    """When a process was started, in seconds since the machine was: servers come before workers."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return float("inf")
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def one_leg(
    folder: Path, between: tuple[int, int], seed: int, draw: random.Random | None, pause: Pause
) -> tuple[list[int], list[str]]:
    """Trains from the first to the second of two steps; how many workers and servers were killed,
    and what was left behind. Without `draw` nobody is.
    """
    recipe, run, before = write_recipe(folder), folder / "run", set(os.listdir("/dev/shm"))
    command = train(recipe, run, *words_of(between[1], seed))
    with started(command, folder, environment=environment(folder)) as family:
        leg = Leg(family, run / "ledgers", between[0], draw or random.Random())
        while draw and family.process.poll() is None:
            time.sleep(draw.uniform(*pause))
            leg.strike()
        ended = family.end(10 * LIMIT)
        if ended < 0 or family.process.poll():
            raise RuntimeError(f"a leg failed: {family.said()[-3000:]}{family.err.read_text()}")
        return leg.killed, left(folder, run, family, before)


def held_out(run: Path) -> float:
    """The held-out loss at the end of the last leg."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return float([row["loss"] for row in rows if row["kind"] == "held_out_all"][-1])


def audit(run: Path, ends: list[int]) -> tuple[int, int, int]:
    """From the ledgers of legs that ended at these steps: updates applied, lost, applied twice."""
    applied = lost = again = 0
    for start, end in zip([0, *ends], ends, strict=False):
        for shard in range(SERVERS):
            events = read_ledger(run / "ledgers" / f"server-{shard}-from-{start}")
            pushes = [event.update for event in events if event.kind == "push"]
            keys = range(max(update.key for update in pushes) + 1)
            found = {(update.worker, update.clock, update.key) for update in pushes}
            wanted = {
                (worker, clock, key)
                for worker in range(WORKERS)
                for clock in range(start, end)
                for key in keys
            }
            applied, lost = applied + len(pushes), lost + len(wanted - found)
            again += len(twice(events))
    return applied, lost, again


def one_run(folder: Path, seed: int, *, seconds: float, steps: int, pause: Pause) -> Row:
    """A run whose members are killed for so long, and one of as many steps that is left alone.

    steps  of each worker in a leg
    """
    draw, ends, killed, rubbish = random.Random(seed), list[int](), [0, 0], list[str]()
    until = time.monotonic() + seconds
    while not ends or time.monotonic() < until:
        ends.append(len(ends) * steps + steps)
        struck, rest = one_leg(folder / "struck", (ends[-1] - steps, ends[-1]), seed, draw, pause)
        killed = [one + more for one, more in zip(killed, struck, strict=True)]
        rubbish += rest
        print(f"seed {seed}: step {ends[-1]}, killed {killed}", flush=True)
    one_leg(folder / "alone", (0, ends[-1]), seed, None, pause)
    applied, lost, again = audit(folder / "struck" / "run", ends)
    return {
        "kind": "served",
        "seed": seed,
        "steps": ends[-1],
        "legs": len(ends),
        "workers": killed[0],
        "servers": killed[1],
        "applied": applied,
        "lost": lost,
        "twice": again,
        "left": rubbish,
        "loss": held_out(folder / "struck" / "run"),
        "alone": held_out(folder / "alone" / "run"),
    }


def verdict(rows: list[Row]) -> Row:
    """What came of all runs together."""
    loss, alone = (mean(row[name] for row in rows) for name in ("loss", "alone"))
    sound = all(not (row["lost"] or row["twice"] or row["left"]) for row in rows)
    apart = loss / alone - 1
    return {"kind": "all", "apart": apart, "survived": sound and abs(apart) <= WITHIN}


def write(rows: list[Row], *, beside: bool) -> Row:
    """Writes served.json; the verdict of all that is in it.

    beside  what other calls have written stays, but for runs of the same seeds
    """
    with (HERE / "served.json").open("a+") as file:
        flock(file, LOCK_EX)
        file.seek(0)
        before = json.loads(file.read() or "[]") if beside else []
        seeds = {row["seed"] for row in rows}
        kept = [row for row in before if row["kind"] == "served" and row["seed"] not in seeds]
        every = sorted([*kept, *rows], key=lambda row: row["seed"])
        file.truncate(0)
        file.write(json.dumps([*every, came := verdict(every)], indent=1) + "\n")
    return came


def main() -> None:
    """Runs, prints and writes."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--tiny", action="store_true", help="one short run")
    words.add_argument("--minutes", type=float, default=10.0, help="of kills in each run")
    words.add_argument("--runs", type=int, default=3)
    words.add_argument("--seed", type=int, default=0, help="one run, beside those in served.json")
    words.add_argument("--write", action="store_true", help="served.json, after each run")
    given = words.parse_args()
    how: Row = {"seconds": 60 * given.minutes, "steps": LEG, "pause": PAUSE}
    if given.tiny:
        given.runs, how = 1, {"seconds": 0.0, "steps": 100, "pause": (1.0, 2.0)}
    rows = list[Row]()
    for seed in [given.seed] if given.seed else range(1, given.runs + 1):
        with tempfile.TemporaryDirectory(prefix="served-", dir="/var/tmp") as folder:
            rows.append(one_run(Path(folder), seed, **how))
        print(json.dumps(rows[-1]), flush=True)
        came = write(rows, beside=bool(given.seed)) if given.write else verdict(rows)
    print(json.dumps(came), flush=True)
    sys.exit(0 if came["survived"] or given.tiny else 1)


if __name__ == "__main__":
    main()
