"""The selector: for each operation, group and size of a vector the algorithm with the least price.

    price of an algorithm on a cluster      a + b · bytes, for its busiest links stay the busiest;
                                            messages overlap as between hosts
    times a correction                      what was measured over the price, where it was measured
    the least at each size                  1 KiB, 4 KiB, ... 64 MiB; a size is that of its bucket

What is chosen is a text of `comm.algorithm`, which says it for groups of N hosts with L ranks each:

    all_reduce = "4x1: recursive_doubling to 32 KiB, ring | 4x2: hierarchical"

Equal clusters and corrections give equal texts, so ranks that have heard both from rank 0 agree,
and predictions count the bytes of what is run. Inside a host, and where direct exchanges are
cheapest, nothing is chosen: the transport's own way stays. Groups of a shape run at the same time,
as those of a mesh axis do, and the slowest of them counts. The root of an operation is the first
rank.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

from howdah.base.errors import UserError
from howdah.collectives.choice import AUTO, DEFAULT
from howdah.collectives.program import Message, Part, Program, chunk, program
from howdah.collectives.registry import ALGORITHMS, build
from howdah.machines.cluster import Cluster, Grid
from howdah.plan.comm import Algorithms
from howdah.sim.programs import price

SIZED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter")
SIZES = tuple(1 << k for k in range(10, 27, 2))  # of buckets: 1 KiB to 64 MiB by fours
MOST_RANKS = 64  # of a group for which an algorithm is chosen
LONG = 1 << 34  # bytes: so long that latencies do not count
CLEARLY = 1.1  # times the least measured price, up to which the transport's own way stays
PIECES = {
    "broadcast/ring_in_pieces": (4, 16, 64),
    "reduce/ring_in_pieces": (4, 16, 64),
    "broadcast/hierarchical": (1, 4, 16),
    "all_gather/segmented_ring": (4,),
    "all_gather/hierarchical": (1, 4, 8),
    "reduce_scatter/segmented_ring": (4,),
    "reduce_scatter/hierarchical": (1, 4, 8),
    "all_reduce/segmented_ring": (4,),
    "all_reduce/hierarchical": (1, 4, 8),
    "all_reduce/double_tree": (2, 8),
    "all_reduce/tree": (2, 8),
}
GRIDS = ("torus", "torus_in_colours", "hypercube", "mesh", "mesh_rows_then_columns")

Correction = tuple[str, str, str, int, float]  # operation, algorithm, groups, bytes, factor


class Shape(NamedTuple):
    """Groups of ranks on `hosts` hosts, `each` ranks on every one of them."""

    hosts: int
    each: int

    def __str__(self) -> str:
        return f"{self.hosts}x{self.each}"


class Line(NamedTuple):
    """An algorithm, as a text of `comm.algorithm`, and its price: seconds, and seconds a byte."""

    text: str
    fixed: float
    byte: float


def direct(op: str, ranks: int) -> Program:
    """The messages of a transport's own way: every rank sends to every other one at once."""
    if op == "all_reduce":
        return build("all_reduce/two_shot", ranks)
    every = range(ranks)
    others = [(a, b) for a in every for b in every if a != b]
    parts: Mapping[str, Part] = {
        "reduce_scatter": [Message(0, a, b, chunk(b), add=True) for a, b in others],
        "all_gather": [Message(0, a, b, chunk(a)) for a, b in others],
        "broadcast": [Message(0, 0, b, chunk(0)) for b in every[1:]],
        "reduce": [Message(0, a, 0, chunk(0), add=True) for a in every[1:]],
        "scatter": [Message(0, 0, b, chunk(b)) for b in every[1:]],
        "gather": [Message(0, a, 0, chunk(a)) for a in every[1:]],
        "all_to_all": [Message(0, a, b, chunk(a * ranks + b)) for a, b in others],
    }
    chunks = {"broadcast": 1, "reduce": 1, "all_to_all": ranks * ranks}
    return program(op, DEFAULT, ranks, chunks.get(op, ranks), parts[op])


def candidates(op: str, shape: Shape, *, grid: bool = False) -> Iterator[tuple[str, Program]]:
    """Every algorithm of an operation that groups of a shape can run, and the transport's own way:
    (text, program).
    """
    ranks = shape.hosts * shape.each
    yield DEFAULT, direct(op, ranks)
    for name, algorithm in ALGORITHMS.items():
        of, _, short = name.partition("/")
        if of != op or (short in GRIDS and not grid):
            continue
        hierarchy = "per_node" in algorithm.options
        if hierarchy and 1 in shape:
            continue
        inside = {"per_node": shape.each} if hierarchy else {}
        for pieces in PIECES.get(name, (None,)):
            cut = {} if pieces is None else {"pieces": pieces}
            try:
                yield _spelled(short, pieces), build(name, ranks, **inside, **cut)
            except UserError:
                continue  # it does not take so many ranks


