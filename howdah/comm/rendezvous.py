"""Rendezvous: the ranks meet (`meeting.py`) and choose the transport of their collectives. All of
them choose the same transport, because all have read the same Hellos:

    one machine, engine built    engine
    several machines             torch; groups inside one machine: engine
    no compiler on a machine     torch, with a warning
    over 64 ranks on a machine   torch, with a warning

Use without the rest of howdah, in a program that torchrun started:

    from howdah.comm import connect
    group = connect()
    group.all_reduce(x)
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import get_args

import torch.distributed as dist

from howdah.base.errors import UserError, nearest
from howdah.comm.engine import RANKS, Engine, connect_engine
from howdah.comm.group import Group
from howdah.comm.heartbeat import keep_alive
from howdah.comm.meeting import Hello, Kind, meet, own_hello
from howdah.comm.pulse import Pulse
from howdah.comm.settings import read_settings
from howdah.comm.torch_connect import torch_transport
from howdah.comm.torch_transport import TorchTransport
from howdah.comm.transport import SingleRank, Transport
from howdah.plan.recording import Wires

PORTS = (
    "messages go through gloo, which is slower, and on one machine opens ports on 127.0.0.1 that "
    "every user of the machine can reach (docs/security.md)"
)
OPEN = (
    "ranks on several machines talk without passwords or encryption: their network must be one "
    "that you trust (docs/security.md)"
)


def connect(transport: Kind | None = None, *, seconds: float = 600) -> Group:
    """Connects all ranks that torchrun, or a launcher with the same variables, started; returns
    their group. Raises UserError.

    transport  engine: shared memory on one machine; torch: messages over TCP; None: the best
               that is available
    seconds    after which a rank counts as lost that does not join, or sends nothing
    """
    return Group(join(transport, seconds=seconds))


def join(transport: Kind | None = None, *, seconds: float = 600) -> Transport:
    """The transport between this process and the other ranks that a launcher started. The
    arguments are those of `connect`.

    Every call uses its own key prefix in the store. So do ranks that were started again, because
    the store still holds the values of the ended ranks.
    """
    try:
        store, rank, size = next(
            iter(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
        )
    except ValueError as error:
        raise UserError(
            f"no launcher says who the ranks are; start with torchrun ({error})"
        ) from None
    except RuntimeError as error:
        raise UserError(
            f"the launcher's store cannot be reached: {str(error).splitlines()[0]}"
        ) from None
    store = dist.PrefixStore(f"howdah/{read_settings().restart}", store)
    store = dist.PrefixStore(str(store.add(f"connected/{rank}", 1)), store)
    own: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    pulse = Pulse(own, rank=rank, size=size)
    keep_alive()  # also on the store's connections: its machine may fail while ranks meet
    wanted = transport
    carrier = choose(store, rank=rank, size=size, transport=wanted, seconds=seconds, pulse=pulse)
    if isinstance(carrier, TorchTransport):
        carrier.pulse = pulse  # finds a stopped rank, which no socket does
        pulse.start()
        if rank == 0 and len(set(carrier.among.wires.nodes)) > 1:
            logging.getLogger("howdah").warning(OPEN)
    return carrier


def choose(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    transport: Kind | None = None,
    seconds: float = 600,
    pulse: Pulse | None = None,
) -> Transport:
    """The transport for the collectives of `size` ranks that share a store. Raises UserError.

    pulse  ends the waits of a torch transport when a rank is lost

    `among` of the transport creates transports for subgroups of these ranks in the same way.
    """
    if transport is not None and transport not in get_args(Kind):
        raise UserError(f"there is no transport {transport!r}{nearest(transport, get_args(Kind))}")
    if size == 1:
        return SingleRank()
    hellos = meet(store, own_hello(transport), rank=rank, size=size, seconds=seconds)
    kind, why = agree(hellos)
    if why and rank == 0:
        logging.getLogger("howdah").warning(why)
    carrier: Transport
    if kind == "engine":
        processes = [hello.process for hello in hellos]
        carrier = connect_engine(store, processes, rank=rank, deadline=seconds)
    else:
        here = len({hello.machine for hello in hellos}) == 1
        carrier = torch_transport(store, rank=rank, size=size, seconds=seconds, loopback=here)
        if pulse is not None:
            pulse.tell(carrier)
    wanted: Kind | None = "torch" if no_engine(hellos) else transport
    carrier.among = _Joining(store, rank, wanted, seconds, wires_of(hellos), pulse)
    return carrier


@dataclass
class _Joining:
    """Creates transports for subgroups of the ranks that share a store.

    times  how often each subgroup has been created, which makes its key prefix unique
    """

    store: dist.Store
    rank: int
    wanted: Kind | None
    seconds: float
    wires: Wires
    pulse: Pulse | None
    times: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def __call__(self, ranks: Sequence[int]) -> Transport:
        members = tuple(ranks)
        self.times[members] += 1
        name = f"{'-'.join(map(str, members))}/{self.times[members]}"
        store, index = dist.PrefixStore(name, self.store), members.index(self.rank)
        return choose(
            store,
            rank=index,
            size=len(members),
            transport=self.wanted,
            seconds=self.seconds,
            pulse=self.pulse,
        )


def wires_of(hellos: Sequence[Hello]) -> Wires:
    """The links of any group of these ranks. A group inside one machine uses shared memory, unless
    the user asked for the torch transport, or a rank cannot use the engine. A group over several
    machines uses TCP, also between ranks of one machine.
    """
    machines = list(dict.fromkeys(hello.machine for hello in hellos))
    messages = hellos[0].wanted == "torch" or no_engine(hellos)
    inside = TorchTransport.link if messages else Engine.link
    nodes = tuple(machines.index(hello.machine) for hello in hellos)
    return Wires(inside, TorchTransport.link, nodes=nodes)


def agree(hellos: list[Hello]) -> tuple[Kind, str]:
    """The kind of transport for all ranks, and a warning if it is not the best one (otherwise
    empty). Raises UserError if the ranks asked for different kinds, or the kind is impossible.
    """
    first = hellos[0]
    for rank, hello in enumerate(hellos):
        if hello.wanted != first.wanted:
            wishes = first.wanted or "the best transport", hello.wanted or "the best transport"
            raise UserError(f"rank 0 asks for {wishes[0]} and rank {rank} for {wishes[1]}")
    if first.wanted == "torch":
        return "torch", ""
    apart = [rank for rank, hello in enumerate(hellos) if hello.machine != first.machine]
    problem = no_engine(hellos)
    if first.wanted == "engine" and apart:
        raise UserError(
            f"rank {apart[0]} shares no memory with rank 0 (another machine or container): take "
            "transport=torch instead of engine"
        )
    if first.wanted == "engine" and problem:
        raise UserError(f"{problem}; or take transport=torch")
    if problem:
        return (
            "torch",
            f"{problem}; until then {PORTS if not apart else 'gloo carries all messages'}",
        )
    return ("torch" if apart else "engine"), ""


def no_engine(hellos: Sequence[Hello]) -> str:
    """Why the ranks of one machine cannot use the engine; empty if they can.

    The answer is the same for all machines, so that every rank knows the transport of any group.
    """
    most = max(Counter(hello.machine for hello in hellos).values())
    if most > RANKS:
        return f"the engine joins at most {RANKS} ranks of a machine, not {most}: start fewer"
    return next((hello.why_not for hello in hellos if hello.why_not), "")
