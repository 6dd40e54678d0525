"""TLS around connections of servers and workers, by certificates of the user (`comm.tls`).

    worker ── frames ── pair ── relay ══ TLS 1.3 ══ relay ── pair ── frames ── server

Both ends show a certificate, and both require that the user's authority has signed the other's.
Names in certificates are not compared: members are found by addresses, and the run's secret is
proved besides, inside of the connection (`handshake.py`), with the addresses of its two ends.

Frames keep an ordinary socket, one end of a pair, and a thread relays between the other end and the
network. For a connection has one thread that sends and one that reads, which OpenSSL forbids two
threads to do at once, and frames gather their buffers (`sendmsg`), which TLS cannot.
"""

import select
import socket
import ssl
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic

from howdah.base.errors import UserError, named
from howdah.comm.secret import read_own
from howdah.plan.comm import Tls

GREETING = 5.0  # seconds for a handshake
LINGER = 10.0  # seconds in which the last bytes of an end that has closed must leave
PART = 1 << 18  # bytes that are relayed at a time
NOTHING = memoryview(b"")
WAITS = ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError


class Sealed(socket.socket):
    """The end of a pair whose other end is relayed; its addresses are those of the connection.

    names  of this end and of the other one
    """

    names: tuple[object, object]

    def getsockname(self) -> object:
        """The address of this end of the connection."""
        return self.names[0]

    def getpeername(self) -> object:
        """The address of the other end."""
        return self.names[1]


Seal = Callable[[socket.socket], socket.socket]


def plain(sock: socket.socket) -> socket.socket:
    """A connected socket as it is, without TLS."""
    return sock


def sealing(tls: Tls | None, *, calls: bool) -> Seal:
    """What puts a connected socket into TLS: it returns another one. It raises OSError if a peer
    that was called shows no certificate of the authority. Raises UserError for files of no use.

    calls  whether this end has connected; the other one greets in the background
    """
    return partial(_sealed, _context(tls, calls=calls), calls=calls) if tls else plain


def _sealed(context: ssl.SSLContext, sock: socket.socket, *, calls: bool) -> socket.socket:
    names = sock.getsockname(), sock.getpeername()
    outer = context.wrap_socket(sock, server_side=not calls, do_handshake_on_connect=False)
    near, far = socket.socketpair()
    found = Sealed(fileno=near.detach())
    found.names = names
    for one in (outer, far):
        one.setblocking(False)
    try:
        if calls:
            _greet(outer, far)
    except BaseException:
        for one in (outer, far, found):
            one.close()
        raise
    Thread(target=_relay, args=(outer, far), daemon=True, name="tls").start()
    return found


def _context(tls: Tls, *, calls: bool) -> ssl.SSLContext:
    files = {name: getattr(tls, name) for name in ("cert", "key", "ca")}
    if lacking := [name for name, path in files.items() if not path]:
        raise UserError(
            f"comm.tls has no {' and no '.join(lacking)}: it names a certificate (cert), its key, "
            "and the certificate of the authority that has signed those of all members (ca)"
        )
    read_own(Path(tls.key), f"comm.tls.key {named(Path(tls.key))}", most=1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if calls else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    for name, load in (
        ("ca", lambda: context.load_verify_locations(tls.ca)),
        ("cert", lambda: context.load_cert_chain(tls.cert, tls.key, password="")),
    ):
        try:
            load()
        except (OSError, ValueError) as error:
            what = "no certificate in PEM form" if name == "ca" else "not of the key comm.tls.key"
            why = what if isinstance(error, ssl.SSLError) else getattr(error, "strerror", error)
            raise UserError(f"comm.tls.{name} {named(Path(files[name]))}: {why}") from None
    return context


def _greet(outer: ssl.SSLSocket, far: socket.socket) -> None:
    """The handshake of TLS. Raises OSError if it fails, takes too long, or nobody awaits it."""
    until = monotonic() + GREETING
    while True:
        try:
            return outer.do_handshake()
        except ssl.SSLWantReadError:
            mask = select.POLLIN
        except ssl.SSLWantWriteError:
            mask = select.POLLOUT
        poll = select.poll()
        poll.register(outer, mask)
        poll.register(far, 0)  # tells of its end alone
        ready = [number for number, _ in poll.poll(max(until - monotonic(), 0) * 1000)]
        if ready != [outer.fileno()]:
            raise TimeoutError(f"no handshake of TLS within {GREETING:g} s")


def _relay(outer: ssl.SSLSocket, far: socket.socket) -> None:
    """Relays until one end has ended; closes both sockets."""
    with closing(outer), closing(far), suppress(OSError):
        _greet(outer, far)
        _carry(outer, far)
        outer.shutdown(socket.SHUT_RDWR)


def _carry(outer: ssl.SSLSocket, far: socket.socket) -> None:
    """Carries bytes both ways until the other side has ended, or this one has and all is sent."""
    up = down = NOTHING  # read on one side, and not yet written on the other
    over = ended = False  # nothing more comes from the other side; from this one
    until = float("inf")
    while (down or not over) and (up or not ended) and monotonic() < until:
        poll = select.poll()
        takes = (outer, not over and not down, up), (far, not ended and not up, down)
        for one, reads, writes in takes:
            if mask := select.POLLIN * bool(reads) | select.POLLOUT * bool(writes):
                poll.register(one, mask)
        poll.poll(LINGER * 1000 if ended else None)
        if not down and not over:
            down, over = _read(outer)
        if not up and not ended:
            up, ended = _read(far)
            until = monotonic() + LINGER if ended else until
        up = _write(outer, up)
        try:
            down = _write(far, down)
        except BrokenPipeError:  # who is gone does not read; what he has said must leave
            down = NOTHING


def _read(sock: socket.socket) -> tuple[memoryview, bool]:
    """What has come, and whether that was all."""
    found = bytearray()
    with suppress(*WAITS):
        while len(found) < PART:
            part = sock.recv(PART)
            if not part:
                return memoryview(bytes(found)), True
            found += part
    return memoryview(bytes(found)), False


def _write(sock: socket.socket, part: memoryview) -> memoryview:
    """Writes what the socket takes; what is left."""
    with suppress(*WAITS):
        while part:
            part = part[sock.send(part) :]
    return part
