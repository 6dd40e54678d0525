"""The bandwidth and latency of a group of ranks while all groups of its axis communicate at once.

A collective over n ranks with S bytes each takes, per all-gather or reduce-scatter,

    messages · latency  +  (n-1)/n · S / bandwidth

and `path` finds messages, latency and bandwidth. The bytes that a rank sends, (n-1)/n · S, are one
*unit* of load. The groups of an axis are the rows of an array (`axis_groups`); they load the
network at the same time.

In a Tree the load is counted at the *mouth* (the uplinks) of every domain. A domain is a node, or
the set of nodes below a switch of some level. A ring loads a mouth once for each of its edges that
leaves the domain. So a ring over 16 neighbouring nodes below one switch sends one unit out of it,
while each ring over a pair of far nodes sends one unit:

    mouth of      capacity, bytes/s               load of a ring     of an all-to-all
    a node        nics · B                        edges that leave   Σ (outside) / (n-1)
    a level's     nodes · nics · B                the same           the same
      switches      / its oversubscription and those below it

    bandwidth = min( inside,  cards of the members · B / their load,  capacity / load, ... )

B is the bandwidth of one network card. If each ring leaves its node once, the bandwidth is
min(inside, members · B per device). The second term bounds a single group: even alone on the
network, it has no more cards than members on the node. Without a switch in the node, members have
the wires between themselves alone, (members - 1) / (devices - 1) of all. What a rank has reaches
the last member over n-1 edges of the ring, each with the latency of its link; in an all-to-all all
messages start at once.

In a Grid every device has one wire in each direction along each dim. A group that is a box of the
grid, with e[i] members along dim i at a distance k[i], all-gathers along all its dims at once:

    bandwidth = Σ ports[i] · B / k[i]        messages = Σ k[i] · (e[i] // 2, or e[i]-1 in a line)

with 2 ports where the dim closes to a ring and the group goes around it, else 1. Division by k: the
k groups between two members share a wire. An all-to-all is bound by the wire in the middle of its
longest dim: e·S/8B on a ring, e·S/4B on a line.
"""

from dataclasses import dataclass
from math import inf, prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from howdah.machines.cluster import Cluster, Grid, Level, Link, Tree

Groups = NDArray[np.int64]  # one row per group: its ranks, in the order of the ring
Pattern = Literal["ring", "all"]


@dataclass(frozen=True)
class Path:
    """The network as one group of ranks sees it.

    link      name of the slowest link used; bytes/s per rank; seconds per message, on average of
              those inside nodes and between them
    messages  number of consecutive messages of an all-gather; members that send to all do so at
              the same time
    nodes     most nodes that a group spans
    members   most members of a group on one node
    """

    link: Link
    messages: int
    nodes: int
    members: int


