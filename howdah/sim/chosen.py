"""The collectives of a plan for which a recipe chooses an algorithm: bytes, seconds, refusals.

`plan/sums.py`, the gathers of weights and `plan/exchanges.py` list what is sent. Where a program
is chosen for it (`collectives/choice.py`), a rank sends what its steps send, and it takes the time
of the program's rounds on the cluster (`sim/programs.py`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from howdah.collectives.choice import (
    AUTO,
    DEFAULT,
    chunk_sizes,
    passes_on,
    placement,
    problem_of,
    program_of,
    ranks_per_node,
    rules,
    sent_to,
    unusable,
)
from howdah.collectives.places import way_of
from howdah.collectives.program import Program
from howdah.machines.cluster import Cluster, attained
from howdah.plan.comm import Algorithms, Comm
from howdah.plan.exchanges import Exchange, exchanges
from howdah.plan.flat_buffers import share, shares
from howdah.plan.gather_order import gathered_by
from howdah.plan.gathers import Gather, gathers
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.servers import share_problem
from howdah.plan.sharding import local_buffers
from howdah.plan.sums import sums_of
from howdah.sim.programs import price
from howdah.sim.selector import Correction, Shape, is_auto, settle

ON_CUDA = (
    "[comm] says how tensors of the CPU travel, and the device is cuda, where NCCL chooses itself: "
    "leave comm.algorithm and comm.sparse out, or use device=cpu"
)
ON_SERVERS = (
    "parameter servers keep states in memory of the host, and the device is cuda: use device=cpu, "
    "or drop server from the layout"
)
HOPS_ON_CUDA = (
    "method.gradient_dtype=int4 adds on threads of the host, and the device is cuda: use "
    "device=cpu, or gradient_dtype=bf16"
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
        each, order = placement(nodes)
        found = program_of(
            algorithms,
            self.op,
            size=self.elements * self.width,
            ranks=len(self.ranks),
            root=self.root,
            per_node=each,
            order=order,
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


def gathers_of(plan: Plan, row: Gather) -> Iterator[Collective]:
    """The collectives of a gather of a unit's weights, which is made once."""
    ranks, width, parts = row.ranks, row.width, len(row.ranks)
    if gathered_by(plan.layout) == "all_gather":
        yield Collective("all_gather", ranks, row.elements, width)
        return
    for root in range(parts):
        start, stop = share(row.elements, parts, root)
        yield Collective("broadcast", ranks, stop - start, width, root=root)


def collectives_of(plan: Plan, rank: int) -> Iterator[Collective]:
    """Every collective of `rank` for which an algorithm can be chosen, once for each kind."""
    for row in (r for r in sums_of(plan, rank) if r.op != "push"):  # rows fall back to whole sums
        for elements in row.messages:
            yield Collective(row.op, row.ranks, elements, plan.sent_gradient_bytes)
    for buffer in local_buffers(plan, rank) if plan.layout.zero else ():
        for gather in gathers(plan, rank, buffer, often=2):  # the first, and others
            yield from gathers_of(plan, gather)
    for exchange in exchanges(plan, rank):
        if (call := of_exchange(exchange)) is not None:
            yield call
        elif exchange.operation == "all_to_all":
            yield Collective("all_to_all", exchange.peers, 0, 1)


def staged_by_programs(plan: Plan, rank: int) -> int:
    """Bytes of the staging of chosen programs: for each group of ranks, that of its largest
    operation (`comm/chosen.py`, Choosing), as on one machine. Algorithms that nobody knows
    (`choice_problems`) have none.
    """
    most: Counter[tuple[int, ...]] = Counter()
    if not plan.comm.algorithm or choice_problems(plan.comm.algorithm):
        return 0
    for row in (r for r in sums_of(plan, rank) if r.op != "push"):
        width = plan.sent_gradient_bytes
        calls = [Collective(row.op, row.ranks, elements, width) for elements in row.messages]
        staged = sum(_staging(call, plan.comm.algorithm, rank) for call in calls)  # together
        most[tuple(row.ranks)] = max(most[tuple(row.ranks)], staged)
    for call in collectives_of(plan, rank):
        group = tuple(call.ranks)
        most[group] = max(most[group], _staging(call, plan.comm.algorithm, rank))
    return most.total()


def _staging(call: Collective, algorithms: Algorithms, rank: int) -> int:
    program = call.program(algorithms, [0] * len(call.ranks))
    if program is None:
        return 0
    way = way_of(program, call.ranks.index(rank), chunk_sizes(program, call.blocks))
    return way.scratch * call.width


def choice_problems(algorithms: Algorithms) -> list[str]:
    """Sentences about texts that name no algorithms, and those that no training step can use."""
    found = []
    for op, text in algorithms.by_operation.items():
        if problem := problem_of(op, text):
            found.append(f"comm.algorithm: {problem}")
        elif passes_on(op, text):
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
        yield f"rows are sent as they are, and gradient_dtype is {plan.method.gradient_dtype}"
    if any(rule.name for rule in rules("broadcast", broadcast or DEFAULT)):
        yield "rows are broadcast directly; add comm.algorithm.broadcast=default"