def _spelled(name: str, pieces: int | None) -> str:
    return name if pieces is None else f"{name} pieces={pieces}"


def places(cluster: Cluster, shape: Shape) -> list[list[int]]:
    """Devices of groups of a shape that fill the cluster in order: on the first hosts one beside
    the other, then on the next.
    """
    per_node, hosts = cluster.devices_per_node, min(shape.hosts, cluster.nodes)
    return [
        [
            (first + host) * per_node + place + k
            for host in range(shape.hosts)
            for k in range(shape.each)
        ]
        for first in range(0, cluster.nodes - hosts + 1, hosts)
        for place in range(0, per_node - shape.each + 1, shape.each)
    ]


@lru_cache(maxsize=1024)
def lines(cluster: Cluster, op: str, shape: Shape) -> tuple[Line, ...]:
    """The prices of all candidates on a cluster with attained rates. Raises UserError where it has
    no such groups.
    """
    if shape.hosts > cluster.nodes or shape.each > cluster.devices_per_node:
        raise UserError(f"cluster {cluster.name} has no groups of {shape}: hosts x ranks of each")
    first, *beside = places(cluster, shape)
    found = []
    for text, one in candidates(op, shape, grid=isinstance(cluster.network, Grid)):
        fixed, whole = (
            price(one, cluster, size=size, places=first, beside=beside).overlapped
            for size in (0, LONG)
        )
        found.append(Line(text, fixed, (whole - fixed) / LONG))
    return tuple(found)


def best(
    cluster: Cluster, op: str, shape: Shape, size: int, corrections: Iterable[Correction] = ()
) -> str:
    """The text of the algorithm with the least price for a vector of `size` bytes; where the
    likeliest were measured, and the transport's own way with them, of those: that way stays
    where none is clearly cheaper, for what was measured is not surer than that.
    """
    factors = {
        text: factor
        for of, text, groups, at, factor in corrections
        if (of, groups, at) == (op, str(shape), size)
    }

    def seconds(line: Line) -> tuple[float, bool, str]:
        price = (line.fixed + line.byte * size) * factors.get(line.text, 1.0)
        return price, line.text != DEFAULT, line.text  # of equals, nothing is chosen

    every = lines(cluster, op, shape)
    timed = [line for line in every if line.text in factors]
    own = [line for line in timed if line.text == DEFAULT]
    if len(timed) < 2 or not own:
        return min(every, key=seconds).text
    least = min(timed, key=seconds)
    return DEFAULT if seconds(own[0])[0] <= CLEARLY * seconds(least)[0] else least.text


def chosen_text(
    cluster: Cluster, op: str, shape: Shape, corrections: Iterable[Correction] = ()
) -> str:
    """What is chosen for groups of a shape: one algorithm after the other by size; empty: nothing.

    A bucket reaches to the middle, by factors, between its size and the next.
    """
    corrections = [*corrections]
    runs: list[tuple[str, int]] = []
    for size in SIZES:
        text = best(cluster, op, shape, size, corrections)
        if runs and runs[-1][0] == text:
            runs.pop()
        runs.append((text, 2 * size))
    if [text for text, _ in runs] == [DEFAULT]:
        return ""
    limited = [f"{text} to {most >> 10} KiB" for text, most in runs[:-1]]
    return ", ".join([*limited, runs[-1][0]])


def settle(
    algorithms: Algorithms,
    cluster: Cluster | None,
    shapes: Iterable[Shape],
    corrections: Sequence[Correction] = (),
) -> Algorithms:
    """The algorithms with what is chosen in place of `auto`.

    cluster  with attained rates; None: all ranks are on one host
    shapes   of the groups that there are
    """
    wanted = [] if cluster is None else sorted({*shapes})
    texts = {}
    for op, text in algorithms.by_operation.items():
        if text == AUTO:
            parts = [
                (shape, chosen_text(cluster, op, shape, corrections))
                for shape in wanted
                if cluster and shape.hosts > 1 and shape.hosts * shape.each <= MOST_RANKS
            ]
            texts[op] = " | ".join(f"{shape}: {part}" for shape, part in parts if part)
    return replace(algorithms, **texts)


def is_auto(algorithms: Algorithms) -> bool:
    """Whether an algorithm is still to be chosen."""
    return AUTO in algorithms.by_operation.values()


@cache
def shapes_of(hosts: int, each: int) -> tuple[Shape, ...]:
    """The shapes of all ranks together, and of those with the same place on each host."""
    return tuple(sorted({Shape(hosts, each), Shape(hosts, 1)}))
