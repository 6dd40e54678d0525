"""Connects ranks that share a store by TCP: LINES connections for each pair, all of them greeted.

    every rank     listens at a free port of one address, and writes both into the store
    rank r         calls every lower rank; answers every higher one, who must know the secret
    every rank     listens no more

The secret is not in the store. A connection says whose it is in its hello, with a number that
rank 0 drew for this group, so that no line gets into another group. Strangers are refused and
counted. When a rank cannot come, the others hear of it through the store.
"""

import errno
import json
import logging
import os
import select
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from time import sleep

import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm.checks import Checks, duration
from howdah.comm.handshake import CALLER, Door, Stranger, greet
from howdah.comm.heartbeat import watch_link
from howdah.comm.joining import ALL_CAME, LOOK, NAP, Ranks, all_came, told_to_all
from howdah.comm.tcp import TcpTransport
from howdah.comm.tcp_line import UNREACHABLE
from howdah.comm.transport import PeerLost
from howdah.comm.watch import Patience

CONNECT = "be connected with the others by TCP"
LINES = 2  # connections for each pair of ranks
TRIES = 3  # to greet a rank whose door is crowded
UNSENT = 1 << 17  # bytes that a socket takes before it sends: with megabytes of one message in it,
# the first piece of the next would wait behind them, and a send end long before it is done


def tcp_transport(  # noqa: PLR0913 (facts that have nothing in common, all by keyword)
    store: dist.Store,
    *,
    rank: int,
    size: int,
    address: str,
    secret: bytes,
    seconds: float = 600,
    heed: Callable[[], object] | None = None,
    source: str = "",
) -> TcpTransport:
    """Connects `size` ranks that share a store. Raises PeerLost if not all ranks join, UserError if
    this rank cannot, or another one has another secret.

    address  of this machine, at which this rank listens until all have come
    secret   that all ranks have (`secret.py`)
    seconds  after which a peer counts as lost that does not join, or sends nothing
    heed     called while others are waited for; may raise
    source   the address from which this rank calls others; empty: the system chooses
    """
    seconds, rank = duration("seconds", seconds), Checks(0, size).peer(rank)
    patience = Patience(seconds, every=LOOK, heed=heed)
    ranks = Ranks(store, rank, size, (), (), patience)
    with ExitStack() as undo, told_to_all(store, rank, CONNECT):
        listener = undo.enter_context(listening(address))
        host, port, *_ = listener.getsockname()
        store.set(f"tcp/{rank}", json.dumps([host, port]))
        if rank == 0:
            store.set("tcp/group", os.urandom(8).hex())
        addresses = _addresses(ranks)
        meeting = _Meeting(ranks, secret, store.get("tcp/group").decode(), source)
        undo.callback(meeting.close)
        meeting.call(addresses)
        meeting.answer(listener)
        lines = meeting.lines()
        all_came(ranks)
        meeting.sockets.clear()  # they are the transport's
    return TcpTransport(rank, size, lines, seconds=seconds)


