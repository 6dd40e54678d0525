"""The time of a collective program on a cluster, round by round, with contention on every link.

    T  =  Σ over rounds ( max over links ( bytes on the link / its bandwidth )  +  latency
                          +  max over ranks ( messages that it sends and receives · cost ) )

A program has messages in rounds (`collectives/walk.py`). The bytes of a round are added up on every
link that a message uses; the busiest link decides, and the longest way adds its latency. Links have
one direction each:

    Tree   inside a node     what a device sends, what a device receives
           between nodes     the card of the sender, the uplinks of all switches up to the level
                             that joins both nodes, the same downwards, the card of the receiver
           A message has the card of its device alone.
    Grid   each wire between neighbours; a message goes along one dim after the other, the shorter
           way round where the dim is a ring, and has the latency of every wire

So an algorithm that is the best on paper may lose: halving that begins with the farthest partner
sends half of all vectors through the narrow uplinks of a spine-leaf network in one round.

The cost of a message is a processor's work on it, which measured clusters know (`Link.message`); on
others it is 0. There is no time for additions.

Between hosts a message starts as soon as what it sends is there (`comm/flow.py`), and rounds of a
program in pieces do not wait for each other. So `overlapped` has a latency for each message of the
longest row in which every one needs the one before it, and not for each round:

    broadcast along a ring of N in K pieces     N - 2 + K rounds, N - 1 latencies
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from math import prod
from typing import Any

from howdah.base.errors import UserError
from howdah.collectives.program import Program, split
from howdah.collectives.registry import ALGORITHMS, build
from howdah.collectives.walk import walk
from howdah.machines.cluster import Cluster, Grid, Tree

LinkName = tuple[Hashable, ...]  # ("card out", node, number), ("wire", device, dim, direction), …


@dataclass(frozen=True)
class Price:
    """What a program costs.

    seconds  of the whole
    rounds   seconds of each round
    busiest  the link that decides each round
    bytes    on each link, over all rounds
    on_links seconds of `seconds` in which the busiest link is busy
    overlapped  seconds where messages start as soon as they can
    """

    seconds: float
    rounds: tuple[float, ...]
    busiest: tuple[LinkName, ...]
    bytes: dict[LinkName, float]
    on_links: float = 0.0
    overlapped: float = 0.0


@dataclass(frozen=True)
class Route:
    """The links of a message, each with its bytes/s, its seconds of latency, and those for which it
    keeps the ranks at its ends busy.
    """

    links: tuple[tuple[LinkName, float], ...]
    latency: float
    message: float = 0.0


def price(
    program: Program,
    cluster: Cluster,
    *,
    size: int,
    places: Sequence[int] | None = None,
    beside: Sequence[Sequence[int]] = (),
) -> Price:
    """What a program costs on a cluster whose numbers are those to count on (`attained`).

    size    bytes of the vector: of the whole input or result, n in the formulas; in an all-to-all
            of what one rank has for all
    places  the device of each rank; without it, rank r is on device r
    beside  the same of other groups, which run the program at the same time, over the same links

    Raises UserError where the cluster has too few devices.
    """
    devices = range(program.ranks) if places is None else places
    if len(set(devices)) != program.ranks or not all(0 <= d < cluster.devices for d in devices):
        raise UserError(
            f"{program.name} has {program.ranks} ranks, and cluster {cluster.name} has "
            f"{cluster.devices} devices; give each rank a device of its own"
        )
    whole = size * program.ranks if program.op == "all_to_all" else size
    whole = 0 if program.op == "barrier" else whole
    bounds = [0, *accumulate(split(whole, program.chunks))]
    groups = [devices, *beside]
    route = cache(lambda group, a, b: route_of(cluster, groups[group][a], groups[group][b]))
    seconds: list[float] = []
    wired, busiest, total = 0.0, list[LinkName](), Counter[LinkName]()
    working, ways = 0.0, defaultdict[int, float](float)  # the longest way of each message of a row
    order = walk(program)
    listed = zip(order.sent, order.rows, strict=True)
    for _, messages in groupby(listed, key=lambda one: one[0].round):
        loads, rates, latency = Counter[LinkName](), dict[LinkName, float](), 0.0
        work: defaultdict[tuple[int, int], float] = defaultdict(float)
        for (_, source, target, spans), row in messages:
            moved = sum(bounds[stop] - bounds[start] for start, stop in spans)
            for group in range(len(groups)):
                way = route(group, source, target)
                latency = max(latency, way.latency)
                ways[row] = max(ways[row], way.latency)
                work[group, source] += way.message
                work[group, target] += way.message
                for link, rate in way.links:
                    loads[link] += moved
                    rates[link] = rate
        slowest = max(loads, key=lambda link: loads[link] / rates[link])
        wired += loads[slowest] / rates[slowest]
        working += max(work.values())
        seconds.append(loads[slowest] / rates[slowest] + latency + max(work.values()))
        busiest.append(slowest)
        total.update(loads)
    overlapped = min(wired + working + sum(ways.values()), sum(seconds))
    return Price(sum(seconds), tuple(seconds), tuple(busiest), dict(total), wired, overlapped)


def cheapest(
    op: str, cluster: Cluster, *, size: int, ranks: int | None = None
) -> list[tuple[float, str]]:
    """(seconds, name) of every algorithm of `op` that takes so many ranks, the cheapest first.

    Hierarchies have the nodes of the cluster, tori and meshes its dims.
    """
    ranks, per_node = ranks or cluster.devices, cluster.devices_per_node
    dims = cluster.network.dims if isinstance(cluster.network, Grid) else ()
    found = []
    for name, algorithm in ALGORITHMS.items():
        options: dict[str, Any] = {}
        if name.split("/")[0] != op:
            continue
        if "per_node" in algorithm.options:
            if per_node in (1, ranks) or ranks % per_node:
                continue  # there is no hierarchy
            options["per_node"] = per_node
        if "dims" in algorithm.options and ranks == prod(dims):
            options["dims"] = dims
        try:
            program = build(name, ranks, **options)
        except UserError:
            continue  # it does not take so many ranks
        found.append((price(program, cluster, size=size).seconds, name))
    return sorted(found)


# -- routes ----------------------------------------------------------------------------


def route_of(cluster: Cluster, source: int, target: int) -> Route:
    """The links from device to device, and the latency of the way."""
    if isinstance(cluster.network, Grid):
        return _in_grid(cluster, cluster.network, source, target)
    return _in_tree(cluster, cluster.network, source, target)


def _in_tree(cluster: Cluster, tree: Tree, source: int, target: int) -> Route:
    per_node = cluster.devices_per_node
    (here, i), (there, j) = divmod(source, per_node), divmod(target, per_node)
    if here == there:
        rate = cluster.inside.bandwidth
        ends = ((("device out", source), rate), (("device in", target), rate))
        return Route(ends, cluster.inside.latency, cluster.inside.message)
    # A device has a share of the node's cards: one with others, or several of its own.
    several = max(1, cluster.nics // per_node)
    cards = min(cluster.nics, per_node)
    links: list[tuple[LinkName, float]] = [
        (("card out", here, i * cards // per_node), cluster.card(here) * several),
        (("card in", there, j * cards // per_node), cluster.card(there) * several),
    ]
    capacity, nodes = cluster.nics * cluster.between.bandwidth, 1
    for level in tree.levels:
        capacity *= level.nodes / nodes / level.oversubscription
        nodes = level.nodes
        if here // nodes == there // nodes:
            break
        links.append((("up", nodes, here // nodes), capacity))
        links.append((("down", nodes, there // nodes), capacity))
    return Route(tuple(links), cluster.between.latency, cluster.between.message)


def _in_grid(cluster: Cluster, grid: Grid, source: int, target: int) -> Route:
    links: list[tuple[LinkName, float]] = []
    at = source
    for dim, size in enumerate(grid.dims):
        stride = prod(grid.dims[dim + 1 :])
        here, there = at // stride % size, target // stride % size
        hops = there - here
        if grid.closed(dim) and abs(hops) * 2 > size:
            hops -= size if hops > 0 else -size
        step = 1 if hops > 0 else -1
        for _ in range(abs(hops)):
            links.append((("wire", at, dim, step), cluster.between.bandwidth))
            here = at // stride % size
            at += ((here + step) % size - here) * stride
    latency = len(links) * cluster.between.latency
    return Route(tuple(links), latency, cluster.between.message)
