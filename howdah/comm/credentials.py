"""Who is at the other end of a Unix socket, as the kernel reports."""

import os
import socket
import struct

CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: pid, uid, gid


def who(peer: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, _ = CREDENTIALS.unpack(found)
    return process, user


def require_own_user(peer: socket.socket) -> None:
    """Raises PermissionError if the other end of a Unix socket is another user's; nothing is known
    of other sockets.
    """
    if peer.family == socket.AF_UNIX and (user := who(peer)[1]) != os.geteuid():
        raise PermissionError(f"user {user} is at the other end, and not {os.geteuid()}")
