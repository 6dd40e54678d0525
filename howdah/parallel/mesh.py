"""The mesh: this process's place in the layout, and a group for each axis.

    layout dp4 zero1 shard2        rank 0 ── shard ── rank 1        one copy of the states
                                     │ across           │
                                   rank 2 ── shard ── rank 3        the other
    world    0 1 2 3

Which ranks talk along an axis is decided in `plan/mesh_axes.py`; here they are joined. An axis that
spans all ranks under the same label is the world itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.comm.transport import SingleRank, SubgroupFactory, Transport
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import Axis, axis
from howdah.plan.recording import Wires

# What talks along an axis is counted under its label: the two cuts of dp are its own.
# Stages have links of their own, pair by pair (`links.py`).
LABELS: Mapping[Axis, str] = {"tp": "tp", "shard": "dp", "across": "dp"}


@dataclass(frozen=True)
class Mesh:
    """A resolved layout seen from one rank.

    world       all ranks
    groups      along each axis
    transports  those that were joined for the groups
    among       joins some of all ranks in a transport of their own
    """

    layout: Layout
    rank: int
    device: torch.device
    world: Group
    groups: Mapping[Axis, Group]
    counters: Counters
    transports: tuple[Transport, ...]
    among: SubgroupFactory
    joined: list[tuple[Group, Transport]] = field(default_factory=list)

    @property
    def tp(self) -> Group:
        """The ranks with other parts of the same blocks."""
        return self.groups["tp"]

    @property
    def shard(self) -> Group:
        """The ranks that share out one copy of the states of data parallelism: without ZeRO, or
        without shardG, all replicas, and `across` is this rank alone.
        """
        return self.groups["shard"]

    @property
    def across(self) -> Group:
        """The ranks that hold the same share in other copies."""
        return self.groups["across"]

    @property
    def wires(self) -> Wires:
        """The classes of link that the counters tell apart."""
        return self.among.wires

    @property
    def counts_batch(self) -> bool:
        """Whether this rank counts the tokens of its samples, on which others compute as well."""
        return self.place("pp") == self.place("cp") == self.place("tp") == 0

    def place(self, name: Axis) -> int:
        """Where this rank stands along an axis."""
        return axis(self.layout, name).place(self.rank)

    def join(self, ranks: Sequence[int], *, label: str) -> Group:
        """A group of these ranks beside those of the axes, counted under `label`; they all call
        together, and those who are in several groups join them in one order.
        """
        transport = self.among(ranks)
        group = Group(transport, axis=label, counters=self.counters)
        self.joined.append((group, transport))
        return group

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Closes. Where an error leaves, the others are told first: they may wait for this rank,
        and its own progress threads for them.
        """
        if error:
            for group in self._every():
                group.abort()
        self.close()

    def _every(self) -> set[Group]:
        return {self.world, *self.groups.values(), *(group for group, _ in self.joined)}

    def close(self) -> None:
        """Ends the groups' progress threads, and lets go of what joined them."""
        for group in self._every():
            group.close()
        for transport in (*self.transports, *(transport for _, transport in self.joined)):
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
        part = transport.among(ranks) if len(ranks) > 1 else SingleRank()
        joined.append(part)
        groups[name] = Group(part, axis=counted, counters=counters)
    among = transport.among
    return Mesh(layout, rank, device, world, groups, counters, tuple(joined), among)
