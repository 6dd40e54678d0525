"""A rank on a host of the box. It does what it is told on stdin, and rank 0 answers on stdout.

    python host_ranks.py WIRE      tcp or gloo; the launcher's variables say who the rank is

A line of stdin is JSON: {"do": "measure"}, {"do": "cell", ...}, {"do": "check", "text": ...},
{"do": "block", "text": ..., "calls": ...}. Every rank gets the same lines.
"""

import json
import sys
from contextlib import closing
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from contestants import OverGloo
from torch import Tensor

from howdah.bench.collectives import slowest
from howdah.bench.trials import Trial, allocate, check, make_trial, views
from howdah.bench.tuning import tuned
from howdah.comm.chosen import Choosing, algorithms_of, choosing
from howdah.comm.rendezvous import join
from howdah.comm.topology import hosts_of, measured
from howdah.comm.transport import Transport
from howdah.machines.topology import Kept, spell
from howdah.plan.comm import Hosts

GLOO, DEFAULT = "gloo", "default"


class Gloo(OverGloo):
    """torch.distributed's own, with the operations that one host's benchmark leaves out."""

    def reduce(self, x: Tensor, root: int) -> object:
        return dist.reduce(x, root)

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Any) -> object:
        return dist.gather(x, None if out is None else [*out.split(list(counts))], root)

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Any) -> object:
        return dist.scatter(out, None if x is None else [*x.split(list(counts))], root)


class Rank:
    """What is measured is a call by one contestant: `trials` by text."""

    def __init__(self, wire: Transport) -> None:
        self.wire = wire
        chosen = choosing(wire, algorithms_of("ring"))
        assert isinstance(chosen, Choosing)
        self.chosen, self.trials = chosen, dict[str, Trial]()
        self.op, self.now = "", ""
        store = dist.PrefixStore("gloo", wire.among.aside)
        dist.init_process_group("gloo", store=store, rank=wire.rank, world_size=wire.size)
        self.gloo: Any = Gloo(wire.rank, wire.size)

    def measure(self) -> str:
        return spell(Kept(measured(self.wire, hosts_of(self.wire))))

    def tune(self) -> str:
        """With corrections, as `howdah doctor --hosts --measure` makes them."""
        return spell(tuned(self.wire, Kept(measured(self.wire, hosts_of(self.wire)))))

    def cell(self, op: str, size: int, texts: list[str]) -> str:
        memory = views(allocate(size + 8 * self.wire.size), size, torch.float32, apart=True)
        self.op, self.trials = op, {}
        for text in texts:
            carrier: Any = {GLOO: self.gloo, DEFAULT: self.wire}.get(text, self.chosen)
            self.trials[text] = make_trial(carrier, op, memory)
        return "ready"

    def _take(self, text: str) -> Trial:
        if text not in (GLOO, DEFAULT):
            self.chosen.algorithms = algorithms_of({self.op: text})
        return self.trials[text]

    def check(self, text: str) -> int:
        """One call; its wrong elements on all ranks. gloo's reduce may leave anything on others
        than the root, as torch says.
        """
        wrong = check(self.wire, self._take(text))
        wrong *= not (text == GLOO and self.op == "reduce" and self.wire.rank)
        told = torch.tensor([wrong], dtype=torch.int64)
        self.wire.all_reduce(told)
        return int(told)

    def block(self, text: str, calls: int, *, first: bool = True) -> float:
        """Mean seconds of a call on the slowest rank; all meet before each.

        first  one more call goes before them, which empties the wires' buckets
        """
        trial, seconds = self._take(text), 0.0
        trial.given.zero_()
        for number in range(0 if first else 1, calls + 1):
            self.wire.barrier()
            began = perf_counter()
            trial.call()
            seconds += perf_counter() - began if number else 0.0
        return slowest(self.wire, [seconds / calls])[0]


def main() -> None:
    torch.set_num_threads(1)
    between: Any = sys.argv[1]
    with closing(join(hosts=Hosts(wire=between, trust="network"))) as wire:
        rank = Rank(wire)
        for line in sys.stdin:
            words = json.loads(line)
            answer = getattr(rank, words.pop("do"))(**words)
            if wire.rank == 0:
                print(json.dumps(answer), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
