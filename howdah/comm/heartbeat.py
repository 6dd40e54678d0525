"""Heartbeats: TCP keepalive, to detect a link between machines that is down.

By default TCP does not report such a link: a rank that waits for a message waits forever, and a
rank that sends gets an error after a quarter of an hour. But the kernel can probe the peer:

    nothing is sent       after IDLE seconds a probe is sent every EVERY seconds
    data is sent          it must be acknowledged
    no answer for LIMIT   the connection is closed, and every use of it raises an error

The peer's kernel answers, so its program may compute for any time. But its kernel may have no room
for the rest of a long message, and LIMIT counts then, too, whether the program computes, waits for
a third one, or is stopped. So LIMIT is taken from such a connection until the peer takes more
(`ease`, which the pulse calls); a program that is stopped is found by the pulse.

Sockets opened by a library are found by their names under /proc (such as `socket:[4711]`), and set
through a duplicate descriptor; the library's own descriptors stay open.
"""

import os
import socket
import struct
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress

IDLE, EVERY, LIMIT = 4, 4, 12  # seconds; a lost link is noticed after at most 2·LIMIT
UNACKED, UNSENT = 24, 144  # where struct tcp_info of linux/tcp.h has these numbers of 32 bits


def keep_alive(names: Container[str]) -> int:
    """Sets heartbeats on the TCP sockets with these names. Returns the number of sockets."""
    count = 0
    for _, one in _reach(names):
        with suppress(OSError):  # another thread has closed it
            watch_link(one)
            count += 1
    return count


def watch_link(one: socket.socket) -> None:
    """Sets heartbeats on a TCP socket. Raises OSError if it is closed."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # not on Linux: the system's own times count
        return
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, EVERY)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (LIMIT - IDLE) // EVERY)
    _limit(one, LIMIT)


def _limit(one: socket.socket, seconds: int) -> None:
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


def ease(eased: Container[str], *, over: bool = False) -> set[str]:
    """Takes LIMIT from the connections of this process whose peers answer and take nothing, and
    gives it back to those that take something again. To be called some times in LIMIT.

    eased  the names of those that have none, as the last call has returned them
    over   gives it back to all: nobody else will find peers that are stopped
    """
    found = set[str]()
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return found
    for name, one in _reach(None):
        with suppress(OSError, struct.error):  # another thread has closed it; an old kernel
            limit = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            full = not over and limit in (0, LIMIT * 1000) and _takes_nothing(one)
            if full and (limit or name in eased):
                _limit(one, 0)
                found.add(name)
            elif name in eased and not limit:
                _limit(one, LIMIT)
    return found


def _takes_nothing(one: socket.socket) -> bool:
    """Whether the peer has acknowledged all that it was sent, and has no room for what is left."""
    told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, UNSENT + 4)
    unacked, unsent = (struct.unpack_from("=I", told, at)[0] for at in (UNACKED, UNSENT))
    return not unacked and bool(unsent)


def connections_at(port: int) -> set[str]:
    """The names of this process's TCP connections from or to a port."""
    found = set[str]()
    for name, one in _reach(None):
        with suppress(OSError):  # it is not connected
            if port in (one.getsockname()[1], one.getpeername()[1]):
                found.add(name)
    return found


def hang_up(names: Container[str]) -> None:
    """Shuts down the TCP connections with these names: both ends get an error, in all threads."""
    for _, one in _reach(names):
        with suppress(OSError):
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # it does not listen
                one.shutdown(socket.SHUT_RDWR)


def open_sockets() -> dict[str, int]:
    """The sockets of this process: names under /proc, and descriptor numbers."""
    found: dict[str, int] = {}
    if sys.platform == "linux":
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing's own, or one that another thread closes
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    found[name] = int(number)
    return found


def is_down(links: Mapping[str, int]) -> bool:
    """Whether one of these sockets of this process (descriptor number by name) is closed."""
    for name, number in links.items():
        try:
            if os.readlink(f"/proc/self/fd/{number}") != name:
                return True
        except OSError:
            return True
    return False


def _reach(names: Container[str] | None) -> Iterator[tuple[str, socket.socket]]:
    # Said to be one that does not block, it is left as it is; else a default timeout of the program
    # would make it so, and with it the descriptor whose duplicate it is.
    kind = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)
    for name, number in open_sockets().items():
        if names is None or name in names:
            with suppress(OSError), socket.socket(-1, kind, -1, os.dup(number)) as one:
                if os.readlink(f"/proc/self/fd/{one.fileno()}") != name:
                    continue  # closed since, and the number is another one's
                internet = one.family in (socket.AF_INET, socket.AF_INET6)
                found = one.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
                if internet and found == socket.SOCK_STREAM:
                    yield name, one
