"""Topology: hosts and the links between them, as they were measured, and the Cluster that they are.

    rates of flows, Mbit/s     of two leaf switches of two hosts, whose uplinks carry a fourth
    to      0    1    2    3
    from 0  -    950  238  238     cards 950: the most that a host has sent, or received
         1  950  -    238  238     leaves of 2: the largest equal blocks inside of which all flows
         2  238  238  -    950     have the rate of the cards
         3  238  238  950  -       4:1: two cards over what two flows got that left a block at once

Which flows ran at once is said by `phases`, for those who measure (`comm/topology.py`) and for what
is read from their rates here.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from howdah.base.files import parse_json
from howdah.machines.cluster import Cluster, Device, Efficiency, Flops, Host, Level, Link, Tree

FULL = 0.7  # of the cards' rate: a flow that has less was held up between them
SLOW = 0.8  # of the usual card's rate: a card that has less is slow
MOST_PAIRS = 8  # hosts of which all pairs are measured; of more, some
FILE = 1  # version of the text
STAND_IN = Device("host", 1e12, 1e12, Flops(float32=1e12))  # no algorithm depends on it
Rates = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Pair:
    """A link between ranks: bytes/s, seconds of a message's way, and those that it keeps a rank at
    its ends busy.
    """

    rate: float
    latency: float
    message: float


@dataclass(frozen=True)
class Topology:
    """Hosts of equal numbers of ranks, and their links.

    hosts    names, in the order of their ranks
    ranks    of a host
    rates    bytes/s from host to host, [from][to], while other pairs talk too; 0: not measured
    latency  seconds of a round of messages between hosts
    message  seconds of a message for a rank at its ends
    inside   the link between ranks of a host; None: it has one rank
    date     of the measurement
    """

    hosts: tuple[str, ...]
    ranks: int
    rates: Rates
    latency: float
    message: float
    inside: Pair | None = None
    date: str = ""


def cards_of(topology: Topology) -> list[float]:
    """Bytes/s of each host's card: the lower one of the most that it sent and received."""
    rates = topology.rates
    return [min(max(rates[h]), max(row[h] for row in rates)) for h in range(len(rates))]


def phases(hosts: int) -> list[list[tuple[int, int]]]:
    """Flows (from, to) that are measured at once: every host sends, or receives, once at most.

    >>> phases(4)[:3]
    [[(0, 1), (2, 3)], [(1, 2), (3, 0)], [(0, 2), (1, 3)]]
    """
    steps = [*range(1, hosts)]
    if hosts > MOST_PAIRS:
        steps = [1 << k for k in range((hosts - 1).bit_length())]
    found = []
    for step in steps:
        left = [(h, (h + step) % hosts) for h in range(hosts)]
        while left:
            one: list[tuple[int, int]] = []
            for flow in left:
                if not {*flow} & {host for other in one for host in other}:
                    one.append(flow)
            left = [flow for flow in left if flow not in one]
            found.append(one)
    return found


def slow_cards(topology: Topology) -> dict[int, float]:
    """Bytes/s of the hosts whose cards are slow beside the usual one; of two, none can be told."""
    cards = cards_of(topology)
    if len(cards) < 3:
        return {}
    usual = median(cards)
    return {h: rate for h, rate in enumerate(cards) if rate < SLOW * usual}


def levels(topology: Topology) -> tuple[Level, ...]:
    """The leaf switches of equal numbers of hosts, in their order, if flows between them were held
    up, of each host; none: all hosts seem to be on one switch, of which a link may be slow.
    """
    count, cards, rates = len(topology.hosts), cards_of(topology), topology.rates

    def held_up(a: int, b: int) -> bool:
        return 0 < rates[a][b] < FULL * min(cards[a], cards[b])

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b and held_up(a, b)]
    sizes = [n for n in range(2, count // 2 + 1) if count % n == 0]
    fits = [n for n in sizes if all(a // n != b // n for a, b in pairs)]
    if not fits or {a for a, _ in pairs} != {*range(count)}:
        return ()
    nodes, shares = fits[-1], []
    for leaf in range(count // nodes):
        whole = sum(cards[leaf * nodes : (leaf + 1) * nodes])
        left = [
            sum(rates[a][b] for a, b in flows if a // nodes == leaf != b // nodes)
            for flows in phases(count)
        ]
        shares.append(whole / max(*left, 1e-9))
    return (Level(nodes, max(median(shares), 1.0)),)


def cluster_of(topology: Topology) -> Cluster:
    """The hosts as a cluster for prices of programs. Its rates are measured: count on them. The
    device is a stand-in.
    """
    slow, cards = slow_cards(topology), cards_of(topology)
    usual = median([rate for h, rate in enumerate(cards) if h not in slow])
    between = Link("measured", usual, topology.latency, topology.message)
    one = topology.inside or Pair(1e12, 0.0, 0.0)
    return Cluster(
        name=f"{len(topology.hosts)} hosts",
        device=STAND_IN,
        devices_per_node=topology.ranks,
        nodes=len(topology.hosts),
        inside=Link("inside", one.rate, one.latency, one.message),
        between=between,
        network=Tree(levels(topology)),
        host=Host(1e12, Link("host", 1e12, 0.0)),
        efficiency=Efficiency(1.0, 1.0, 1.0, 1.0),
        slow=tuple(sorted(slow.items())),
    )


# -- files ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A topology, and what programs on it took beside their prices (`sim/selector.py`).

    corrections  rows (operation, algorithm, groups, bytes, measured seconds over the price)
    """

    topology: Topology
    corrections: tuple[tuple[str, str, str, int, float], ...] = field(default=())


def spell(kept: Kept) -> str:
    """As JSON."""
    return json.dumps({"file": FILE, **asdict(kept)}, indent=1)


def parse(text: str) -> Kept | None:
    """What `spell` wrote; None for anything else, which is measured again."""
    try:
        table = parse_json(text.encode())
        if table["file"] != FILE:
            return None
        return Kept(_topology(table["topology"]), tuple(map(_row, table["corrections"])))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _topology(table: dict[str, Any]) -> Topology:
    hosts, inside = tuple(map(str, table["hosts"])), table["inside"]
    rates = tuple(tuple(_positive(rate) for rate in row) for row in table["rates"])
    if [len(row) for row in rates] != [len(hosts)] * len(hosts) or int(table["ranks"]) < 1:
        raise ValueError("rates are not those of the hosts")
    names = ("rate", "latency", "message")
    one = Pair(*(_positive(inside[name]) for name in names)) if inside else None
    ways = _positive(table["latency"]), _positive(table["message"])
    return Topology(hosts, int(table["ranks"]), rates, *ways, one, str(table["date"]))


def _row(row: Sequence[Any]) -> tuple[str, str, str, int, float]:
    op, algorithm, groups, size, factor = row
    return str(op), str(algorithm), str(groups), int(size), _positive(factor)


def _positive(value: Any) -> float:
    if not (isfinite(value) and value >= 0):
        raise ValueError("a measured number is no number")
    return float(value)
