"""Heartbeats: TCP keepalive, to detect a link between machines that is down.

By default TCP does not report such a link: a rank that waits for a message waits forever, and a
rank that sends gets an error after a quarter of an hour. But the kernel can probe the peer:

    nothing is sent       after IDLE seconds a probe is sent every EVERY seconds
    data is sent          it must be acknowledged
    no answer for LIMIT   the connection is closed, and every use of it raises an error

The peer's kernel answers, so its program may compute for any time. Only a program that is stopped
for LIMIT in the middle of a long message counts as lost: its kernel has no room for the rest.

Sockets opened by a library are found by their names under /proc (such as `socket:[4711]`), and set
through a duplicate descriptor; the library's own descriptors stay open.
"""

import os
import socket
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress

IDLE, EVERY, LIMIT = 4, 4, 12  # seconds; a lost link is noticed after at most 2·LIMIT


def keep_alive(names: Container[str] | None = None) -> int:
    """Sets heartbeats on the TCP sockets with these names; None: on all of this process. Returns
    the number of sockets.
    """
    count = 0
    for one in _reach(names):
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
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LIMIT * 1000)


def hang_up(names: Container[str]) -> None:
    """Shuts down the TCP connections with these names: both ends get an error, in all threads."""
    for one in _reach(names):
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


def _reach(names: Container[str] | None) -> Iterator[socket.socket]:
    for name, number in open_sockets().items():
        if names is None or name in names:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
                internet = one.family in (socket.AF_INET, socket.AF_INET6)
                if internet and one.type == socket.SOCK_STREAM:
                    yield one
