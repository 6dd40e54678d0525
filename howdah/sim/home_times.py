"""How long what is kept off the device takes to move, and what it moves beside
(`plan/homes.py` lists the moves, `parallel/homes.py` makes them).

    fetch    host → device        one move after the other
    evict    device → host        likewise, at the same time: a link carries both directions
    disk     there and back       one after the other, all of them

In the passes, moves run beside computation: weights come one unit ahead of their use, gradients and
activations go behind a block (`sim/rank_clock.py`). An update takes the units in turn, through the
sets of buffers of `parallel/home_update.py`:

    lanes     |1 comes |2 comes |1 goes |3 comes |2 goes |        each lane for itself
    update             |1       |2      |        |3      |        at the speed of the host's memory
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from howdah.machines.cluster import Cluster
from howdah.plan.flat_buffers import Buffer
from howdah.plan.homes import Move, homes, moves, own_length, sets_of
from howdah.plan.plan import Plan
from howdah.plan.storage import SETS
from howdah.plan.sums import Sum
from howdah.shapes.weights import FROZEN
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import kept_elsewhere

LANES = ("fetch", "evict", "disk")

Way = tuple[int, float]  # the lane of a move, and its seconds


def lane_speeds(plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Bytes/s of each lane of a device, on a cluster with attained rates; no more than the run
    asks for (`[storage]`).
    """
    host, storage = cluster.host, plan.storage
    disk = host.disk_bandwidth / cluster.devices_per_node or host.link.bandwidth
    link = min(host.link.bandwidth, storage.host_bandwidth or host.link.bandwidth)
    disk = min(disk, host.link.bandwidth, storage.disk_bandwidth or disk)
    return {"fetch": link, "evict": link, "disk": disk}


def without_moves(plan: Plan, cluster: Cluster) -> tuple[Plan, Cluster]:
    """The same plan on a cluster where moves take no time."""
    link = replace(cluster.host.link, bandwidth=inf)
    host = replace(cluster.host, link=link, disk_bandwidth=inf)
    storage = replace(plan.storage, host_bandwidth=0.0, disk_bandwidth=0.0)
    return replace(plan, storage=storage), replace(cluster, host=host)


def update_bandwidth(cluster: Cluster) -> float:
    """Bytes/s of memory at which a device's states are updated on the host: its part of a node's,
    or its own memory's, where the host's memory is the device's.
    """
    if cluster.host.link.name == "shared":
        return cluster.device.bandwidth
    return cluster.host.memory_bandwidth / cluster.devices_per_node


def lane_of(move: Move) -> str:
    """The lane on which a move runs."""
    return "disk" if move.link == "disk" else move.way


class HomeMoves:
    """The moves of a rank in the passes. Lanes have numbers, from `first` on.

    fetches  by unit, those of its weights
    rows     of the table of tokens, ahead of the embedding
    evicts   by number of a sum of gradients, those behind it
    goes     by block, those of its activations behind the forward pass
    comes    by block, those ahead of the backward pass
    """

    def __init__(
        self, plan: Plan, cluster: Cluster, rank: int, sums: Sequence[Sum], *, first: int
    ) -> None:
        speed = lane_speeds(plan, cluster)
        lane = {name: number for number, name in enumerate(LANES, first)}

        def way(name: str, size: float) -> Way:
            return lane[name], size / speed[name]

        self.fetches: dict[str, Way] = {}
        self.rows: list[Way] = []
        gradients: dict[str, list[Way]] = defaultdict(list)
        for move in moves(plan, rank):
            if move.when == "passes" and move.what == "weights":
                unit = move.unit.removeprefix(FROZEN)  # what is frozen comes with it
                number, more = way(lane_of(move), move.bytes)
                self.fetches[unit] = number, more + self.fetches.get(unit, (0, 0.0))[1]
            elif move.when == "passes" and move.operation == "fetch rows":
                self.rows.append(way(lane_of(move), move.bytes))
            elif move.when == "passes":
                each = move.bytes * move.times / plan.micros
                gradients[move.unit].append(way(lane_of(move), each))
        self.evicts: dict[int, list[Way]] = defaultdict(list)
        for number, row in sorted(enumerate(sums), key=lambda one: not one[1].in_window):
            times = 1 if row.every_micro else plan.micros
            for span in row.spans:
                found = gradients.pop(span.unit, ())
                self.evicts[number] += [(at, seconds * times) for at, seconds in found]
        kept = kept_elsewhere(plan, rank, kernels_of(plan))
        disk = plan.layout.activations == "disk"
        self.goes, self.comes = (
            {part: way("disk" if disk else name, size) for part, size in kept.items()}
            for name in ("evict", "fetch")
        )

    def in_passes(self) -> bool:
        """Whether anything moves in the passes."""
        return bool(self.fetches or any(self.evicts.values()) or self.goes)


def homes_of_rank(
    plan: Plan, cluster: Cluster, rank: int, sums: Sequence[Sum], *, first: int
) -> HomeMoves | None:
    """The moves of a rank in the passes; None where nothing moves then."""
    if homes(plan.layout) == {"device"}:
        return None
    found = HomeMoves(plan, cluster, rank, sums, first=first)
    return found if found.in_passes() else None


# -- the update ------------------------------------------------------------------------


class _Turn(NamedTuple):
    """The update of one unit: its arithmetic, and the seconds of moves before and behind it, by
    lane.
    """

    seconds: float
    comes: Mapping[str, float]
    goes: Mapping[str, float]


def update_seconds(
    plan: Plan, cluster: Cluster, rank: int, held: Sequence[Buffer], *, element: float
) -> float:
    """Seconds from the last backward pass to the end of the update of states that are not on the
    device, moves included.

    element  seconds of the arithmetic of an element
    """
    speed = lane_speeds(plan, cluster)
    before: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    behind: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    norm = 0.0
    for move in moves(plan, rank):
        seconds, lane = move.bytes * move.times / speed[lane_of(move)], lane_of(move)
        if move.when == "norm":
            norm += seconds
        elif move.when == "update":
            goes = move.what == "weights" or (move.what, move.way) == ("optimizer", "evict")
            (behind if goes else before)[move.unit][lane] += seconds
    turns = [
        _Turn(own * element, before[buffer.unit], behind[buffer.unit])
        for buffer in held
        if buffer.trains and (own := own_length(buffer, plan, rank))
    ]
    return norm + _in_turns(turns, sets_of(plan, rank)[0] or SETS)


def _in_turns(turns: Sequence[_Turn], sets: int) -> float:
    """Seconds of an update through so many sets of buffers, with one unit read ahead."""
    now, free = 0.0, dict.fromkeys(LANES, 0.0)
    emptied, coming = [0.0] * sets, list[float]()

    def moved(each: Mapping[str, float]) -> float:
        ends = [now]
        for lane, seconds in each.items():
            free[lane] = max(now, free[lane]) + seconds
            ends.append(free[lane])
        return max(ends)

    ahead = min(1, sets - 1)
    for number, turn in enumerate(turns):
        for one in turns[len(coming) : number + 1 + ahead]:
            now = max(now, emptied[len(coming) % sets])
            coming.append(moved(one.comes))
        now = max(now, coming[number]) + turn.seconds
        emptied[number % sets] = moved(turn.goes)
    return max([now, *free.values()])
