"""How soon is a lost rank noticed, and is anything left behind?

    python bench/faults/run.py           100 faults of the engine; results.md, results.json
    python bench/faults/run.py --tiny    12 faults, writes nothing

README.md says what is done. The noise of the machine is measured first (../quiet.py). The script
fails if a survivor is told of another rank than the lost one, if a short stop is not survived, if a
sum is wrong, or if anything is left behind.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet
import torch.distributed as dist
from left import listing
from machine import machine
from ranks import SHORT_STOP, Case, Ending, serve

HOST = "127.0.0.1"


HERE = Path(__file__).resolve().parent
ANSWER = 30.0  # seconds for a rank to say anything at all
ROWS = (("engine", "kill", 50), ("engine", "stop", 50))
ALL_WELL = """
Every survivor was told of the right rank, every short stop was survived, every sum was right, and
nothing was left behind."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def draw(transport: str, how: str, count: int, seed: int) -> list[Case]:
    """Faults at random moments: sizes evenly over the powers of two from 8 B to 4 MB."""
    pick, cases = random.Random(f"{seed} {transport} {how}"), []
    for _ in range(count):
        size = pick.choice([2, 3, 4])
        bytes = 1 << pick.randint(3, 22)
        delay = pick.uniform(0, 0.03)
        cases.append(Case(transport, how, size, pick.randrange(size), delay, bytes))
    return cases


class Stage:
    """Starts the ranks of one case after the other; knows all that were ever started."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "ranks"])
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._cases = 0
        self.pids, self.arenas = set[int](), set[str]()

    def listing(self) -> set[str]:
        return listing(self.pids, self.arenas)

    def play(self, case: Case) -> tuple[list[float], list[str]]:
        """Seconds until each survivor was told, and what was wrong."""
        self._cases += 1
        processes, pipes = [], []
        for rank in range(case.size):
            ours, theirs = self._context.Pipe()
            arguments = (case, rank, self._store.port, f"case{self._cases}", theirs)
            process = self._context.Process(target=serve, args=arguments)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        self.pids |= {process.pid for process in processes if process.pid is not None}
        try:
            self.arenas |= {_hear(pipe)[1] for pipe in pipes}
            return _strike(case, processes, pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _strike(
    case: Case, processes: Sequence[ForkServerProcess], pipes: Sequence[Connection]
) -> tuple[list[float], list[str]]:
    victim, wrong = processes[case.victim].pid, []
    assert victim is not None
    if case.how == "stop":
        wait(pipes, timeout=case.delay)
        wrong += _stop_for_a_moment(victim, pipes)
    if not wrong and wait(pipes, timeout=case.delay):
        wrong.append("a rank ended before the fault")
    began = monotonic()
    os.kill(victim, SIGNALS[case.how])
    times = []
    for rank, pipe in enumerate(pipes):
        if rank == case.victim:
            continue
        ending = _hear(pipe)
        times.append(ending.at - began)
        wrong += _complaints(case, rank, ending)
    return times, [f"{case}: {sentence}" for sentence in wrong]


def _stop_for_a_moment(victim: int, pipes: Sequence[Connection]) -> list[str]:
    """Stops a rank for less than the deadline; all must make further rounds after it."""
    os.kill(victim, signal.SIGSTOP)
    ended = wait(pipes, timeout=SHORT_STOP)
    os.kill(victim, signal.SIGCONT)
    if ended:
        return [f"a stop of {SHORT_STOP} s was not survived"]
    for pipe in pipes:
        pipe.send("how far?")
    answers = [_hear(pipe) for pipe in pipes]
    failed = [answer.said for answer in answers if isinstance(answer, Ending)]
    return [f"a stop of {SHORT_STOP} s was not survived: {said}" for said in failed]


def _complaints(case: Case, rank: int, ending: Ending) -> list[str]:
    wrong = []
    named = f"rank {case.victim} "
    told = ending.said.split(";")[0]
    if ending.kind != "PeerLost" or named not in told:
        wrong.append(f"rank {rank} was told {ending.kind}: {ending.said}")
    if not ending.right:
        wrong.append(f"rank {rank} has wrong sums")
    return wrong


def _hear(pipe: Connection):  # type: ignore[no-untyped-def]
    """The next thing that a rank says; a rank that says nothing at all hangs."""
    if not pipe.poll(ANSWER):
        raise TimeoutError(f"a rank was silent for {ANSWER} s")
    return pipe.recv()


# -- what is reported

HEAD = """# Lost ranks: results

Written by `run.py`; README.md says what is measured. Milliseconds from just before the signal is
sent to the exception in a survivor. {about}

| transport | fault | faults | survivors | median | 90 % | worst |
|---|---|---|---|---|---|---|
"""


def told(transport: str, how: str, faults: int, times: Sequence[float]) -> dict[str, Any]:
    """What results.json holds of a row, of the times of all survivors in milliseconds."""
    ordered = sorted(1000 * time for time in times)
    return {
        "transport": transport,
        "fault": how,
        "faults": faults,
        "survivors": len(ordered),
        "median": ordered[len(ordered) // 2],
        "90 %": ordered[int(0.9 * (len(ordered) - 1))],
        "worst": ordered[-1],
    }


def row(found: dict[str, Any]) -> str:
    """A line of the table."""
    cells = [f"{value:.1f}" if isinstance(value, float) else f"{value}" for value in found.values()]
    return f"| {' | '.join(cells)} |"


def markdown(results: dict[str, Any]) -> str:
    """The whole of results.md."""
    wrong = results["wrong"]
    verdict = "\n".join(["", *(f"- {sentence}" for sentence in wrong)]) if wrong else ALL_WELL
    head = HEAD.format(about=f"{results['machine']} {quiet.sentence(results.get('noise', []))}")
    return head + "\n".join(map(row, results["rows"])) + "\n" + verdict + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few faults, writes nothing")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    parser.add_argument("--only", default="", help="rows whose name holds this; writes nothing")
    quiet.add_option(parser)
    words = parser.parse_args()
    watch = quiet.Watch(writes=not (words.tiny or words.only), loaded=words.loaded)
    stage, wrong, rows = Stage(), list[str](), []
    stage.play(Case("engine", "kill", 2, 0, 0.0, 8))  # starts the fork server
    before = stage.listing()
    for transport, how, count in ROWS:
        if words.only not in f"{transport} {how}":
            continue
        cases, times = draw(transport, how, 4 if words.tiny else count, words.seed), []
        for case in cases:
            found, complaints = stage.play(case)
            times += found
            wrong += complaints
        rows.append(told(transport, how, len(cases), times))
        print(row(rows[-1]), flush=True)
    after = stage.listing()
    wrong += [f"left behind: {line}" for line in sorted(after - before)]
    wrong += [f"gone: {line}" for line in sorted(before - after)]
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    if watch.writes:
        results = {"machine": machine(), "noise": watch.end(), "rows": rows, "wrong": wrong}
        (HERE / "results.md").write_text(markdown(results), encoding="utf-8")
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
