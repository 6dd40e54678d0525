"""Where a server is: the path of a Unix socket, or host and port.

read_address("node1:29400")    ("node1", 29400)
"""

import socket

from howdah.base.errors import UserError, shown
from howdah.comm.tls import Seal, plain

Address = str | tuple[str, int]
CONNECTING = 5.0  # seconds


def connected(address: Address, seal: Seal = plain) -> socket.socket:
    """A socket that is connected to an address, sealed. Raises OSError."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        return seal(sock)
    return seal(socket.create_connection(address, timeout=CONNECTING))


def spell(address: Address) -> str:
    """An address as users write it."""
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def read_address(text: str, option: str) -> tuple[str, int]:
    """The address that a user gives as HOST:PORT. Raises UserError, which names the `option`."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port[:6]) < 1 << 16):
        raise UserError(f"{option} is {shown(text)}, and an address is HOST:PORT, as node1:29400")
    return host.strip("[]"), int(port)
