"""Rendezvous: the ranks meet (`meeting.py`) and choose the transport of their collectives. All of
them choose the same transport, because all have read the same Hellos:

    one machine, engine built    engine
    several machines             tcp, or torch (gloo) by choice; groups inside one machine: engine
    no compiler on a machine,    torch on one machine without a secret, else tcp for all groups;
    over 64 ranks on a machine   with a warning
    a GPU of its own each        NCCL for tensors of GPUs, beside the transport of the host

Use without the rest of howdah, in a program that torchrun started:

    from howdah.comm import connect
    group = connect()
    group.all_reduce(x)
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import torch
import torch.distributed as dist

from howdah.base.errors import UserError, nearest
from howdah.comm.agreement import agree, no_engine, wires_of
from howdah.comm.announce import launchers_store
from howdah.comm.both import Both
from howdah.comm.cards import agree_on_cards, connect_mpi, connect_nccl
from howdah.comm.chosen import algorithms_of, choosing, require_usable
from howdah.comm.direct import Direct
from howdah.comm.engine import connect_engine
from howdah.comm.group import Group
from howdah.comm.heartbeat import connections_at, keep_alive, open_sockets
from howdah.comm.interface import LOOPBACK, address_of, is_loopback, leading_to
from howdah.comm.joining import LOOK, Ranks, told_to_all
from howdah.comm.meeting import CPU, Hello, Kind, Missing, meet, own_hello, part
from howdah.comm.native import Native
from howdah.comm.pulse import Pulse
from howdah.comm.secret import NOBODY, read_secret
from howdah.comm.selection import settled
from howdah.comm.settings import read_settings
from howdah.comm.tcp_connect import CONNECT, tcp_transport
from howdah.comm.torch_connect import torch_transport
from howdah.comm.torch_transport import TorchTransport
from howdah.comm.transport import SingleRank, Transport
from howdah.comm.watch import Patience
from howdah.comm.watcher import Watcher
from howdah.plan.comm import DIRECT, Algorithms, Hosts
from howdah.plan.recording import Wires

HOSTS = Hosts()
OPEN = (
    "ranks on several machines talk without encryption: their network must be one that you trust "
    "(docs/security.md)"
)
ANYBODY = (
    'ranks on several machines let anybody join who reaches their ports, for comm.trust="network" '
    "and no secret say so: their network must be one where you trust everybody (docs/security.md)"
)


def connect(
    transport: Kind | None = None,
    *,
    seconds: float = 600,
    device: torch.device = CPU,
    algorithm: str | Mapping[str, str] = "",
    hosts: Hosts = HOSTS,
) -> Group:
    """Connects all ranks that torchrun, or a launcher with the same variables, started; returns
    their group. Raises UserError.

    transport  engine: shared memory on one machine; tcp: connections of howdah's own; torch: gloo;
               nccl: between GPUs by NCCL, or not at all; mpi: by MPI, where torch has it; None:
               the best that is available
    seconds    after which a rank counts as lost that does not join, or sends nothing
    device     the GPU of this rank, whose tensors NCCL then moves; the CPU: tensors of GPUs go
               through the host
    algorithm  that of every operation which has one so called, such as "ring", or one for each of
               some operations (`collectives/choice.py`); empty: every rank sends to every other
    hosts      how ranks of several machines are connected
    """
    chosen = algorithms_of(algorithm)
    joined = join(transport, seconds=seconds, device=device, algorithms=chosen, hosts=hosts)
    return Group(joined, owns=True)


def join(
    transport: Kind | None = None,
    *,
    seconds: float = 600,
    device: torch.device = CPU,
    algorithms: Algorithms = DIRECT,
    hosts: Hosts = HOSTS,
) -> Transport:
    """The transport between this process and the other ranks that a launcher started. The other
    arguments are those of `connect`. A GPU becomes the current device of this thread.

    Every call uses its own key prefix in the store. So do ranks that were started again, because
    the store still holds the values of the ended ranks.
    """
    store, rank, size = launchers_store(seconds)
    store = dist.PrefixStore(f"howdah/{read_settings().restart}", store)
    return join_through(
        store,
        *(rank, size, transport),
        seconds=seconds,
        device=device,
        algorithms=algorithms,
        hosts=hosts,
    )


def join_through(  # noqa: PLR0913
    store: dist.Store,
    rank: int,
    size: int,
    transport: Kind | None = None,
    *,
    seconds: float = 600,
    device: torch.device = CPU,
    algorithms: Algorithms = DIRECT,
    hosts: Hosts = HOSTS,
    head: str = "",
) -> Transport:
    """The transport between the `size` ranks that share a store; see `join`.

    head  the name or address of the machine that keeps the store; empty: that of the launcher
    """
    require_usable(algorithms, size)
    settings = read_settings()
    secret, problem = NOBODY, ""
    try:
        if hosts.interface:
            address_of(hosts.interface)
        if settings.secret:
            secret = read_secret(settings.secret)
    except UserError as error:  # told to all ranks, which wait for this one
        problem = str(error)
    if device.type == "cuda":
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device)
        device = torch.device("cuda", torch.cuda.current_device())
    store = dist.PrefixStore(str(store.add(f"connected/{rank}", 1)), store)
    known = open_sockets()
    own: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    links = open_sockets().keys() - known.keys()
    pulse = Pulse(own, rank=rank, size=size, links=links, kept=not settings.agent)
    keep_alive({*links, *_connections_of(store)})  # its machine may fail while ranks meet
    connecting = _Connecting(
        *(transport, seconds, device, own, pulse),
        said=str(algorithms),
        hosts=hosts,
        secret=secret,
        problem=problem,
        head=head or settings.head,
    )
    try:
        carrier = connecting(store, rank, size)
    except BaseException:
        pulse.close()
        raise
    host = carrier.host if isinstance(carrier, Both) else carrier
    if isinstance(host, Direct):
        host.pulse = pulse  # finds a stopped rank, which no socket does
        if rank == 0 and len(set(carrier.among.wires.nodes)) > 1:
            proved = connecting.secret and not isinstance(host, TorchTransport)
            logging.getLogger("howdah").warning(OPEN if proved else ANYBODY)
    try:
        return choosing(carrier, settled(carrier, algorithms))
    except BaseException:  # peers see that it has ended
        carrier.close()
        raise


def _connections_of(store: dist.Store) -> set[str]:
    """The names of this process's connections of a store, which its other ones may be behind."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    port = getattr(store, "port", None)  # others, such as files, have none
    return connections_at(port) if port else set()