def listening(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at one address of this machine, and at no other. Raises UserError.

    port  0: a free one
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:  # connections of an ended process may still wait
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        where = f"port {port} of {address}" if port else address
        raise UserError(f"this process cannot listen at {where}: {error.strerror}") from None
    return listener


def _settle(sock: socket.socket) -> None:
    """How a line sends, and how the loss of its link is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux and macOS
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
    watch_link(sock)


def _addresses(ranks: Ranks) -> list[tuple[str, int]]:
    """Where each rank listens. Raises PeerLost, which names those that did not come, and what a
    rank has said that cannot.
    """
    keys, nap = [f"tcp/{peer}" for peer in range(ranks.size)], NAP
    while not ranks.store.check([*keys, "tcp/group"]):
        if ranks.store.check([ALL_CAME]):
            ranks.look()
        if not ranks.patience.look():
            absent = [peer for peer, key in enumerate(keys) if not ranks.store.check([key])]
            raise _missing(ranks, absent or [0])
        sleep(nap)
        nap = min(2 * nap, LOOK)
    found = [json.loads(ranks.store.get(key)) for key in keys]
    return [(str(host), int(port)) for host, port in found]


def _missing(ranks: Ranks, missing: list[int]) -> PeerLost:
    names = ", ".join(map(str, missing))
    who = f"rank {names}" if len(missing) == 1 else f"ranks {names}"
    return PeerLost(f"{who} of {ranks.size} did not come to be connected, as rank {ranks.rank} saw")


@dataclass
class _Meeting:
    """The connections of one rank, as they are made.

    source   the address from which this rank calls
    sockets  by peer and number of the line
    """

    ranks: Ranks
    secret: bytes
    group: str
    source: str = ""
    sockets: dict[tuple[int, int], socket.socket] = field(default_factory=dict)

    def call(self, addresses: list[tuple[str, int]]) -> None:
        """Connects with all lower ranks."""
        for peer in range(self.ranks.rank):
            for line in range(LINES):
                self.sockets[peer, line] = self._called(peer, addresses[peer], line)

    def _called(self, peer: int, address: tuple[str, int], line: int) -> socket.socket:
        own = json.dumps({"rank": self.ranks.rank, "line": line, "group": self.group}).encode()
        why, left = "", self.ranks.patience
        for _ in range(TRIES):
            with ExitStack() as undo:
                try:
                    sock = undo.enter_context(self._reached(address))
                    _settle(sock)
                    heard = greet(sock, self.secret, own, left.left, role=CALLER, look=self._look)
                    if json.loads(heard) == {"rank": peer, "group": self.group}:
                        undo.pop_all()
                        return sock
                    why = "another process listens there"
                except (OSError, Stranger, ValueError) as error:
                    why = getattr(error, "strerror", None) or str(error)
                    if not left.left or getattr(error, "errno", 0) in UNREACHABLE:
                        break
        raise UserError(
            f"it did not reach rank {peer} at {address[0]} port {address[1]}: {why} "
            "(docs/security.md tells who may join)"
        )

    def _reached(self, address: tuple[str, int]) -> socket.socket:
        """A connection with an address. Raises OSError, and what keeps the ranks from joining."""
        v6 = ":" in address[0]
        sock = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM)
        with ExitStack() as undo:
            undo.enter_context(sock)
            if self.source and (":" in self.source) == v6:
                sock.bind((self.source, 0))
            sock.setblocking(False)
            failed, done = sock.connect_ex(address), select.poll()
            done.register(sock, select.POLLOUT)
            while failed == errno.EINPROGRESS:
                if done.poll(LOOK * 1000):
                    failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                else:
                    self._look()
            if failed:
                raise OSError(failed, os.strerror(failed))
            undo.pop_all()
        return sock

    def _look(self) -> None:
        """Raises what keeps the ranks from joining; TimeoutError when they took too long."""
        if self.ranks.store.check([ALL_CAME]):
            self.ranks.look()
        if not self.ranks.patience.look():
            raise TimeoutError(errno.ETIMEDOUT, "it did not answer in time")

    def answer(self, listener: socket.socket) -> None:
        """Answers all higher ranks."""
        own = json.dumps({"rank": self.ranks.rank, "group": self.group})
        door = Door(listener, self.secret, own.encode())
        try:
            while missing := self._missing():
                for sock, hello in door.look(LOOK):
                    self._welcome(sock, hello)
                if door.full:
                    raise door.full
                if self.ranks.store.check([ALL_CAME]):
                    self.ranks.look()  # raises what keeps another rank from coming
                if not self.ranks.patience.look():
                    raise _missing(self.ranks, sorted({peer for peer, _ in missing}))
        finally:
            door.close()
            if door.strangers:
                logging.getLogger("howdah").warning(
                    "rank %d refused %d connections of strangers while it joined; the last: %s",
                    *(self.ranks.rank, door.strangers, door.why),
                )

    def _missing(self) -> list[tuple[int, int]]:
        ranks, size = range(self.ranks.rank + 1, self.ranks.size), range(LINES)
        return [(peer, n) for peer in ranks for n in size if (peer, n) not in self.sockets]

    def _welcome(self, sock: socket.socket, hello: bytes) -> None:
        """Keeps the connection of a rank that is awaited."""
        with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            said = json.loads(hello)
            key = int(said["rank"]), int(said["line"])
            if said["group"] == self.group and key in self._missing():
                _settle(sock)
                self.sockets[key] = sock
                return
        sock.close()

    def lines(self) -> dict[int, list[socket.socket]]:
        """The sockets by peer, in the order of their lines."""
        peers = sorted({peer for peer, _ in self.sockets})
        return {peer: [self.sockets[peer, n] for n in range(LINES)] for peer in peers}

    def close(self) -> None:
        """Closes the sockets that nobody has taken over."""
        for sock in self.sockets.values():
            sock.close()
