"""The arena: one piece of memory that all ranks of a machine map, and how they come by it.

It is an anonymous file of the kernel (memfd). It has no name anywhere, so the last process that
ends takes it along, and the size of /dev/shm does not matter. Rank 0 makes it and hands its
descriptor to the others over a socket that is closed again:

    rank 0        listens on an abstract Unix socket, which no folder holds, and says where
    the others    connect, and receive the descriptor (SCM_RIGHTS)

The ranks have met before (`meeting.py`); another user's process is refused.
"""

import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from mmap import mmap

from torch.distributed import Store

from howdah.plan.problems import BadInput


@dataclass(frozen=True)
class Arena:
    """The memory as one rank maps it.

    processes  of all ranks, by rank; heap  bytes that each rank can allocate
    """

    memory: mmap
    rank: int
    processes: tuple[int, ...]
    heap: int


def map_arena(store: Store, *, rank: int, size: int, bytes: int, deadline: float) -> mmap:
    """Memory of `bytes` that all ranks share; pages are taken when they are first written."""
    until = time.monotonic() + deadline
    descriptor = _make(store, size, bytes, until) if rank == 0 else _receive(store, until)
    try:
        shared = os.fstat(descriptor).st_size
        if shared != bytes:
            raise BadInput(
                f"rank 0 made an arena of {shared} bytes and rank {rank} needs {bytes}: give all "
                "ranks the same arena_bytes"
            )
        return mmap(descriptor, bytes)
    finally:
        os.close(descriptor)


def _make(store: Store, size: int, bytes: int, until: float) -> int:
    """Makes the arena, and hands it to each of the other ranks."""
    descriptor = os.memfd_create("howdah")
    os.ftruncate(descriptor, bytes)
    address = f"howdah-{os.getpid()}-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen(size)
        store.set("arena", address)
        given = 1
        while given < size:
            listener.settimeout(max(until - time.monotonic(), 0.001))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                os.close(descriptor)
                raise BadInput(f"{size - given} ranks did not fetch the arena in time") from None
            with peer:
                if _user(peer) == os.getuid():
                    socket.send_fds(peer, [b"1"], [descriptor])
                    given += 1
    return descriptor


def _receive(store: Store, until: float) -> int:
    _await(store, "arena", until, "rank 0 did not make the arena in time")
    with socket.socket(socket.AF_UNIX) as giver:
        try:
            giver.connect(f"\0{store.get('arena').decode()}")
        except ConnectionRefusedError:
            raise BadInput(
                "rank 0 cannot be reached on this machine: do the ranks run in containers with "
                "networks of their own? use the torch transport"
            ) from None
        giver.settimeout(max(until - time.monotonic(), 0.001))
        _, descriptors, _, _ = socket.recv_fds(giver, 1, 1)
    if not descriptors:
        raise BadInput("rank 0 ended, or is another user's process, and gave no arena")
    return descriptors[0]


def _user(peer: socket.socket) -> int:
    """Whose process is at the other end: the kernel says (SO_PEERCRED: pid, uid, gid)."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


def _await(store: Store, key: str, until: float, complaint: str) -> None:
    """Until the store holds the key. A Store's own timeout tells no name."""
    left = timedelta(seconds=max(until - time.monotonic(), 0.001))
    try:
        store.wait([key], left)
    except RuntimeError:
        raise BadInput(f"{complaint}: was it started, and does it live?") from None