def choose(  # noqa: PLR0913  what ranks are, and how they want to be connected
    store: dist.Store,
    *,
    rank: int,
    size: int,
    transport: Kind | None = None,
    seconds: float = 600,
    device: torch.device = CPU,
    checked: bool = False,
    secret: bytes = NOBODY,
) -> Transport:
    """The transport for the collectives of `size` ranks that share a store. Raises UserError.

    device   what this rank computes on
    checked  compare the calls of all ranks before each operation on GPUs
    secret   that these ranks have inherited, for connections of howdah's own

    `among` of the transport creates transports for subgroups of these ranks in the same way.
    """
    connecting = _Connecting(transport, seconds, device, store, checked=checked, secret=secret)
    return connecting(store, rank, size)


@dataclass(frozen=True)
class _Connecting:
    """Connects ranks that share a store.

    aside    the store of all ranks, for threads of their own
    pulse    ends the waits of a torch transport when a rank is lost
    watcher  ends those of the GPUs' wires; it is made with the first of these
    said     the chosen algorithms, on which all ranks must agree
    hosts    how ranks of several machines are connected
    secret   of this run; empty: it has none
    problem  why this rank cannot join others
    head     the name or address of the machine that keeps the store
    address  at which this rank listens for others; found with the first group
    """

    wanted: Kind | None
    seconds: float
    device: torch.device
    aside: dist.Store
    pulse: Pulse | None = None
    watcher: Watcher | None = None
    checked: bool = False
    said: str = ""
    hosts: Hosts = HOSTS
    secret: bytes = NOBODY
    problem: str = ""
    head: str = ""
    address: str = ""

    def __call__(
        self, store: dist.Store, rank: int, size: int, members: Sequence[int] = (), time: int = 0
    ) -> Transport:
        """The transport between these ranks.

        members  their numbers among all ranks; none: these are all ranks
        time     how often these have been connected before
        """
        kinds = get_args(Kind)
        if self.wanted is not None and self.wanted not in kinds:
            raise UserError(f"there is no transport {self.wanted!r}{nearest(self.wanted, kinds)}")
        if size == 1:
            if self.problem:
                raise UserError(self.problem)
            return SingleRank()
        hello = own_hello(self.wanted, self.device, self.said)
        hello = replace(
            hello,
            wire=self.hosts.wire,
            trust=self.hosts.trust,
            secret=bool(self.secret),
            problem=self.problem,
        )
        try:
            hellos = meet(store, hello, rank=rank, size=size, seconds=self.seconds, heed=self._heed)
            kind, why = agree(hellos, rank)
            by_nccl, why_not = agree_on_cards([hello.card for hello in hellos])
            if self.wanted == "nccl" and not by_nccl:
                raise UserError(f"transport=nccl: {why_not or 'no rank has a GPU'}")
        except Missing as some:
            part(store, rank=rank, size=size, without=some.ranks)
            raise
        except UserError:
            part(store, rank=rank, size=size)
            raise
        for said in (why, why_not) if rank == 0 else ():
            if said:
                logging.getLogger("howdah").warning(said)
        if self.pulse and not members and kind in ("tcp", "torch"):
            self.pulse.start()  # a rank may be lost before it is connected
        address = self.address
        if kind == "tcp" and not address:
            with told_to_all(store, rank, CONNECT):
                address = self._address(hellos, store, rank)
        carrier = self._host(kind, hellos, store, rank, address)
        watcher, first = self.watcher, self.watcher is None
        if by_nccl and (self.wanted in (None, "nccl") or not first):
            watcher = watcher or self._watch(hellos, rank)
            wire = self._cards(store, rank, size)
            watcher.add(f"{'-'.join(map(str, members or range(size)))}/{time}", wire)
            own = watcher if first else None
            carrier = Both(carrier, wire, watcher=own, checked=self.checked)
        wires = wires_of(hellos, cards=isinstance(carrier, Both))
        rest: Kind | None = self.wanted
        if no_engine(hellos) or kind == "mpi":
            rest = "tcp" if kind == "tcp" else "torch"
        carrier.among = _Joining(
            store, rank, wires, replace(self, wanted=rest, watcher=watcher, address=address)
        )
        return carrier

    def _host(
        self, kind: Kind, hellos: list[Hello], store: dist.Store, rank: int, address: str
    ) -> Transport:
        """The wire for tensors of the CPU."""
        size = len(hellos)
        if kind == "mpi":
            return connect_mpi(rank=rank, size=size)
        if kind == "engine":
            processes = [hello.process for hello in hellos]
            return connect_engine(store, processes, rank=rank, deadline=self.seconds)
        here = len({hello.machine for hello in hellos}) == 1
        wire: Direct
        if kind == "tcp":
            wire = tcp_transport(
                store,
                rank=rank,
                size=size,
                address=address,
                secret=self.secret,
                seconds=self.seconds,
                heed=self._heed,
                source=address if self.hosts.interface else "",
            )
        else:
            wire = torch_transport(store, rank=rank, size=size, seconds=self.seconds, loopback=here)
        if self.pulse is not None:
            self.pulse.tell(wire)
            wire.cause = self.pulse.cause
        return wire

    def _heed(self) -> None:
        """Ends a wait for others when one of them is lost, though its machine still answers."""
        if self.pulse:
            self.pulse.heed()

    def _address(self, hellos: Sequence[Hello], store: dist.Store, rank: int) -> str:
        """At which this rank listens: of the named interface, or of that which leads to others."""
        if self.hosts.interface:
            return address_of(self.hosts.interface)
        machines = [hello.machine for hello in hellos]
        if len(set(machines)) == 1:
            return LOOPBACK
        if not self.head:  # no launcher: machines that a caller made up
            return LOOPBACK
        own = leading_to(self.head)
        if is_loopback(own) and machines[rank] == machines[0]:  # the head's own way to itself
            other = next(peer for peer, machine in enumerate(machines) if machine != machines[0])
            patience = Patience(self.seconds, every=LOOK)
            said = Ranks(store, rank, len(hellos), (), (), patience).hear(f"tcp/{other}")
            own = leading_to(json.loads(said)[0])
        return own

    def _watch(self, hellos: Sequence[Hello], rank: int) -> Watcher:
        """The watcher of this process, over the processes of the other ranks on its machine."""
        here = {
            other: hello.process
            for other, hello in enumerate(hellos)
            if hello.machine == hellos[rank].machine and other != rank
        }
        watcher = Watcher(
            self.aside, rank=rank, processes=here, seconds=self.seconds, device=self.device
        )
        if self.pulse is not None:
            self.pulse.tell(watcher)
        watcher.start()
        return watcher

    def _cards(self, store: dist.Store, rank: int, size: int) -> Native:
        """The wire between the GPUs."""
        own = dist.PrefixStore("cards", store)
        return connect_nccl(own, rank=rank, size=size, device=self.device, seconds=self.seconds)


@dataclass
class _Joining:
    """Creates transports for subgroups of the ranks that share a store.

    times  how often each subgroup has been created, which makes its key prefix unique
    """

    store: dist.Store
    rank: int
    wires: Wires
    connect: _Connecting
    times: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @property
    def aside(self) -> dist.Store:
        return self.connect.aside

    @property
    def address(self) -> str:
        return self.connect.address

    def __call__(self, ranks: Sequence[int]) -> Transport:
        members = tuple(ranks)
        self.times[members] += 1
        name = f"{'-'.join(map(str, members))}/{self.times[members]}"
        store = dist.PrefixStore(name, self.store)
        index, time = members.index(self.rank), self.times[members]
        return self.connect(store, index, len(members), members, time)