def axis_groups(world: int, *, size: int, stride: int) -> Groups:
    """The groups of a mesh axis of `size` ranks whose neighbours are `stride` ranks apart.

    >>> axis_groups(8, size=2, stride=2).tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    if world % (size * stride):
        raise ValueError(f"{world} ranks have no axis of {size} ranks, {stride} apart")
    ranks = np.arange(world).reshape(world // (size * stride), size, stride)
    return ranks.swapaxes(1, 2).reshape(-1, size)


def path(cluster: Cluster, groups: Groups, *, pattern: Pattern = "ring") -> Path:
    """The bandwidth and latency of each of `groups` when all of them communicate at once.

    groups   ranks, one group per row, all of equal size; from `axis_groups` or any other source
    pattern  ring: each member sends to the next; all: every member sends to every other

    Raises ValueError when a rank is not in the cluster or occurs twice.
    """
    if groups.max() >= cluster.devices or np.bincount(groups.ravel()).max() > 1:
        raise ValueError("groups name a rank that the cluster has not, or one rank twice")
    size = groups.shape[1]
    at_nodes = _at_mouths(groups, cluster.devices_per_node, pattern)
    nodes, members = int(np.bincount(at_nodes.group).max()), int(at_nodes.members.max())
    if size == 1:
        return Path(Link("none", inf, 0.0), messages=0, nodes=1, members=1)
    if isinstance(cluster.network, Grid):
        wire = cluster.between
        seen = [_in_grid(cluster.network, group, pattern) for group in groups]
        bandwidth = min(share for share, _ in seen) * wire.bandwidth
        messages = max(hops for _, hops in seen)
        latency = wire.latency
    else:
        wire = cluster.between if nodes > 1 else cluster.inside
        bandwidth = _in_tree(cluster, cluster.network, groups, pattern)
        messages, latency = 1, wire.latency
        if pattern == "ring":
            messages = size - 1
            leave = min(int(np.bincount(at_nodes.group, at_nodes.load).max()), messages)
            between, inside = cluster.between.latency, cluster.inside.latency
            latency = inside + (between - inside) * leave / messages
    return Path(Link(wire.name, bandwidth, latency), messages, nodes, members)


def collective_path(cluster: Cluster, groups: Groups) -> Path:
    """The path of all-gathers and reduce-scatters: along rings, as the libraries of GPUs and TPUs
    send. Ranks that are processors send to every member where a group has several nodes, for that
    is how howdah's own connections do it; memory that they share is as fast either way.
    """
    found = path(cluster, groups)
    if cluster.device.is_processor and found.nodes > 1:
        return path(cluster, groups, pattern="all")
    return found


def bisection(cluster: Cluster) -> float:
    """The bisection bandwidth in bytes/s, in one direction, between two halves of the cluster.

    A Grid is cut in the middle of its longest dim; in a Tree the uplinks of the switches limit it.
    """
    network, wire = cluster.network, cluster.between
    if isinstance(network, Grid):
        dim = max(range(len(network.dims)), key=lambda dim: network.dims[dim])
        wires = prod(network.dims) // network.dims[dim] * (2 if network.closed(dim) else 1)
        return wires * wire.bandwidth
    if cluster.nodes == 1:
        return cluster.devices // 2 * cluster.inside.bandwidth
    crossed = [level.oversubscription for level in network.levels if level.nodes < cluster.nodes]
    return cluster.nodes // 2 * cluster.nics * wire.bandwidth / prod(crossed)


# -- trees ---------------------------------------------------------------------


class _Mouths(NamedTuple):
    """One entry for each (group, domain) with a member in it.

    members  number of the group's members in the domain
    load     units that the group sends out of the domain
    """

    group: NDArray[np.int64]
    domain: NDArray[np.int64]
    members: NDArray[np.int64]
    load: NDArray[np.float64]


def _at_mouths(groups: Groups, ranks: int, pattern: Pattern) -> _Mouths:
    """The load of `groups` at the mouths of domains that have `ranks` ranks each."""
    domains = groups // ranks
    count, size = int(domains.max()) + 1, groups.shape[1]
    pairs = np.arange(len(groups))[:, None] * count + domains
    found, index, members = np.unique(pairs, return_inverse=True, return_counts=True)
    if pattern == "ring":
        leaves = domains != np.roll(domains, -1, axis=1)
        load = np.bincount(index.ravel(), weights=leaves.ravel())
    else:
        load = members * (size - members) / max(1, size - 1)
    return _Mouths(found // count, found % count, members, np.asarray(load, np.float64))


def _in_tree(cluster: Cluster, tree: Tree, groups: Groups, pattern: Pattern) -> float:
    """Bytes/s per rank: the smallest of the bounds from the links inside nodes and all mouths."""
    per_node = cluster.devices_per_node
    mouths = _at_mouths(groups, per_node, pattern)
    # All groups wait for the slowest card.
    slow = (rate for node, rate in cluster.slow if node in mouths.domain)
    card = min(slow, default=cluster.between.bandwidth)
    most = int(mouths.members.max())
    bounds = []
    if most > 1:
        share = (most - 1) / (groups.shape[1] - 1) if pattern == "all" else 1.0
        wires = (most - 1) / (per_node - 1) if cluster.direct else 1.0
        bounds.append(cluster.inside.bandwidth * wires / share)
    busy = mouths.load > 0
    if busy.any():
        cards = np.maximum(1, mouths.members[busy] * cluster.nics // per_node)
        bounds.append(float((cards * card / mouths.load[busy]).min()))
    capacity, nodes = cluster.nics * card, 1
    for level in (Level(1, 1.0), *tree.levels):
        capacity *= level.nodes / nodes / level.oversubscription
        nodes = level.nodes
        mouths = _at_mouths(groups, nodes * per_node, pattern)
        load = float(np.bincount(mouths.domain, weights=mouths.load).max())
        if load > 0:
            bounds.append(capacity / load)
    return min(bounds)


# -- grids ---------------------------------------------------------------------


def distance(grid: Grid, a: int, b: int) -> int:
    """The number of wires on the shortest route from rank `a` to rank `b`."""
    here, there = _coordinates(grid, np.array([a, b])).tolist()
    steps = [abs(x - y) for x, y in zip(here, there, strict=True)]
    return sum(
        min(step, grid.dims[dim] - step) if grid.closed(dim) else step
        for dim, step in enumerate(steps)
    )


def _coordinates(grid: Grid, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The coordinates of ranks in the grid: [rank, dim]."""
    return np.stack(np.unravel_index(ranks, grid.dims), axis=-1)


def _in_grid(grid: Grid, group: NDArray[np.int64], pattern: Pattern) -> tuple[float, int]:
    """(bandwidth of one group in units of a wire's, number of messages of an all-gather)."""
    size = len(group)
    columns = [np.array(sorted(set(one))) for one in _coordinates(grid, group).T.tolist()]
    apart = [int(np.diff(column).min()) if len(column) > 1 else 1 for column in columns]
    extents = [len(column) for column in columns]
    even = all(np.all(np.diff(column) == k) for column, k in zip(columns, apart, strict=True))
    if prod(extents) != size or not even:
        # Not a box: a ring through the members in order; the devices between them share its wires.
        steps = zip(group.tolist(), np.roll(group, -1).tolist(), strict=True)
        longest = max(distance(grid, a, b) for a, b in steps)
        return 1 / longest, (size - 1) * longest
    wires, messages, slowest = 0.0, 0, 0.0
    for dim, (e, k) in enumerate(zip(extents, apart, strict=True)):
        ring = grid.closed(dim) and e * k == grid.dims[dim]
        ports = 2 if ring else 1
        wires += ports / k if e > 1 else 0.0
        messages += k * (e // 2 if ring else e - 1)
        slowest = max(slowest, k * (e * e // 4) / e / ports)  # S bytes through the middle wire
    if pattern == "all":
        wires = (size - 1) / size / slowest
    return wires, messages
