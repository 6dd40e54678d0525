"""Parameter servers: which ranks they are, and which range of every unit each of them keeps.

    layout dp3 server2     rank 0 1 2   workers: weights and gradients whole, nothing else
                           rank 3       server 0: the first half of every unit, and its states
                           rank 4       server 1: the second half of every unit

    push   a bucket of gradients is summed on the servers: a reduce to each of them, of its ranges
    pull   updated weights come back: a broadcast from each server, of its ranges

With `update=workers` the servers only add (BytePS: Jiang et al. 2020,
https://www.usenix.org/conference/osdi20/presentation/jiang): what comes back behind each push is
the sum, and every worker keeps all states, and updates all weights alike.

(Li et al. 2014, https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu).
Each server has a range of *every* unit, so that all of them are busy from the first bucket of a
backward pass to the last, and hold equally many bytes; under `method.sync` some may keep more
(`comm.server_shares`), such as those that stand on no worker's machine. The groups of a push are
the workers and one server, which is last. Where a worker under `method.sync` has several ranks
(tp2 server2), each pushes and pulls what it counts (`plan/worker_ranks.py`).
"""

from collections.abc import Iterator, Sequence

from howdah.base.errors import UserError
from howdah.plan.comm import Comm
from howdah.plan.flat_buffers import portion, share
from howdah.plan.layout import Layout
from howdah.plan.method import Method, Sync
from howdah.shapes.shape import ModelShape

Ranks = tuple[int, ...]


def serves(layout: Layout, rank: int) -> bool:
    """Whether `rank` is a server; servers are behind all workers."""
    return rank >= layout.workers


def server_groups(layout: Layout) -> list[Ranks]:
    """For each server, the workers and the server, which is last."""
    workers = range(layout.workers)
    return [(*workers, server) for server in range(layout.workers, layout.world)]


def kept_range(length: int, layout: Layout, rank: int) -> tuple[int, int]:
    """The range of a unit of `length` elements that `rank` keeps and updates: a worker keeps none,
    or with update=workers all, and a server none.
    """
    if not layout.servers_update:
        return (0, 0) if serves(layout, rank) else (0, length)
    return summed_range(length, layout, rank)


def summed_range(length: int, layout: Layout, rank: int) -> tuple[int, int]:
    """The range of a unit of `length` elements whose gradients `rank` adds, as a server."""
    number = rank - layout.workers
    return share(length, layout.server, number) if number >= 0 else (0, 0)


def chain_of(shard: int, servers: int, replicas: int) -> list[int]:
    """The server processes that have a shard at the start: its own, and those that copy it."""
    return [(shard + k) % servers for k in range(min(replicas, servers - 1) + 1)]


def server_shares(layout: Layout, comm: Comm) -> Sequence[int]:
    """How much each server keeps of every unit, beside the others. Raises UserError for a list of
    another length.
    """
    if problem := share_problem(layout, comm):
        raise UserError(problem)
    return comm.server_shares or (1,) * layout.server


def largest_share(layout: Layout, comm: Comm) -> float:
    """How much of every unit the server keeps that has most of it."""
    return max(sizes := server_shares(layout, comm)) / sum(sizes)


def held_length(length: int, layout: Layout, rank: int, sync: Sync | None, comm: Comm) -> int:
    """Elements of a unit of `length` of which server `rank` has the state: those of its own range,
    and of the ranges that it copies.
    """
    sizes = server_shares(layout, comm)
    ranges = (portion(length, sizes, shard) for shard in _shards(layout, rank, sync))
    return sum(stop - start for start, stop in ranges)


def fullest(layout: Layout, comm: Comm, sync: Sync | None) -> int:
    """The rank of the first server that holds as much as any."""
    sizes, servers = server_shares(layout, comm), range(layout.workers, layout.world)
    return max(servers, key=lambda rank: sum(sizes[n] for n in _shards(layout, rank, sync)))


def _shards(layout: Layout, rank: int, sync: Sync | None) -> list[int]:
    """The shards that server `rank` has: its own, and those that it copies."""
    number, replicas = rank - layout.workers, sync.replicas if sync else 0
    return [n for n in range(layout.server) if number in chain_of(n, layout.server, replicas)]


def share_problem(layout: Layout, comm: Comm) -> str:
    """Why servers cannot keep such shares; empty: they can."""
    sizes = comm.server_shares
    if len(sizes) in (0, layout.server):
        return ""
    return (
        f"comm.server_shares={[*sizes]} says how much each server keeps beside the others, and the "
        f"layout has server{layout.server}: write as many numbers, or drop it"
    )


def server_problems(shape: ModelShape, layout: Layout, method: Method) -> Iterator[str]:
    """Why servers cannot keep the states of a model on this layout, as sentences."""
    if method.sync:
        yield from _sync_problems(layout, method, method.sync)
    if not layout.server:
        return
    says = f"server{layout.server}"
    if layout.zero:
        yield f"{says} and zero{layout.zero} both share out the states; drop one of them"
    for word in ("pp", "cp", "ep") if method.sync else ("pp", "cp", "tp", "ep"):
        if (size := getattr(layout, word)) > 1:
            own = "ranks of tp alone" if method.sync else "a rank each"
            yield f"the workers of {says} have {own} so far; drop {word}{size}, or {says}"
    for name in ("weights", "gradients", "optimizer"):
        if (home := getattr(layout, name)) != "device":
            yield f"{says} keeps states in the memory of its ranks; drop {name}={home}, or {says}"
    if shape.experts:
        yield f"{says} keeps dense models so far, and this one has experts; drop {says}"
    if method.gradient_dtype != "full":
        yield (
            f"{says} sums gradients as they are, and method.gradient_dtype is "
            f"{method.gradient_dtype}; use gradient_dtype=full, or drop {says}"
        )


def _sync_problems(layout: Layout, method: Method, sync: Sync) -> Iterator[str]:
    if not layout.server:
        yield f"method.sync.kind={sync.kind} needs parameter servers; add server1"
    if layout.update == "workers":
        yield (
            f"under method.sync servers always update (kind={sync.kind}), and with update=workers "
            "they only add; drop update=workers, or method.sync for a "
            f"layout such as dp{max(sync.workers, 2)} server{layout.server} update=workers"
        )
    if layout.dp != 1:
        yield (
            f"under method.sync the layout describes one worker; drop dp{layout.dp}, and use "
            f"method.sync.workers={layout.dp}"
        )
    if sync.bound and sync.kind != "ssp":
        yield (
            f"method.sync.bound={sync.bound} bounds how far workers are apart, which "
            f"{sync.kind} does not ask; use kind=ssp, or drop bound"
        )
    if sync.replicas >= max(layout.server, 1):
        yield (
            f"method.sync.replicas={sync.replicas} copies each server to as many others, and there "
            f"are {max(layout.server - 1, 0)}; use server{sync.replicas + 1}, or fewer replicas"
        )
    if method.grad_clip:
        yield (
            f"method.grad_clip={method.grad_clip:g} needs the norm of all gradients of a step, and "
            f"{sync.kind} updates each part of the weights when its gradients arrive; use "
            "method.grad_clip=0, or a layout such as dp4 server1, whose servers clip"
        )
