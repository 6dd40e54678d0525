"""A profile of the box as a Cluster, for prices: its cards, leaf switches and slow cards.

Rates are what a payload gets: of a full frame of TCP over Ethernet, 1514 bytes, 1448 are payload.
What a message costs is not in a profile: it is measured (`howdah/comm/topology.py`).
"""

from profiles import MBIT, Profile

from howdah.machines.cluster import Cluster, Efficiency, Host, Level, Link, Tree
from howdah.machines.topology import STAND_IN, Pair

PAYLOAD = 1448 / 1514
NOTHING = Pair(1e12, 0.0, 0.0)


def rate(mbit: float) -> float:
    """Bytes/s of payload."""
    return mbit * MBIT / 8 * PAYLOAD


def cluster_of(
    name: str, profile: Profile, hosts: int, each: int, *, wire: Pair, inside: Pair = NOTHING
) -> Cluster:
    """The profile with `each` ranks on every host.

    wire    latency and work of a message between hosts, as measured; its rate is the profile's
    inside  the link between the ranks of a host
    """
    levels = () if not profile.leaf else (Level(profile.leaf, float(profile.over)),)
    return Cluster(
        name=name,
        device=STAND_IN,
        devices_per_node=each,
        nodes=hosts,
        inside=Link("inside", inside.rate, inside.latency, inside.message),
        between=Link("card", rate(profile.card), wire.latency, wire.message),
        network=Tree(levels),
        host=Host(1e12, Link("host", 1e12, 0.0)),
        efficiency=Efficiency(1.0, 1.0, 1.0, 1.0),
        slow=tuple((host, rate(mbit)) for host, mbit in sorted(profile.slow.items())),
    )
