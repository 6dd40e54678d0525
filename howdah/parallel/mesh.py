"""The mesh: this process's place in the layout, and a group for each axis.

    layout dp4 zero1 shard2        rank 0 ── shard ── rank 1        one copy of the states
                                     │ across           │
                                   rank 2 ── shard ── rank 3        the other
    world    0 1 2 3

Which ranks talk along an axis is decided in `plan/ranks.py`; here they are joined. An axis that
spans all ranks under the same label is the world itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.comm.transport import Alone, Transport
from howdah.plan.layout import Layout
from howdah.plan.ranks import Axis, axis
from howdah.sim.traffic import Wires

# What talks along an axis is counted under its label: the two cuts of dp are its own.
LABELS: Mapping[Axis, str] = {"tp": "tp", "pp": "pp", "shard": "dp", "across": "dp"}


@dataclass(frozen=True)
class Mesh:
    """A resolved layout seen from one rank.

    world       all ranks
    groups      along each axis
    wires       the classes of link that the counters tell apart
    transports  those that were joined for the groups
    """

    layout: Layout
    rank: int
    device: torch.device
    world: Group
    groups: Mapping[Axis, Group]
    counters: Counters
    wires: Wires
    transports: tuple[Transport, ...]

    @property
    def tp(self) -> Group:
        """The ranks with other parts of the same blocks."""
        return self.groups["tp"]

    @property
    def pp(self) -> Group:
        """The ranks with other stages."""
        return self.groups["pp"]

    @property
    def shard(self) -> Group:
        """The ranks that share out one copy of the states of data parallelism."""
        return self.groups["shard"]

    @property
    def across(self) -> Group:
        """The ranks that hold the same share in other copies."""
        return self.groups["across"]

    def place(self, name: Axis) -> int:
        """Where this rank stands along an axis."""
        return axis(self.layout, name).place(self.rank)

    def close(self) -> None:
        """Ends the groups' progress threads, and lets go of what joined them."""
        for group in {self.world, *self.groups.values()}:
            group.close()
        for transport in self.transports:
            transport.close()


def connect_mesh(layout: Layout, transport: Transport, device: torch.device) -> Mesh:
    """The mesh of `layout` over the ranks that `transport` connects; all call together."""
    assert layout.world == transport.size, f"{layout} on {transport.size} ranks"
    counters, rank = Counters(), transport.rank
    label = "dp" if layout.world == layout.replicas else "world"
    world = Group(transport, axis=label, counters=counters)
    groups: dict[Axis, Group] = {}
    joined: list[Transport] = []
    for name, counted in LABELS.items():
        ranks = axis(layout, name).group(rank)
        if len(ranks) == layout.world and counted == label:
            groups[name] = world
            continue
        part = transport.among(ranks) if len(ranks) > 1 else Alone()
        joined.append(part)
        groups[name] = Group(part, axis=counted, counters=counters)
    wires = Wires(transport.link, transport.link)
    return Mesh(layout, rank, device, world, groups, counters, wires, tuple(joined))
