"""Heartbeats: a link between machines that goes down is noticed, also while nothing is sent.

TCP says nothing then. Whoever waits for a message waits for ever; whoever sends is told after a
quarter of an hour. But the kernel can ask the other one whether it is still there:

    nothing is sent       after IDLE seconds it asks every EVERY seconds
    what is sent          has to be confirmed
    no answer for LIMIT   the connection is closed, and whoever uses it gets an error

The other kernel answers, so a program may be busy as long as it likes. Only one that is stopped for
LIMIT in the middle of a long message counts as gone, for its kernel has no room for the rest.

Sockets that a library opened are reached by what the system calls them; theirs stay open.
"""

import os
import socket
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress

IDLE, EVERY, LIMIT = 4, 4, 12  # seconds; twice LIMIT is the longest that anybody waits


def keep_alive(names: Container[str] | None = None) -> int:
    """Sets heartbeats on the TCP sockets of these names, or all of this process; their number."""
    count = 0
    for one in _reach(names):
        with suppress(OSError):  # it has been closed meanwhile
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, EVERY)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (LIMIT - IDLE) // EVERY)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LIMIT * 1000)
            count += 1
    return count


def hang_up(names: Container[str]) -> None:
    """Ends the TCP connections of these names: both sides get an error, in all their threads."""
    for one in _reach(names):
        with suppress(OSError):
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # it does not listen
                one.shutdown(socket.SHUT_RDWR)


def open_sockets() -> dict[str, int]:
    """What the system calls the sockets of this process, and their numbers."""
    found: dict[str, int] = {}
    if sys.platform == "linux":
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing's own, or one that another thread closes
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    found[name] = int(number)
    return found


def is_down(links: Mapping[str, int]) -> bool:
    """Whether one of these sockets of this process, by name and number, is closed by now."""
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
