"""The table [comm] of a recipe: by which algorithms collectives travel.

    comm.algorithm = "ring"                       every operation that has an algorithm so called

    [comm.algorithm]                              or each by itself, and by the size of its vector
    all_reduce = "recursive_doubling to 64 KiB, ring"
    reduce_scatter = "pairwise"
    all_gather = "4x1: ring | 4x2: hierarchical"      by groups: hosts x ranks of each

    comm.algorithm = "auto"                       what is cheapest between the hosts of a run

It is neither layout nor method: it changes the bytes and the order of additions, and so the
rounding alone. The texts are read by `collectives/choice.py`.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from howdah.base.bounds import Bound, Length


@dataclass(frozen=True)
class Algorithms:
    """The algorithm of each operation; empty: the transport's own, in which every rank sends to
    every other one directly.

    all_reduce      of `howdah draw collective`: NAME [OPTION=VALUE ...] [to SIZE], one after
                    another with commas; `default` is the transport's own; `auto`: between hosts
                    by price, as their links were measured
    reduce_scatter  the same; sizes are those of the whole vector
    all_gather      the same
    broadcast       the same
    reduce          the same
    gather          the same
    scatter         the same
    all_to_all      the same, without sizes; in training one that forwards nothing: pairwise
    barrier         the same, without sizes
    """

    all_reduce: str = ""
    reduce_scatter: str = ""
    all_gather: str = ""
    broadcast: str = ""
    reduce: str = ""
    gather: str = ""
    scatter: str = ""
    all_to_all: str = ""
    barrier: str = ""

    def __bool__(self) -> bool:
        return any(self.by_operation.values())

    @property
    def by_operation(self) -> dict[str, str]:
        """The texts of the operations that have one."""
        texts = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {name: text for name, text in texts if text}

    def __str__(self) -> str:
        return "; ".join(f"{name} {text}" for name, text in self.by_operation.items())


DIRECT = Algorithms()  # none is chosen


@dataclass(frozen=True)
class Hosts:
    """How ranks of several machines are connected; see the fields of `Comm`."""

    wire: Literal["tcp", "gloo"] = "tcp"
    trust: Literal["secret", "network"] = "secret"
    interface: str = ""


@dataclass(frozen=True)
class Tls:
    """Files in PEM form by which servers and workers of `method.sync` trust each other.

    cert  a certificate, or a chain
    key   its key, without a password
    ca    the certificates by one of which those of all members are signed
    """

    cert: str = ""
    key: str = ""
    ca: str = ""

    def __bool__(self) -> bool:
        return bool(self.cert or self.key or self.ca)


@dataclass(frozen=True)
class Comm:
    """How messages travel, beside the layout.

    sparse     whether the gradient of an embedding is summed over replicas by its rows that are not
               0
    wire       between machines: tcp, of howdah's own; gloo
    trust      who may join: secret, who knows the one in HOWDAH_SECRET_FILE; network, anybody
    interface  of each machine, at whose address ranks listen; empty: that which leads to the others
    tls        what encrypts the connections of servers and workers; empty: nothing
    push_order   of what workers of method.sync and servers send: urgency, what the next forward
                 needs first; fifo, what came first
    push_window  bytes of pushes under way from a worker to each server, of which none is taken back
    push_chunk   bytes of a unit that are pushed and pulled as one, at most
    server_shares  how much each server keeps, beside the others; empty: all keep as much
    """

    algorithm: Algorithms = field(default_factory=Algorithms)
    sparse: bool = False
    wire: Literal["tcp", "gloo"] = "tcp"
    trust: Literal["secret", "network"] = "secret"
    interface: str = ""
    tls: Tls = field(default_factory=Tls)
    push_order: Literal["urgency", "fifo"] = "urgency"
    push_window: Annotated[int, Bound(1 << 16, 1 << 40)] = 8 << 20
    push_chunk: Annotated[int, Bound(1 << 18, 4 << 20)] = 1 << 20
    server_shares: Annotated[tuple[Annotated[int, Bound(1, 1 << 20)], ...], Length(0, 4096)] = ()

    @property
    def hosts(self) -> Hosts:
        """How ranks of several machines are connected."""
        return Hosts(self.wire, self.trust, self.interface)

    @property
    def is_chosen(self) -> bool:
        """Whether the bytes of collectives are others than without this table."""
        return bool(self.algorithm) or self.sparse
