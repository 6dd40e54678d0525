"""The mesh: the position of this rank in the layout, and a communication group for each axis.

    layout dp4 zero1 shard2        rank 0 ── shard ── rank 1        one copy of the states
                                     │ across           │
                                   rank 2 ── shard ── rank 3        the other
    world    0 1 2 3

`plan/mesh_axes.py` decides which ranks communicate along an axis; this file connects them. For an
axis that spans all ranks under the same label, the world group itself is used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from howdah.base.stopwatch import Interval, Stopwatch
from howdah.comm.chosen import choosing
from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.comm.lane import clock_of
from howdah.comm.recorder import Recorder
from howdah.comm.transport import SingleRank, SubgroupFactory, Transport
from howdah.plan.comm import DIRECT, Algorithms
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import Axis, axis
from howdah.plan.recording import IDLE, Wires
from howdah.plan.servers import serves

# The label under which the traffic of an axis is counted: `shard` and `across` are both dp.
# Pipeline stages have links of their own, pair by pair (`stage_links.py`).
LABELS: Mapping[Axis, str] = {"tp": "tp", "cp": "cp", "shard": "dp", "across": "dp"}


@dataclass(frozen=True)
class Mesh:
    """A resolved layout as one rank sees it.

    world       the group of all ranks
    groups      the group along each axis
    transports  the transports that were connected for the groups
    among       connects some of the ranks with a transport of their own
    joined      the groups that `join` has made, with their transports
    members     the ranks of each group of several
    at_close    what is called when the mesh is closed
    waited      runs while computation waits for other ranks
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
    waited: Stopwatch = field(default_factory=Stopwatch)
    members: dict[Group, tuple[int, ...]] = field(default_factory=dict)
    at_close: list[Callable[[], None]] = field(default_factory=list)

    @property
    def tp(self) -> Group:
        """The tp ranks, which hold the other slices of the same blocks."""
        return self.groups["tp"]

    @property
    def cp(self) -> Group:
        """The cp ranks, which have the other tokens of the same samples."""
        return self.groups["cp"]

    @property
    def shard(self) -> Group:
        """The ranks over which one copy of the states of data parallelism is sharded. Without ZeRO,
        or without shardG, these are all replicas, and `across` is this rank alone.
        """
        return self.groups["shard"]

    @property
    def across(self) -> Group:
        """The ranks that hold the same share in the other copies."""
        return self.groups["across"]

    @property
    def wires(self) -> Wires:
        """The classes of link that the counters distinguish."""
        return self.among.wires

    @property
    def serves(self) -> bool:
        """Whether this rank is a parameter server."""
        return serves(self.layout, self.rank)

    @property
    def counts_batch(self) -> bool:
        """Whether this rank counts the tokens of its samples: one rank does so for all ranks along
        pp, cp and tp that compute on the same samples; servers count none.
        """
        first = self.index_of("pp") == self.index_of("cp") == self.index_of("tp") == 0
        return first and not self.serves

    def index_of(self, name: Axis) -> int:
        """The index of this rank along an axis."""
        return axis(self.layout, name).index_of(self.rank)

    def join(self, ranks: Sequence[int], *, label: str) -> Group:
        """A group of `ranks` in addition to those of the axes, counted under `label`. All of these
        ranks call together; ranks that share several groups must join them in the same order.
        """
        transport = self.among(ranks)
        group = Group(transport, axis=label, counters=self.counters)
        self.joined.append((group, transport))
        self.members[group] = tuple(ranks)
        return group

    def group_of(self, ranks: Sequence[int], *, label: str) -> Group:
        """The group of `ranks` counted under `label`: that of an axis, or else joined now."""
        for name, counted in LABELS.items():
            if counted == label and list(axis(self.layout, name).group(self.rank)) == list(ranks):
                return self.groups[name]
        return self.join(ranks, label=label)

    def compare_calls(self) -> None:
        """Compares what all ranks have called on wires that do not compare calls themselves. All
        ranks call together. Raises Disagreement.
        """
        # In one order on all ranks, also of groups that overlap.
        for group, _ in sorted(self.members.items(), key=lambda pair: pair[1]):
            group.compare_calls()

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Closes the mesh. After an error, the other ranks are notified first: they may wait for
        this rank, and this rank's progress threads may wait for them.
        """
        if kind:
            why = str(error).partition("\n")[0] or kind.__name__
            for group in self._every():
                group.abort(why)
        self.close()

    def _every(self) -> set[Group]:
        return {self.world, *self.groups.values(), *(group for group, _ in self.joined)}

    def close(self) -> None:
        """Ends the progress threads of the groups, and closes the transports."""
        for end in self.at_close:
            end()
        for group in self._every():
            group.close()
        for transport in (*self.transports, *(transport for _, transport in self.joined)):
            transport.close()


def connect_mesh(
    layout: Layout, transport: Transport, device: torch.device, algorithms: Algorithms = DIRECT
) -> Mesh:
    """The mesh of `layout` over the ranks that `transport` connects. All ranks call together.

    algorithms  of the collectives of its groups
    """
    transport = choosing(transport, algorithms)
    assert layout.world == transport.size, f"{layout} on {transport.size} ranks"
    clock, rank = clock_of(device), transport.rank
    recorder = Recorder(clock)
    counters = Counters(recorder)
    label = "dp" if layout.world == layout.replicas else "world"
    world = Group(transport, axis=label, counters=counters)
    members = {world: tuple(range(layout.world))}
    groups: dict[Axis, Group] = {}
    joined: list[Transport] = []
    for name, counted in LABELS.items():
        ranks = axis(layout, name).group(rank) if not layout.server else range(rank, rank + 1)
        if len(ranks) == layout.world and counted == label:
            groups[name] = world
            continue
        part = transport.among(ranks) if len(ranks) > 1 else SingleRank()
        joined.append(part)
        groups[name] = Group(part, axis=counted, counters=counters)
        if len(ranks) > 1:
            members[groups[name]] = tuple(ranks)

    def waits(took: Interval) -> None:
        recorder.call("ranks", IDLE, 0, took)

    return Mesh(
        layout=layout,
        rank=rank,
        device=device,
        world=world,
        groups=groups,
        counters=counters,
        transports=tuple(joined),
        among=transport.among,
        waited=Stopwatch(clock, waits),
        members=members,
    )
