"""The ranks that torchrun has started, on one machine or several, in the place of `Workers`.

every rank    joins, runs the case, leaves; tells its evidence over a transport beside
rank 0        has that of all, and compares
"""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from howdah.comm.meeting import Kind
from howdah.comm.rendezvous import join
from howdah.comm.transport import Transport
from howdah.plan.comm import Hosts
from howdah.verify.case import Case
from howdah.verify.evidence import Evidence, gather, read, spelled
from howdah.verify.mutations import mutations


class Launched:
    """All ranks make it together, and close it.

    hosts  how they are connected
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts, self._beside = hosts, join(hosts=hosts)
        self.rank, self.size = self._beside.rank, self._beside.size

    def close(self) -> None:
        """Ends the transport beside."""
        self._beside.close()

    def run(
        self,
        what: Callable[..., Evidence],
        /,
        *given: Any,
        ranks: int,
        transport: Kind | None = None,
    ) -> list[Evidence]:
        """Runs `what` on all ranks, over a transport of its own. Rank 0 gets the evidence of all,
        the others their own.
        """
        assert ranks == self.size
        with closing(join(transport, hosts=self._hosts)) as wire:
            mine = what(wire, *given)
        return gathered(self._beside, mine)

    def follow(self, case: Case) -> None:
        """What `verify` runs on rank 0, on another one."""
        self.run(gather, case, ranks=self.size)
        for mutation in mutations(case.plan, steps=case.steps):
            self.run(gather, case, mutation.mutate, mutation.shift, ranks=self.size)

    def agree(self, proved: bool) -> bool:
        """Whether rank 0 says so."""
        told = torch.tensor([int(proved)])
        self._beside.broadcast(told, 0)
        return bool(told)


def gathered(beside: Transport, mine: Evidence) -> list[Evidence]:
    """The evidence of all ranks, on rank 0; its own on another one."""
    said = torch.frombuffer(bytearray(spelled(mine)), dtype=torch.uint8)
    lengths = torch.zeros(beside.size, dtype=torch.int64)
    lengths[beside.rank] = len(said)
    beside.all_reduce(lengths)
    counts = lengths.tolist()
    every = torch.empty(sum(counts), dtype=torch.uint8) if beside.rank == 0 else None
    beside.gather(every, said, 0, counts)
    if every is None:
        return [mine]
    others = every.split(counts)[1:]
    return [mine, *(read(other.numpy().tobytes(), mine) for other in others)]
