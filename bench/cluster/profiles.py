"""The networks of the cluster in a box, as data: hosts, switches, and the rate of every wire.

    flat                 leaves and spines, here two hosts a leaf and two spines

     switch              spine 0       spine 1
     | | | |               |  \\       /  |
     0 1 2 3               |    \\   /    |
                           |     / \\     |
                         leaf 0        leaf 1
                          |  |          |  |
                          0  1          2  3

What goes to host h of a leaf goes over spine h modulo the number of spines (Al-Fares et al. 2008):
each pair of hosts has one path, and where no two hosts send to the same one, a tree at full
bisection gives every card its rate.

This file knows no network: `box.py` builds what it describes, and `prove.py` measures it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from howdah.base.errors import UserError, nearest

MOST_HOSTS = 64
MBIT = 1_000_000  # bits/s


@dataclass(frozen=True)
class Profile:
    """A network.

    card    Mbit/s of a host's card, in each direction
    leaf    hosts of a leaf switch; 0: one switch joins all
    over    how many times more the cards of a leaf carry than its wires to the spines
    spines  number of spine switches
    slow    Mbit/s of single cards, by host
    proven  whether its links must reach their rates: not where processors are the bound
    """

    card: int
    leaf: int = 0
    over: int = 1
    spines: int = 1
    slow: Mapping[int, int] = field(default_factory=dict)
    proven: bool = True

    @property
    def uplink(self) -> int:
        """Mbit/s between a leaf and one spine."""
        return self.card * self.leaf // (self.over * self.spines)


PROFILES: dict[str, Profile] = {
    "flat-1g": Profile(1000),
    "spine-leaf": Profile(1000, leaf=2, over=4),
    "fat-tree": Profile(1000, leaf=2, spines=2),
    "edge-100m": Profile(100),
    "slow-card": Profile(1000, slow={1: 250}),
    "flat-10g": Profile(10_000, proven=False),
}


@dataclass(frozen=True)
class Wire:
    """A wire between two of the network's places, such as ("host0", "leaf0"), and its Mbit/s."""

    ends: tuple[str, str]
    rate: int


def profile_named(name: str, hosts: int) -> Profile:
    """The profile, if it can have so many hosts. Raises UserError."""
    if name not in PROFILES:
        raise UserError(f"there is no profile {name!r}{nearest(name, PROFILES)}")
    found = PROFILES[name]
    if not 1 <= hosts <= MOST_HOSTS:
        raise UserError(f"--hosts is {hosts}; a box has 1 to {MOST_HOSTS}")
    if lacking := [host for host in found.slow if host >= hosts]:
        raise UserError(
            f"profile {name} has a slow card in host {lacking[0]}: take {lacking[0] + 1} hosts or "
            "more"
        )
    return found


def leaf_of(profile: Profile, host: int) -> int:
    """The leaf switch of a host."""
    return host // profile.leaf if profile.leaf else 0


def spine_to(profile: Profile, host: int) -> int:
    """The spine over which other leaves reach a host."""
    return host % profile.leaf % profile.spines


def switches(profile: Profile, hosts: int) -> list[str]:
    """The names of all switches."""
    leaves = leaf_of(profile, hosts - 1) + 1
    spines = profile.spines if leaves > 1 else 0
    return [*(f"leaf{n}" for n in range(leaves)), *(f"spine{n}" for n in range(spines))]


def card_rate(profile: Profile, host: int) -> int:
    """Mbit/s of a host's card."""
    return profile.slow.get(host, profile.card)


def wires(profile: Profile, hosts: int) -> list[Wire]:
    """All wires: those of the cards first, in the order of hosts."""
    found = [
        Wire((f"host{h}", f"leaf{leaf_of(profile, h)}"), card_rate(profile, h))
        for h in range(hosts)
    ]
    names = switches(profile, hosts)
    pairs = [(a, b) for a in names for b in names if a.startswith("leaf") and b.startswith("spine")]
    return [*found, *(Wire(pair, profile.uplink) for pair in pairs)]


def path(profile: Profile, source: int, to: int) -> list[tuple[str, str]]:
    """The wires from one host to another, each in the direction in which it is used."""
    first, last = leaf_of(profile, source), leaf_of(profile, to)
    spine = [] if first == last else [f"spine{spine_to(profile, to)}"]
    leaves = [f"leaf{first}"] if first == last else [f"leaf{first}", *spine, f"leaf{last}"]
    stops = [f"host{source}", *leaves, f"host{to}"]
    return [*pairwise(stops)]


def fair_rates(profile: Profile, hosts: int, flows: Sequence[tuple[int, int]]) -> list[float]:
    """Mbit/s of each flow (source, to) when all send at once and share each wire evenly: wires are
    filled one after the other, the fullest first (max-min fairness).
    """
    rate = {end: float(w.rate) for w in wires(profile, hosts) for end in (w.ends, w.ends[::-1])}
    paths = [path(profile, *flow) for flow in flows]
    given: dict[int, float] = {}
    while len(given) < len(flows):
        users = {w: [n for n, p in enumerate(paths) if w in p and n not in given] for w in rate}
        wire = min((w for w in rate if users[w]), key=lambda w: rate[w] / len(users[w]))
        share = rate[wire] / len(users[wire])
        for flow in users[wire]:
            given[flow] = share
            for used in paths[flow]:
                rate[used] -= share
    return [given[n] for n in range(len(flows))]
