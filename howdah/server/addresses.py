"""Where a server is: the name of a Unix socket, or host and port.

read_address("node1:29400")    ("node1", 29400)

Members of one machine meet at abstract names, which are in no folder, go with their sockets, and
open no port. Names are drawn at random, and users are compared at both ends.
"""

import os
import secrets
import socket
import sys

from howdah.base.errors import UserError, shown
from howdah.comm.credentials import require_own_user
from howdah.comm.interface import LOOPBACK
from howdah.comm.tls import Seal, plain

Address = str | tuple[str, int]
CONNECTING = 5.0  # seconds


def connected(address: Address, seal: Seal = plain) -> socket.socket:
    """A socket that is connected to an address, sealed. Raises OSError."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
            require_own_user(sock)
        except OSError:
            sock.close()
            raise
        return seal(sock)
    return seal(socket.create_connection(address, timeout=CONNECTING))


def bound(at: str = "") -> socket.socket:
    """A socket at a free port of an address of this machine, or at a name that only this machine
    has. Nobody is let in before it listens.
    """
    if not at and sys.platform == "linux":
        found = socket.socket(socket.AF_UNIX)
        found.bind(f"\0howdah-{os.getpid()}-{secrets.token_hex(8)}")
        return found
    found = socket.socket(socket.AF_INET6 if ":" in at else socket.AF_INET)
    found.bind((at or LOOPBACK, 0))
    return found


def address_of(sock: socket.socket) -> Address:
    """Where a socket is bound."""
    name = sock.getsockname()
    return os.fsdecode(name) if sock.family == socket.AF_UNIX else (name[0], name[1])


def address_in(said: object) -> Address:
    """An address as JSON has it. Raises ValueError."""
    match said:
        case str():
            return said
        case [str(host), int(port)]:
            return host, port
    raise ValueError(f"no address: {said!r}")


def spell(address: Address) -> str:
    """An address as users write it; that of a name as tools of the system do."""
    if isinstance(address, str):
        return address.replace("\0", "@", 1)
    return f"{address[0]}:{address[1]}"


def read_address(text: str, option: str) -> tuple[str, int]:
    """The address that a user gives as HOST:PORT. Raises UserError, which names the `option`."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port[:6]) < 1 << 16):
        raise UserError(f"{option} is {shown(text)}, and an address is HOST:PORT, as node1:29400")
    return host.strip("[]"), int(port)
