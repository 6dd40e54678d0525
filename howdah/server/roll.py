"""Which server process has which shard of the weights, and who follows when one dies.

    replicas 1, of 3 servers    shard 0: on 0, copied to 1
                                shard 1: on 1, copied to 2
                                shard 2: on 2, copied to 0
    server 1 dies               shard 1: on 2 (promote)       shard 0: on 0, copied no more (drop)

Pure: `chain.py` does what is decided here.
"""

from typing import NamedTuple

from howdah.plan.servers import chain_of


class Order(NamedTuple):
    """What a server process is told: `promote` a replica of its, or `drop` a dead one of a chain.

    server  who is told
    """

    server: int
    what: str
    shard: int


class Roll:
    """By shard, the live server processes that have it: who serves, then its replicas, in order."""

    def __init__(self, servers: int, replicas: int) -> None:
        self.holders = {n: chain_of(n, servers, replicas) for n in range(servers)}

    def held_by(self, server: int) -> list[int]:
        """The shards that a server process has."""
        return [shard for shard, chain in self.holders.items() if server in chain]

    @property
    def lost(self) -> list[int]:
        """The shards that nobody has any more."""
        return [shard for shard, chain in self.holders.items() if not chain]

    def died(self, server: int) -> list[Order]:
        """Strikes a server process off; what the others are told."""
        orders = []
        for shard, chain in self.holders.items():
            if server not in chain:
                continue
            place = chain.index(server)
            chain.remove(server)
            orders += [Order(before, "drop", shard) for before in chain[:place]]
            orders += [Order(chain[0], "promote", shard)] if chain and not place else []
        return orders
