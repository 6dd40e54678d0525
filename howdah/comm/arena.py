"""The arena: one range of memory that all ranks of a machine map.

It is an anonymous file of the kernel (memfd). It has no name, so the kernel frees it when the last
process ends, and the size of /dev/shm does not matter. Rank 0 creates it and passes its descriptor
to the other ranks over a socket that is closed afterwards:

    rank 0         listens on an abstract Unix socket (in no folder), and stores its address
    other ranks    connect, and receive the descriptor (SCM_RIGHTS)

The ranks have met before (`meeting.py`). Both ends ask the kernel for the process at the other end:
it must be the process of a rank, and of the same user.
"""

import errno
import os
import resource
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap

from howdah.base.errors import UserError
from howdah.comm.credentials import who
from howdah.comm.joining import LOOK, Ranks
from howdah.comm.memory import check_memory, lacking, make_memory
from howdah.comm.watch import ended

ADDRESS = "arena"  # the key of the store for the address where rank 0 listens
ARENAS = 32  # arenas of default size that must fit into a limited address space


@dataclass(frozen=True)
class Arena:
    """The arena as one rank maps it.

    processes  process numbers, by rank
    watched    descriptors of these processes (pidfd), by rank
    heap       bytes that each rank can allocate
    """

    memory: mmap
    rank: int
    processes: tuple[int, ...]
    watched: tuple[int, ...]
    heap: int


def default_heap(size: int) -> int:
    """The default number of bytes that each of `size` ranks can allocate: 1/size of the machine's
    memory. With a limit on the address space it is at most 1/size of a small fraction (1/ARENAS) of
    this limit, because a run has several arenas and needs the rest.

    Pages take memory only when they are written. All ranks must compute the same number, so it
    depends on the limit, and not on the address space that is still free.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        memory = min(memory, limit // ARENAS)
    return memory // size


def map_arena(ranks: Ranks, bytes: int) -> mmap:
    """Maps `bytes` bytes of memory that all `ranks` share. Raises UserError, or PeerLost.

    A page takes memory when it is first written.
    """
    try:
        descriptor = make_memory("howdah", bytes) if ranks.rank == 0 else _receive(ranks)
        try:
            check_memory(descriptor, bytes)
            memory = mmap(descriptor, bytes)
            if ranks.rank == 0:
                _give(ranks, descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UserError(f"{bytes / 2**30:.1f} GiB cannot be mapped ({lacking(error)})") from None
    return memory


# -- passing the descriptor from rank 0 to the others


def _give(ranks: Ranks, descriptor: int) -> None:
    """Rank 0: sends the descriptor of the arena to each of the other ranks."""
    address = f"howdah-{os.getpid()}-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen(ranks.size)
        listener.settimeout(LOOK)
        ranks.store.set(ADDRESS, address)
        given = 1
        while given < ranks.size:
            try:
                taker, _ = listener.accept()
            except TimeoutError:
                ranks.look()
                continue
            with taker, suppress(ConnectionError):  # `look` notices a rank that ended
                process, user = who(taker)
                if user == os.geteuid() and process in ranks.processes:
                    socket.send_fds(taker, [b"1"], [descriptor])
                    given += 1


def _receive(ranks: Ranks) -> int:
    address = ranks.hear(ADDRESS)
    with socket.socket(socket.AF_UNIX) as giver:
        giver.settimeout(max(ranks.patience.left, LOOK))
        try:
            giver.connect(f"\0{address}")
            process, user = who(giver)
            if (process, user) != (ranks.processes[0], os.geteuid()):
                raise UserError(
                    f"memory is offered by process {process} of user {user}, and not by rank 0, "
                    f"process {ranks.processes[0]} of user {os.geteuid()}: it is not taken"
                )
            _, descriptors, flags, _ = socket.recv_fds(giver, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except (ConnectionError, TimeoutError):
            ended(ranks.watched[:1], seconds=1)  # rank 0 may need a moment to end, or to store why
            ranks.look()
            raise UserError(
                "rank 0 cannot be reached on this machine: do the ranks run in containers with "
                "networks of their own? use the torch transport"
            ) from None
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not descriptors:
        raise UserError("rank 0 gave no memory: it ended, or did not take this process for a rank")
    return descriptors[0]
