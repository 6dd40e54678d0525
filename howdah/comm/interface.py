"""Which address of this machine its ranks listen at: that of the interface that the user names, or
else the one that leads to the other machines. Never all of them.
"""

import fcntl
import platform
import socket
import struct
from pathlib import Path

from howdah.base.errors import UserError, nearest, shown

LOOPBACK = "127.0.0.1"
GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
IPV6 = Path("/proc/net/if_inet6")


def address_of(interface: str) -> str:
    """The address of an interface of this machine: of IPv4, else of IPv6. Raises UserError."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise UserError(
            f"comm.interface: {platform.node()} has no interface {shown(interface)}"
            f"{nearest(interface, names)}"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            named = struct.pack("256s", interface.encode())
            return socket.inet_ntoa(fcntl.ioctl(asking, GET_ADDRESS, named)[20:24])
        except OSError:
            pass
    for line in IPV6.read_text("ascii").splitlines() if IPV6.exists() else ():
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope in ("00", "10"):  # global, or of this host
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    raise UserError(
        f"comm.interface: {interface} of {platform.node()} has no address: take another one, or "
        "give it one"
    )


def leading_to(host: str) -> str:
    """The address of this machine from which packets go to `host`; it may be a loopback one, if
    that is this machine. Nothing is sent. Raises UserError.
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(where)
            return str(asking.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"no way leads from {platform.node()} to {shown(host)}: {error.strerror}; name an "
            "interface (comm.interface)"
        ) from None


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    return address.startswith("127.") or address == "::1"
