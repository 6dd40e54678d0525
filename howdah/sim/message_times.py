"""How long messages take on a cluster: sums of gradients, gathers of weights, exchanges.

    reduce-scatter, all-gather   bytes that a rank sends / bandwidth  +  messages · latency
    all-reduce                   both, one after the other
    push, pull                   bytes of the busier end, worker or server, / bandwidth  +  latency
                                 a push to servers that only add: twice that, there and back

Bandwidth, messages and latency are those of the path between the row's own ranks, while all groups
of the same kind communicate (`machines/network.py`). A path is looked up once for each kind:

    a sum over replicas      ranks 0 8 16 24, and at the same time 1 9 17 25, …
    a tensor to stage 1      ranks 0 32, and at the same time 1 33, 2 34, …
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from howdah.machines.cluster import Cluster
from howdah.machines.network import Groups, Pattern, axis_groups, collective_path, path
from howdah.plan.exchanges import Exchange
from howdah.plan.flat_buffers import Buffer
from howdah.plan.gather_order import gather_counts
from howdah.plan.gathers import Gather, gathers
from howdah.plan.mesh_axes import Axis, Stride, axis
from howdah.plan.plan import Plan
from howdah.plan.quantised import hops
from howdah.plan.servers import chain_of, largest_share
from howdah.plan.sharding import shard_axes
from howdah.plan.sums import ROW_NUMBER_BYTES, Sum, fill_buckets
from howdah.shapes.weights import FROZEN
from howdah.sim.chosen import Collective, ProgramTimes, gathers_of, of_exchange
from howdah.sim.home_times import LANES, homes_of_rank
from howdah.sim.profile import PLAIN, Profile, curve_of
from howdah.sim.traffic import HALVES, expected_rows

# To every other member, or to the next; what is not here is a collective.
PATTERNS: dict[str, Pattern] = {"all_to_all": "all", "counts": "all", "send": "ring"}
AXES: dict[str, Axis] = {"tp": "tp", "cp": "cp", "ep": "ep", "dp": "replicas", "pp": "pp"}
CONTEXT_AXES: dict[str, Axis] = {"send": "ring", "all_to_all": "traders"}  # of messages over cp


class MessageTimes:
    """Seconds of the messages of a plan on a cluster with attained rates.

    profile  says in how many messages tokens go to experts, and weights to their users
    """

    def __init__(self, plan: Plan, cluster: Cluster, profile: Profile = PLAIN) -> None:
        self._plan, self.cluster, self._programs = plan, cluster, ProgramTimes(plan, cluster)
        self._profile = profile
        # by axis, places in its groups (none: all) and pattern: bytes/s and seconds of latency
        self._paths: dict[tuple[Stride, tuple[int, ...], Pattern | None], tuple[float, float]] = {}

    def of_sum(self, row: Sum) -> float:
        """Seconds of a sum of gradients; none where a rank has all of it, and takes it home."""
        if len(row.ranks) == 1:
            return 0.0
        width, seconds, direct = self._plan.sent_gradient_bytes, 0.0, list[int]()
        if row.op == "push":
            ways = 1 if self._plan.layout.servers_update else 2
            return ways * self._served(row.messages, width, copies=self._copies())
        if row.hops:
            return self._hopped(row)
        rows, dense = expected_rows(self._plan, row.ranks[0]) if row.row else (0, 1)
        if not dense:
            bandwidth, latency = self._path(row.axis, row.ranks)
            size = rows * (row.row * width + ROW_NUMBER_BYTES)
            return size * (len(row.ranks) - 1) / bandwidth + 2 * latency
        for elements in row.messages:
            chosen = self._chosen(row.axis, Collective(row.op, row.ranks, elements, width))
            if chosen is None:
                direct.append(elements)
            else:
                seconds += chosen
        return seconds + self._gathered(row.axis, row.ranks, direct, width) * len(HALVES[row.op])

    def _hopped(self, row: Sum) -> float:
        """Seconds of a sum in 4 bits, hop behind hop."""
        seconds, sizes = 0.0, [len(ranks) for ranks in row.hops]
        for elements in row.messages:
            for ranks, hop in zip(row.hops, hops(elements, sizes), strict=True):
                bandwidth, latency = self._path(row.axis, ranks, "all")
                seconds += hop.message * (hop.ranks - 1) / bandwidth + latency
        return seconds

    def of_gather(self, rank: int, buffer: Buffer, often: int = 1) -> float:
        """Seconds in which the weights of a unit of `rank` are gathered: the mean of those of a
        step, in which it comes so often.
        """
        if self._plan.layout.server:
            return self._served([buffer.length], self._plan.compute_bytes)
        rows = gathers(self._plan, rank, buffer, often)
        seconds = sum(self._of_row(row) * row.times for row in rows) / max(often, 1)
        return seconds + self._owned(rank, buffer)

    def _owned(self, rank: int, buffer: Buffer) -> float:
        """Seconds by which a unit comes later because each of its weights is sent by its owner, one
        after the other: no rank has more than one message, and no message more than one weight.
        """
        ranks = shard_axes(self._plan.layout, buffer.unit)[0].group(rank)
        if not self._profile.owners or len(ranks) == 1:
            return 0.0
        share = min(len(ranks) / len(self._plan.weights), 1.0)
        _, latency = self._path("dp", ranks)
        return max(len(buffer.names) * share - 1, 0.0) * latency

    def _of_row(self, row: Gather) -> float:
        calls = [*gathers_of(self._plan, row)]
        if (together := self._chosen("dp", *calls)) is not None:
            return together
        times = [self._chosen("dp", call) for call in calls]
        chosen = sum(seconds for seconds in times if seconds is not None)
        direct = sum(call.elements for call, one in zip(calls, times, strict=True) if one is None)
        return chosen + self._gathered("dp", row.ranks, [direct] if direct else [], row.width)

    def of_exchange(self, row: Exchange, rank: int) -> float:
        """Seconds of all exchanges of a row of `rank`."""
        name = CONTEXT_AXES.get(row.operation, "cp") if row.axis == "cp" else AXES[row.axis]
        ranks: Sequence[int] = axis(self._plan.layout, name).group(rank)
        if row.axis == "pp":
            ranks = sorted({rank, *row.peers})
        call = of_exchange(row)
        if call is not None and (once := self._chosen(row.axis, call)) is not None:
            return once * row.programs
        bandwidth, latency = self._path(row.axis, ranks, PATTERNS.get(row.operation))
        to = np.fromiter(row.peers, np.int64)
        sizes = np.broadcast_to(row.sizes, to.shape)
        sent = int(sizes[to != rank].sum())
        # Heads for tokens: a message is gathered from, and dealt out to, heads that are far apart.
        copied = 4 * int(sizes.sum()) if name == "traders" else 0  # read and written, twice
        return sent / bandwidth + row.times * latency + copied / self.cluster.device.bandwidth

    def of_scalars(self) -> float:
        """Seconds in which all ranks sum a few numbers."""
        world = self._plan.layout.world
        found = path(self.cluster, np.arange(world)[None])
        return 2 * found.messages * found.link.latency

    def _copies(self) -> int:
        """How often a push goes over the network: to its server, and on to its replicas."""
        sync, servers = self._plan.method.sync, self._plan.layout.server
        return len(chain_of(0, servers, sync.replicas)) if sync else 1

    def _served(self, messages: Sequence[int], width: int, copies: int = 1) -> float:
        """Seconds in which workers push gradients, or pull weights, of so many elements each: those
        of the busier end, a worker with all of them or a server with its range for every worker.
        Under `method.sync` the layout is of one worker, and all are taken to push at the same time.

        copies  how often each message comes to a server
        """
        layout, sync = self._plan.layout, self._plan.method.sync
        bandwidth, latency = self._path("dp", range(layout.world), "all")
        workers = layout.workers * (sync.workers if sync else 1)
        busier = max(1.0, copies * workers * largest_share(layout, self._plan.comm))
        return sum(messages) * width * busier / bandwidth + len(messages) * latency

    def _chosen(self, label: str, *calls: Collective) -> float | None:
        """Seconds of chosen programs that start together; None where there is none for one."""
        if not self._plan.comm.algorithm:
            return None
        return self._programs.seconds(calls[0], self._groups(label, calls[0].ranks), *calls[1:])

    def _gathered(
        self, label: str, ranks: Sequence[int], messages: Sequence[int], width: int
    ) -> float:
        """Seconds of all-gathers or reduce-scatters, by the elements of each, of `width` bytes."""
        bandwidth, latency = self._path(label, ranks)
        sent = sum(messages) * width * (len(ranks) - 1) / len(ranks)
        return sent / bandwidth + len(messages) * latency

    def _path(
        self, label: str, ranks: Sequence[int], pattern: Pattern | None = None
    ) -> tuple[float, float]:
        """Bytes/s, and seconds of latency of a message, on the path of `ranks` along an axis;
        without a pattern that of collectives.
        """
        key = *_places(self._plan, label, ranks), pattern
        if key not in self._paths:
            groups = self._groups(label, ranks)
            if pattern:
                found = path(self.cluster, groups, pattern=pattern)
            else:
                found = collective_path(self.cluster, groups)
            if (
                label == "ep"
                and self._profile.once
                and found.nodes > 1
                and self._plan.shape.experts
            ):
                wire, share = self.cluster.between, _crossing(self._plan, found.nodes)
                wider = replace(wire, bandwidth=wire.bandwidth / share)
                found = path(
                    replace(self.cluster, between=wider), groups, pattern=pattern or "ring"
                )
            call = curve_of(self.cluster.device).call
            latency = found.messages * found.link.latency + call
            self._paths[key] = found.link.bandwidth, latency
        return self._paths[key]

    def _groups(self, label: str, ranks: Sequence[int]) -> Groups:
        """The ranks of all groups that communicate as `ranks` do, one group in a row."""
        along, places = _places(self._plan, label, ranks)
        every = axis_groups(self._plan.layout.world, size=along.size, stride=along.stride)
        return every[:, places] if places else every


def _crossing(plan: Plan, nodes: int) -> float:
    """Of the copies of a token that leave its node, those that are left where each other node gets
    one, if its experts are drawn evenly.
    """
    assert plan.shape.experts is not None
    chosen, others = plan.shape.experts.top_k, nodes - 1
    return others * (1 - (others / nodes) ** chosen) * nodes / (chosen * others)


def _places(plan: Plan, label: str, ranks: Sequence[int]) -> tuple[Stride, tuple[int, ...]]:
    """The axis of `ranks`, and their places along it; none: they are all ranks along it."""
    if isinstance(ranks, range):
        return Stride(len(ranks), ranks.step), ()
    along = axis(plan.layout, AXES[label])  # some of the ranks along an axis
    return along, tuple(along.index_of(rank) for rank in ranks)


class RankMessages:
    """The messages of a rank that run beside its computation. Those of one group of ranks run one
    after the other, in the group's *lane*.

    groups     their number
    lanes      number of all lanes, those of homes included
    sums       the sums of gradients
    of_sum     lane and seconds of each
    of_gather  by unit whose weights are gathered, lane and seconds of that
    buckets    these units in the order of the forward pass, as zero1 and zero2 send them
    homes      the moves from and to homes, in lanes behind those of the groups; None if nothing
               moves in the passes
    by_use     whether weights come whenever they are used, in place of once after an update
    comes      by unit whose weights come, lane and seconds of each message or move
    """

    def __init__(
        self,
        times: MessageTimes,
        plan: Plan,
        rank: int,
        *,
        sums: Sequence[Sum],
        held: Sequence[Buffer],
    ) -> None:
        layout = plan.layout
        every = range(layout.world) if layout.servers_update else None
        inside = {b.unit: every or shard_axes(layout, b.unit)[0].group(rank) for b in held}
        moves = [b for b in held if b.trains or layout.zero == 3]  # what is frozen has not changed
        cut = [b for b in moves if (layout.zero or every) and len(inside[b.unit]) > 1]
        groups = [*(row.ranks for row in sums), *(inside[b.unit] for b in cut)]
        lane = {ranks: number for number, ranks in enumerate(dict.fromkeys(groups))}
        self.groups, self.sums = len(lane), sums
        self.of_sum = [(lane[row.ranks], times.of_sum(row)) for row in sums]
        often = gather_counts(plan, rank) if layout.hpz else {}
        whole: defaultdict[tuple[str, int], float] = defaultdict(float)  # with what is frozen
        for b in cut:
            unit = b.unit.removeprefix(FROZEN)
            whole[unit, lane[inside[b.unit]]] += times.of_gather(rank, b, often.get(unit, 1))
        self.of_gather = {unit: (number, seconds) for (unit, number), seconds in whole.items()}
        least = 1 if every else None  # servers send unit by unit
        filled = fill_buckets(cut, element_bytes=plan.compute_bytes, least_bytes=least)
        names = [[buffer.unit.removeprefix(FROZEN) for buffer in bucket] for bucket in filled]
        self.buckets = [[*dict.fromkeys(bucket)] for bucket in names]
        self.homes = homes_of_rank(plan, times.cluster, rank, sums, first=self.groups)
        self.lanes = self.groups + len(LANES) * bool(self.homes)
        self.by_use = layout.zero == 3 or layout.weights != "device"
        fetches = self.homes.fetches if self.homes else {}
        self.comes = {
            unit: tuple(each[unit] for each in (fetches, self.of_gather) if unit in each)
            for unit in dict.fromkeys(b.unit.removeprefix(FROZEN) for b in held)
            if unit in fetches or unit in self.of_gather
        }
