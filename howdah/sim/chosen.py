"""The collectives of a plan for which a recipe chooses an algorithm: bytes, seconds, refusals.

`plan/sums.py`, the gathers of weights and `plan/exchanges.py` list what is sent. Where a program
is chosen for it (`collectives/choice.py`), a rank sends what its steps send, and it takes the time
of the program's rounds on the cluster (`sim/programs.py`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from howdah.collectives.choice import (
    DEFAULT,
    FORWARDING,
    chunk_sizes,
    problem_of,
    program_of,
    ranks_per_node,
    rules,
    sent_to,
    unusable,
)
from howdah.collectives.program import Program
from howdah.machines.cluster import Cluster
from howdah.plan.comm import Algorithms
from howdah.plan.exchanges import Exchange, exchanges
from howdah.plan.flat_buffers import Buffer, share, shares
from howdah.plan.gather_order import gathered_by
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.sharding import local_buffers, shard_axes
from howdah.plan.sums import sums_of
from howdah.sim.programs import price

ON_CUDA = (
    "[comm] says how tensors of the CPU travel, and the device is cuda, where NCCL chooses itself: "
    "leave comm.algorithm and comm.sparse out, or use device=cpu"
)
LONG = 1 << 34  # bytes: so long that latencies do not count


class Collective(NamedTuple):
    """One collective of a plan.

    elements  of the whole vector; row: elements that stay together when it is cut into shares
    width     bytes of an element
    root      of a broadcast
    """

    op: str
    ranks: Sequence[int]
    elements: int
    width: int
    row: int = 1
    root: int = 0

    @property
    def blocks(self) -> list[int]:
        """Elements of each block."""
        if self.op in ("all_reduce", "broadcast"):
            return [self.elements]
        cut = shares(self.elements // self.row, len(self.ranks)) * self.row
        return [int(count) for count in cut]

    def program(self, algorithms: Algorithms, nodes: Sequence[int]) -> Program | None:
        """The program that is chosen for it.

        nodes  the node of each rank
        """
        found = program_of(
            algorithms,
            self.op,
            size=self.elements * self.width,
            ranks=len(self.ranks),
            root=self.root,
            per_node=ranks_per_node(nodes),
        )
        return found.program if found else None


def of_exchange(row: Exchange) -> Collective | None:
    """A row of exchanges over tp as a collective; None for other rows. Both halves of an all-reduce
    give the whole.
    """
    if row.whole is None:
        return None
    elements, width, together, half = row.whole
    op = "all_reduce" if half else row.operation
    return Collective(op, row.peers, elements, width, together)


def sent_by(call: Collective, program: Program, rank: int) -> np.ndarray:
    """Bytes that `rank` sends in it to each rank of the group."""
    sent = sent_to(program, call.ranks.index(rank), chunk_sizes(program, call.blocks))
    return np.array([sent[peer] for peer in range(len(call.ranks))], np.int64) * call.width


def gathers_of(plan: Plan, rank: int, buffer: Buffer) -> Iterator[Collective]:
    """The collectives that gather the weights of a unit once."""
    inside, _ = shard_axes(plan.layout, buffer.unit)
    ranks, width = inside.group(rank), plan.compute_bytes
    if gathered_by(plan.layout) == "all_gather":
        yield Collective("all_gather", ranks, buffer.length, width)
        return
    for root in range(inside.size):
        start, stop = share(buffer.length, inside.size, root)
        yield Collective("broadcast", ranks, stop - start, width, root=root)


def collectives_of(plan: Plan, rank: int) -> Iterator[Collective]:
    """Every collective of `rank` for which an algorithm can be chosen, once for each kind."""
    for row in sums_of(plan, rank):  # rows of an embedding fall back to whole sums
        for elements in row.messages:
            yield Collective(row.op, row.ranks, elements, plan.sent_gradient_bytes)
    for buffer in local_buffers(plan, rank) if plan.layout.zero else ():
        yield from gathers_of(plan, rank, buffer)
    for exchange in exchanges(plan, rank):
        if (call := of_exchange(exchange)) is not None:
            yield call
        elif exchange.operation == "all_to_all":
            yield Collective("all_to_all", exchange.peers, 0, 1)


def choice_problems(algorithms: Algorithms) -> list[str]:
    """Sentences about texts that name no algorithms, and those that no training step can use."""
    found = []
    for op, text in algorithms.by_operation.items():
        if problem := problem_of(op, text):
            found.append(f"comm.algorithm: {problem}")
        elif op == "all_to_all" and rules(op, text)[0].name in FORWARDING:
            found.append(
                f"comm.algorithm.all_to_all is {text}, by which ranks pass on what others send, "
                "whose sizes they do not know in training; use pairwise, or leave it out"
            )
    return found


def sparse_problems(plan: Plan) -> Iterator[str]:
    """Why the gradient of an embedding cannot be summed by its rows (comm.sparse)."""
    layout, broadcast = plan.layout, plan.comm.algorithm.broadcast
    if plan.shape.tie_embeddings:
        yield "the embedding is tied to the head, which gives every row a gradient"
    if layout.zero:
        yield f"zero{layout.zero} cuts gradients into shares, and rows are summed whole"
    if layout.replicas == 1:
        yield "there is one replica, which sums nothing"
    if plan.method.gradient_dtype != "full":
        yield "rows are sent as they are, and method.gradient_dtype is bf16"
    if any(rule.name for rule in rules("broadcast", broadcast or DEFAULT)):
        yield "rows are broadcast directly; add comm.algorithm.broadcast=default"


def choice_misfits(plan: Plan) -> list[str]:
    """Sentences about algorithms that cannot use as many ranks as a group of the plan has, and
    about sums by rows that cannot be.
    """
    if problems := [*sparse_problems(plan)] if plan.comm.sparse else []:
        return [f"comm.sparse is true, but {problem}; leave it out" for problem in problems]
    chosen = plan.comm.algorithm
    ranks = axis(plan.layout, "pp").group(0) if chosen else ()
    sizes = {(one.op, len(one.ranks)) for rank in ranks for one in collectives_of(plan, rank)}
    readable = [(op, size) for op, size in sizes if not problem_of(op, getattr(chosen, op))]
    found = {problem for op, size in readable for problem in unusable(chosen, op, size)}
    return [f"comm.algorithm: {problem}" for problem in sorted(found)]


class ProgramTimes:
    """Seconds of chosen programs on a cluster with attained rates.

    A program's time is that of its latencies and a part that grows with the bytes, so each program
    is priced twice, without bytes and with many.
    """

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self._algorithms, self._cluster = plan.comm.algorithm, cluster
        self._times: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}

    def seconds(self, call: Collective, groups: np.ndarray) -> float | None:
        """Seconds of a collective; None where no program is chosen for it.

        groups  ranks of all groups that make this call at the same time, one in a row
        """
        if not self._algorithms:
            return None
        nodes = [rank // self._cluster.devices_per_node for rank in call.ranks]
        if (program := call.program(self._algorithms, nodes)) is None:
            return None
        key = id(program), tuple(call.ranks)
        if key not in self._times:
            beside = [list(map(int, one)) for one in groups if int(one[0]) != call.ranks[0]]
            self._times[key] = tuple(  # type: ignore[assignment]
                price(program, self._cluster, size=n, places=call.ranks, beside=beside).seconds
                for n in (0, LONG)
            )
        latency, whole = self._times[key]
        return latency + (whole - latency) * call.elements * call.width / LONG
