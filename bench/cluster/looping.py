"""Ranks of howdah on the hosts of a box, which all-reduce until one of them is lost, or until they
are asked to end. Tests and benchmarks of faults strike them.
"""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from signal import SIGCONT
from subprocess import PIPE, STDOUT, Popen
from threading import Thread
from time import monotonic
from typing import Any

from box import OWN, Box

CACHE = "/tmp/cache"  # what howdah keeps on a host of the box, by intention
MEANT = ("going", "done", "lost")
PATIENCE = 120.0  # seconds for anything: more than any of them takes

RANK = """
import os
import select
import sys

import torch

from howdah.comm import connect
from howdah.comm.transport import PeerLost

elements, words = int(sys.argv[1]), sys.argv[2]
group = connect(algorithm=words, seconds=100)
calls, asked, size = 0, 0.0, group.size
base = torch.arange(float(elements)).remainder_(1000.0)
x, expected = base.clone(), base.clone()
try:
    group.all_reduce(x)
    group.barrier()
    print("going", os.getpid(), flush=True)
    while not asked:
        turn = calls % 100  # whole numbers below 2^24: sums in any order are exact
        torch.mul(base, group.rank + 1, out=x).add_(turn)
        torch.mul(base, size * (size + 1) // 2, out=expected).add_(size * turn)
        group.all_reduce(x)
        calls += 1
        if not torch.equal(x, expected):
            raise SystemExit("the sum is wrong")
        if group.rank == 0 and select.select([sys.stdin], [], [], 0)[0]:
            asked = 1.0
        (asked,) = group.sum_scalars([asked])
    print("done", calls, flush=True)
except PeerLost as error:
    print("lost", error, flush=True)
group.close()
"""


def files_on(box: Box, hosts: Iterable[int]) -> dict[int, set[str]]:
    """Files of each host in the folders that are its own, besides howdah's cache."""
    return {
        host: {
            f"{own}/{path.relative_to(box.file(host, own))}"
            for own in OWN
            for path in box.file(host, own).rglob("*")
            if not path.is_dir() and not path.is_relative_to(box.file(host, CACHE))
        }
        for host in hosts
    }


class Ranks:
    """Ranks on hosts, `each` on each, in blocks.

    stack     ends them
    elements  of an all-reduce; words: its algorithm
    """

    def __init__(
        self, box: Box, stack: ExitStack, each: int = 1, elements: int = 1 << 18, words: str = ""
    ) -> None:
        self.box, self.runs = box, list[Popen[str]]()
        self.lines = list[Queue[tuple[float, str]]]()
        size = box.hosts * each
        for rank in range(size):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "host0",
                "MASTER_PORT": "29500",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            command = [sys.executable, "-c", RANK, elements, words]
            pipes: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": STDOUT, "text": True}
            self.runs.append(box.start(rank // each, command, env=env, **pipes))
            self.lines.append(Queue())
            reads = Thread(target=self._read, args=(self.runs[-1], self.lines[-1]))
            reads.start()
            stack.callback(self._end, self.runs[-1], reads)
        for rank in range(size):
            assert self.hear(rank).startswith("going")

    def _end(self, run: Popen[str], reads: Thread) -> None:
        run.kill()
        run.wait()
        reads.join()
        assert run.stdin and run.stdout
        run.stdin.close()
        run.stdout.close()

    def _read(self, run: Popen[str], lines: "Queue[tuple[float, str]]") -> None:
        assert run.stdout
        for line in run.stdout:
            lines.put((monotonic(), line.strip()))
        lines.put((monotonic(), ""))

    def hear(self, rank: int, *words: str) -> str:
        """The next line of a rank that means something, or begins with one of `words`."""
        return self.heard(rank, *words)[1]

    def heard(self, rank: int, *words: str) -> tuple[float, str]:
        """When that was said, too, by this process's clock."""
        while (found := self.lines[rank].get(timeout=PATIENCE))[1]:
            if found[1].startswith(words or MEANT):
                return found
        raise AssertionError(f"rank {rank} ended and said nothing")

    def process(self, rank: int) -> int:
        """The process number of a rank, as this process sees it."""
        environ = f"RANK={rank}\0".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes()
                mine = environ in (path / "environ").read_bytes()
            except OSError:
                continue
            if mine and b"from howdah.comm import connect" in words and b"nsenter" not in words:
                return int(path.name)
        raise AssertionError(f"rank {rank} has no process")

    def ended(self, some: Iterable[int]) -> None:
        """Waits until these ranks have ended by themselves. Raises TimeoutExpired."""
        for rank in some:
            self.runs[rank].send_signal(SIGCONT)  # nsenter stops with the process it has started
            self.runs[rank].wait(PATIENCE)

    def finish(self) -> int:
        """Asks for an end; the calls of each rank, which are equal."""
        assert self.runs[0].stdin
        self.runs[0].stdin.write("\n")
        self.runs[0].stdin.flush()
        done = [self.hear(rank) for rank in range(len(self.runs))]
        assert len({*done}) == 1 and done[0].startswith("done"), done
        return int(done[0].split()[1])
