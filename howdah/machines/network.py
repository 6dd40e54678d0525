"""What the wires give a group of ranks, while all the groups of its axis talk at once.

A collective over n ranks with S bytes each takes, per all-gather or reduce-scatter,

    messages · latency  +  (n-1)/n · S / bandwidth

and `path` finds the three. What a rank sends in that time, (n-1)/n · S, is the *unit*. The
groups of an axis are the rows of an array (`axis_groups`); they load the network together.

In a Tree the load is counted at the mouth of every domain: a node, then whatever each level of
switches joins. A ring crosses a mouth once for each of its edges that leaves, so 16 neighbouring
nodes under a switch send one unit out of it, while pairs of far nodes send one unit each:

    mouth of      capacity, bytes/s               load of a ring     of an all-to-all
    a node        nics · B                        edges that leave   Σ (outside) / (n-1)
    a level's     nodes · nics · B                the same           the same
      switches      / its oversubscription and those below it

    bandwidth = min( inside,  cards of the members · B / their load,  capacity / load, ... )

Where a group's ring leaves its node once that is min(inside, members · B per device). The second
term is a group's own: alone on the network, it still has no more cards than its members.

In a Grid every device has one wire each way along each dim. A group that is a box of the grid,
e[i] members along dim i and k[i] apart, all-gathers along all its dims at once:

    bandwidth = Σ ports[i] · B / k[i]        messages = Σ k[i] · (e[i] // 2, or e[i]-1 in a line)

with 2 ports where the dim closes to a ring and the group goes around it, else 1 (the k groups
between two members share the wire). An all-to-all is bound by the middle of its longest dim:
e·S/8B on a ring, e·S/4B on a line.
"""

from dataclasses import dataclass
from math import inf, prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from howdah.machines.cluster import Cluster, Grid, Level, Link, Tree

Groups = NDArray[np.int64]  # a row per group: its ranks, in the order of the ring
Pattern = Literal["ring", "all"]


@dataclass(frozen=True)
class Path:
    """The wires as one group sees them.

    link      name of the slowest link met; bytes/s per rank; seconds per message
    messages  one after another in an all-gather
    nodes     that the most scattered group spans
    members   of a group on one node, at most
    """

    link: Link
    messages: int
    nodes: int
    members: int


def axis_groups(world: int, *, size: int, stride: int) -> Groups:
    """The groups of a mesh axis of `size` whose neighbours are `stride` ranks apart.

    >>> axis_groups(8, size=2, stride=2).tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    if world % (size * stride):
        raise ValueError(f"{world} ranks have no axis of {size} ranks, {stride} apart")
    ranks = np.arange(world).reshape(world // (size * stride), size, stride)
    return ranks.swapaxes(1, 2).reshape(-1, size)


def path(cluster: Cluster, groups: Groups, *, pattern: Pattern = "ring") -> Path:
    """What each of `groups` gets when all of them talk at once.

    groups   ranks, one group per row, all of one size; from `axis_groups`, or any other
    pattern  ring: neighbours send to neighbours; all: everyone to everyone
    """
    if groups.max() >= cluster.devices or np.unique(groups).size != groups.size:
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
    else:
        wire = cluster.between if nodes > 1 else cluster.inside
        bandwidth = _in_tree(cluster, cluster.network, groups, pattern)
        messages = size - 1
    return Path(Link(wire.name, bandwidth, wire.latency), messages, nodes, members)


def bisection(cluster: Cluster) -> float:
    """Bytes/s, one way, between the two halves of the cluster: the cut of the longest dim,
    or what the switches let through.
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
    """Every (group, domain) that meet: how many members are there, and the units they send out."""

    group: NDArray[np.int64]
    domain: NDArray[np.int64]
    members: NDArray[np.int64]
    load: NDArray[np.float64]


def _at_mouths(groups: Groups, ranks: int, pattern: Pattern) -> _Mouths:
    """The load of `groups` at the mouths of domains of `ranks` ranks each."""
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
    """Bytes/s per rank: the least of what the links inside and all mouths leave."""
    card, per_node = cluster.between.bandwidth, cluster.devices_per_node
    mouths = _at_mouths(groups, per_node, pattern)
    most = int(mouths.members.max())
    bounds = []
    if most > 1:
        share = (most - 1) / (groups.shape[1] - 1) if pattern == "all" else 1.0
        bounds.append(cluster.inside.bandwidth / share)
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
    """Wires on the shortest way from rank `a` to rank `b`."""
    here, there = _coordinates(grid, np.array([a, b])).tolist()
    steps = [abs(x - y) for x, y in zip(here, there, strict=True)]
    return sum(
        min(step, grid.dims[dim] - step) if grid.closed(dim) else step
        for dim, step in enumerate(steps)
    )


def _coordinates(grid: Grid, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where ranks sit: [rank, dim]."""
    return np.stack(np.unravel_index(ranks, grid.dims), axis=-1)


def _in_grid(grid: Grid, group: NDArray[np.int64], pattern: Pattern) -> tuple[float, int]:
    """Bandwidth of one group in wires, and the messages of an all-gather."""
    size = len(group)
    columns = [np.unique(column) for column in _coordinates(grid, group).T]
    apart = [int(np.diff(column).min()) if len(column) > 1 else 1 for column in columns]
    extents = [len(column) for column in columns]
    even = all(np.all(np.diff(column) == k) for column, k in zip(columns, apart, strict=True))
    if prod(extents) != size or not even:
        # No box: a ring through the members in order, whose wires the skipped devices share.
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