def choice_misfits(plan: Plan) -> list[str]:
    """Sentences about algorithms that cannot use as many ranks as a group of the plan has, about
    sums by rows that cannot be, and shares that no server has.
    """
    if plan.method.sync and (problem := share_problem(plan.layout, plan.comm)):
        return [problem]
    if plan.layout.server and (plan.comm.algorithm or plan.comm.sparse):
        return ["[comm] is not for parameter servers, to which workers send directly; leave it out"]
    if plan.comm.algorithm and plan.method.gradient_dtype == "int4":
        return ["comm.algorithm is not for method.gradient_dtype=int4, which has hops of its own"]
    if problems := [*sparse_problems(plan)] if plan.comm.sparse else []:
        return [f"comm.sparse is true, but {problem}; leave it out" for problem in problems]
    chosen = plan.comm.algorithm
    ranks = axis(plan.layout, "pp").group(0) if chosen else ()
    sizes = {(one.op, len(one.ranks)) for rank in ranks for one in collectives_of(plan, rank)}
    readable = [(op, size) for op, size in sizes if not problem_of(op, getattr(chosen, op))]
    found = {problem for op, size in readable for problem in unusable(chosen, op, size)}
    return [f"comm.algorithm: {problem}" for problem in sorted(found)]


def cuda_problem(plan: Plan) -> str:
    """Why a plan cannot run on GPUs; empty if it can."""
    if plan.method.gradient_dtype == "int4":
        return HOPS_ON_CUDA
    return ON_SERVERS if plan.layout.server else ON_CUDA if plan.comm.is_chosen else ""


class ProgramTimes:
    """Seconds of chosen programs on a cluster with attained rates.

    A program's time is that of its latencies and a part that grows with the bytes, so each program
    is priced twice, without bytes and with many.
    """

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self._algorithms, self._cluster = plan.comm.algorithm, cluster
        self._times: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {}

    def seconds(self, call: Collective, groups: np.ndarray, *others: Collective) -> float | None:
        """Seconds of a collective; None where no program is chosen for it.

        groups  ranks of all groups that make this call at the same time, one in a row
        others  calls of the same group that start together with it
        """
        if not self._algorithms:
            return None
        calls, ranks = [call, *others], call.ranks
        nodes = [rank // self._cluster.devices_per_node for rank in ranks]
        chosen = [call.program(self._algorithms, nodes) for call in calls]
        programs = [program for program in chosen if program]
        if len(programs) < len(calls):
            return None
        key = tuple(map(id, programs)), tuple(ranks)
        if key not in self._times:
            beside = [list(map(int, one)) for one in groups if int(one[0]) != ranks[0]]
            program = together(programs)
            costs = partial(price, program, self._cluster, places=ranks, beside=beside)
            found = [costs(size=size) for size in (0, LONG)]
            inside = len({*nodes}) == 1  # in shared memory rounds wait for each other
            latency, whole = (one.seconds if inside else one.overlapped for one in found)
            self._times[key] = latency, whole
        latency, whole = self._times[key]
        size = sum(call.elements * call.width for call in calls)
        return latency + (whole - latency) * size / LONG


def together(programs: Sequence[Program]) -> Program:
    """Programs of one group as one, whose rounds start together; each has chunks of its own, an
    equal part of the vector (`comm/rounds.py` runs them so).
    """
    if len(programs) == 1:
        return programs[0]
    starts = [0, *accumulate(program.chunks for program in programs)]
    steps = [
        sorted(
            (
                step._replace(spans=tuple((a + start, b + start) for a, b in step.spans))
                for program, start in zip(programs, starts, strict=False)
                for step in program.steps[rank]
            ),
            key=lambda step: step.turn,
        )
        for rank in range(programs[0].ranks)
    ]
    return replace(programs[0], chunks=starts[-1], steps=tuple(map(tuple, steps)))


# -- auto ------------------------------------------------------------------------------


def shapes_in(plan: Plan, per_node: int) -> set[Shape]:
    """The shapes of the groups of a plan that could choose an algorithm.

    per_node  ranks of a host
    """
    found = set()
    for rank in axis(plan.layout, "pp").group(0):
        for call in collectives_of(plan, rank):
            size, each = len(call.ranks), ranks_per_node([r // per_node for r in call.ranks])
            if size > 1 and each:
                found.add(Shape(size // each, each))
    return found


def settled_plan(plan: Plan, cluster: Cluster | None) -> Plan:
    """The plan with what is chosen on a cluster in place of `comm.algorithm = "auto"`; without a
    cluster, nothing is.
    """
    if not is_auto(plan.comm.algorithm):
        return plan
    counted = attained(cluster) if cluster else None
    shapes = shapes_in(plan, cluster.devices_per_node) if cluster else ()
    return replace(plan, comm=settled_comm(plan.comm, counted, shapes))


def settled_comm(
    comm: Comm,
    cluster: Cluster | None,
    shapes: Iterable[Shape],
    corrections: Sequence[Correction] = (),
) -> Comm:
    """[comm] with the algorithms that are chosen, on a cluster with attained rates. Rows of an
    embedding are broadcast directly.
    """
    algorithms = comm.algorithm
    if comm.sparse and algorithms.broadcast == AUTO:
        algorithms = replace(algorithms, broadcast="")
    there = [
        shape
        for shape in shapes
        if cluster and shape.hosts <= cluster.nodes and shape.each <= cluster.devices_per_node
    ]
    return replace(comm, algorithm=settle(algorithms, cluster, there, corrections))
