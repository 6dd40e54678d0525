"""howdah's contestants: its step on every layout of the benchmark, and what bounds it.

    on the engine     shared memory, what howdah takes by itself on one machine
    over gloo         the same step on howdah's torch transport: messages over TCP
    bound             the same step and no exchange, so that nobody who takes it can be faster

There are two bounds, because ZeRO updates less on each rank. One process trains for itself and
updates everything: the bound of stage 0. Or the ranks share the update out as under `zero1`, and
say nothing to each other: the bound of stages 1 and 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from cases import RATE, SEED, Case, method
from torch import Tensor

from howdah.comm.meeting import this_machine
from howdah.comm.rendezvous import choose
from howdah.comm.transport import Counts, SingleRank, Transport, copy_own
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.comm import DIRECT, Algorithms, Comm
from howdah.plan.layout import Layout, parse_layout
from howdah.plan.plan import make_plan
from howdah.plan.recording import RankTrace
from howdah.text.batches import Micro
from howdah.train.step import StepContext, train_step

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """One process among the ranks: howdah's transport, and a store to join more of them by."""

    transport: Transport
    store: dist.Store

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size


class HowdahStep:
    """train_step on one layout. Calling it is one step of this rank; returns the loss."""

    def __init__(
        self, case: Case, layout: Layout, transport: Transport, algorithms: Algorithms = DIRECT
    ) -> None:
        recipe = method(case)
        batch = Batch(layout.readers * case.rows, case.rows // case.micros)
        plan = make_plan(case.shape, layout, batch, sequence=case.sequence, method=recipe)
        plan = replace(plan, comm=Comm(algorithm=algorithms))
        self._mesh = connect_mesh(plan.layout, transport, CPU, algorithms)
        placed = apply(plan, mesh=self._mesh, fill=random_init(plan.weights, SEED))
        self.plan = plan
        self._stepper, self._done = StepContext(placed, self._mesh, recipe, SEED), 0

    def __call__(self, micros: Sequence[Micro]) -> float:
        self._done += 1
        return train_step(self._stepper, micros, step=self._done, rate=RATE).loss

    def sent(self) -> int:
        """Bytes that this rank has sent so far, as howdah counts them."""
        return sum(self._mesh.counters.sent().values())

    def trace(self) -> RankTrace:
        """What this rank did in its last steps."""
        steps = [*self._stepper.recorder.steps]
        return RankTrace(str(self.plan.layout), this_machine(), steps)


def on_engine(case: Case, place: Place, words: str) -> HowdahStep:
    """`words` of the layout beside dp and x."""
    assert place.transport.link == "shared", "the engine could not be built on this machine"
    return HowdahStep(case, _layout(case, words), place.transport)


def over_gloo(case: Case, place: Place, words: str) -> HowdahStep:
    store = dist.PrefixStore(f"over gloo {words}", place.store)
    wire = choose(store, rank=place.rank, size=place.size, transport="torch")
    return HowdahStep(case, _layout(case, words), wire)


def alone(case: Case, place: Place) -> HowdahStep:
    return HowdahStep(case, Layout(dp=1, micros=case.micros), SingleRank())


def silent(case: Case, place: Place) -> HowdahStep:
    return HowdahStep(case, _layout(case, "zero1"), Silent(place.rank, place.size))


def _layout(case: Case, words: str) -> Layout:
    return parse_layout(f"dp{case.ranks} {words} x{case.micros}")


class Silent(SingleRank):
    """Ranks that believe in each other and exchange nothing.

    A share stays as it is, as if it had been reduced or had arrived. What is gathered out of
    place are scalars: everyone seems to say what this rank says.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size  # type: ignore[misc]

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        copy_own(out, x.split(list(counts))[self.rank])
        return 0

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        parts = out.split(list(counts))
        if parts[self.rank].data_ptr() != x.data_ptr():
            for part in parts:
                part.copy_(x)
        return 0
