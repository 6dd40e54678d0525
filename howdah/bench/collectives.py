"""Measures collectives on the ranks of any transport, and checks every result.

    for each size          one block of each in turn, and again, `repeats` times
      own tensors            own    arena  bound
      tensors in the arena   arena  bound  own
      the bound              ...                      so all of them meet the same machine

Other contestants can take turns in the same way: `bench/collectives` measures gloo beside howdah.

A block is a number of calls in a row. Before each call every rank writes its input again and waits
for the other ranks; neither is timed. Otherwise a rank that reads a peer's tensor would find it in
its own cache from the last call, and no data would be transferred. The time of a block is that of
its slowest rank.

Before each block one more call is made, not timed, to check the result: the output is overwritten
first, and then every element must be correct (`bench/trials.py`).

The bound moves only the bytes that must be moved (`bench.table.bound_bytes`), without a collective:

    shared memory   every rank copies from one tensor of its own to another, all at once
    tcp             one message between ranks 0 and 1 through a plain socket: half the time of a
                    round trip
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from itertools import product
from math import inf
from secrets import token_hex
from time import perf_counter

import torch
from torch import Tensor

from howdah.bench.table import Request, Row, bound_bytes
from howdah.bench.trials import Trial, allocate, check, make_trial, views
from howdah.comm.chosen import algorithms_of, choosing
from howdah.comm.engine import Engine
from howdah.comm.selection import settled
from howdah.comm.transport import Transport
from howdah.host.facts import gloo_address

BOUND = "bound"  # the name under which the bound takes its turns
CALLS = 20_000  # the most calls in a block
LEAST = 3  # blocks that are measured however long they take
LOOPBACK = "127.0.0.1"
WORD = 32  # characters of the secret by which rank 0 recognizes rank 1
FRESH = 0x3C  # every byte of an input in a timed call

Loop = Callable[[int], float]  # number of calls → their seconds on this rank


# -- time -------------------------------------------------------------------------------


def loop(transport: Transport, call: Callable[[], object], given: Tensor) -> Loop:
    """A function that makes some calls, each after `given`, the input of this rank, is written
    again and all ranks have met at a barrier. It returns the seconds of the calls alone.
    """
    fresh = given.view(torch.uint8)

    def run(calls: int) -> float:
        seconds = 0.0
        for _ in range(calls):
            fresh.fill_(FRESH)
            transport.barrier()
            began = perf_counter()
            call()
            seconds += perf_counter() - began
        return seconds

    return run


def slowest(transport: Transport, seconds: list[float]) -> list[float]:
    """The maximum over the ranks of each of these numbers (an all-reduce)."""
    most = torch.tensor(seconds, dtype=torch.float64)
    transport.all_reduce(most, "max")
    found: list[float] = most.tolist()
    return found


def fitting(transport: Transport, run: Loop, *, seconds: float) -> int:
    """The number of calls that take about `seconds`, preparations included; equal on all ranks."""
    run(1)
    calls = 1
    while True:
        began = perf_counter()
        run(calls)
        (took,) = slowest(transport, [perf_counter() - began])
        if took > seconds / 8 or calls >= CALLS:
            return max(1, min(CALLS, int(calls * seconds / took)))
        calls *= 4


# -- the bound --------------------------------------------------------------------------


def copying(transport: Transport, size: int) -> Loop:
    """The bound of shared memory: every rank copies `size` bytes in its own memory, all at once."""
    to, source = (torch.full((size,), FRESH, dtype=torch.uint8) for _ in range(2))
    return loop(transport, partial(to.copy_, source), source[:0])


def sending(transport: Transport, wire: socket.socket | None, size: int) -> Loop:
    """The bound of tcp: `size` bytes from rank 0 to rank 1 and back; returns half of the seconds.

    wire  the socket between ranks 0 and 1; None on the other ranks
    """
    memory = memoryview(bytearray(size))

    def send() -> None:
        if wire is not None:
            wire.sendall(memory)

    def receive() -> None:
        got = 0
        while wire is not None and got < size:
            taken = wire.recv_into(memory[got:])
            if not taken:
                raise ConnectionError("the peer closed the socket of the bound")
            got += taken

    turns = (send, receive) if transport.rank == 0 else (receive, send)
    run = loop(transport, lambda: [turn() for turn in turns], torch.empty(0))
    return lambda calls: run(calls) / 2


def open_wire(transport: Transport) -> socket.socket | None:
    """A TCP connection between ranks 0 and 1, on the network that gloo uses; None on other ranks.

    On one machine it is on loopback. Rank 0 broadcasts a secret word with the address, and accepts
    only a connection that sends this word first.
    """
    where = torch.zeros(128, dtype=torch.uint8)
    with ExitStack() as stack:
        if transport.rank == 0:
            apart = len(set(transport.among.wires.nodes)) > 1
            address, word = gloo_address() if apart else LOOPBACK, token_hex(WORD // 2)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = stack.enter_context(socket.create_server((address, 0), family=family))
            words = f"{address} {listener.getsockname()[1]} {word}".encode()
            where[: len(words)] = torch.tensor(list(words), dtype=torch.uint8)
        transport.broadcast(where, 0)
        if transport.rank > 1:
            return None
        if transport.rank == 0:
            wire = accept(listener, word.encode())
        else:
            host, port, word = bytes(where.tolist()).rstrip(b"\0").decode().split(" ")
            wire = socket.create_connection((host, int(port)), timeout=60)
            wire.sendall(word.encode())
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return wire


def accept(listener: socket.socket, word: bytes) -> socket.socket:
    """The first connection that starts with the bytes `word`. All other ones are closed."""
    listener.settimeout(60)
    while True:
        wire, _ = listener.accept()
        wire.settimeout(60)
        with suppress(OSError):
            if compare_digest(wire.recv(len(word), socket.MSG_WAITALL), word):
                return wire
        wire.close()


# -- turns ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The blocks of one contestant, equal on all ranks.

    seconds  mean time of a call in each block, on the slowest rank
    calls    of a block
    wrong    wrong elements, over all ranks and checks
    """

    seconds: tuple[float, ...]
    calls: int
    wrong: int


def take_turns(
    transport: Transport,
    trials: Mapping[str, Trial],
    bound: Loop | None,
    *,
    repeats: int,
    block: float,
    limit: float = inf,
) -> dict[str, Blocks]:
    """Measures trials and, as BOUND, their bound, if there is one: a block of each in turn,
    `repeats` times.

    block  seconds that a block should take, preparations included
    limit  seconds after which no repeat begins; the first LEAST begin in any case
    """
    began = perf_counter()
    loops = {name: loop(transport, trial.call, trial.given) for name, trial in trials.items()}
    if bound is not None:
        loops[BOUND] = bound
    wrong = {name: check(transport, trial) for name, trial in trials.items()}
    calls = {name: fitting(transport, run, seconds=block) for name, run in loops.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for repeat in range(repeats):
        (spent,) = slowest(transport, [perf_counter() - began])
        if spent > limit and repeat >= LEAST:
            break
        at = repeat % len(names)
        for name in names[at:] + names[:at]:
            if name in trials:
                wrong[name] += check(transport, trials[name])
            seconds[name].append(loops[name](calls[name]) / calls[name])
    times = {name: tuple(slowest(transport, each)) for name, each in seconds.items()}
    told = torch.tensor([wrong.get(name, 0) for name in names], dtype=torch.int64)
    transport.all_reduce(told)
    counts = dict(zip(names, told.tolist(), strict=True))
    return {name: Blocks(times[name], calls[name], counts[name]) for name in names}


# -- all measurements of a request -------------------------------------------------------


def measure(transport: Transport, request: Request) -> list[Row]:
    """All rows of a request as one list, as the function that workers run."""
    return list(rows(transport, request))


def rows(transport: Transport, request: Request) -> Iterator[Row]:
    """Measures every operation and size, and yields the rows, equal on all ranks. All ranks must
    consume all rows, because each one takes collectives.
    """
    engine = transport if isinstance(transport, Engine) else None
    chosen = choosing(transport, settled(transport, algorithms_of(request.algorithm)))
    kind, ranks, dtype = "engine" if engine else "torch", transport.size, request.dtype
    largest = request.sizes[-1] + request.width * ranks  # all_to_all may receive a little more
    memory = {"own": allocate(largest)}
    if request.arena and engine:
        memory["arena"] = allocate(largest, engine)
    shared = transport.link == "shared"
    with ExitStack() as stack:
        wire = None if shared else open_wire(transport)
        if wire is not None:
            stack.enter_context(closing(wire))
        for op, size in product(request.ops, request.sizes):
            trials = {
                place: make_trial(chosen, op, views(pair, size, getattr(torch, dtype)))
                for place, pair in memory.items()
            }
            least = bound_bytes(op, size, ranks, shared=shared)
            bound = copying(transport, least) if shared else sending(transport, wire, least)
            found = take_turns(
                transport, trials, bound, repeats=request.repeats, block=request.block
            )
            limit = found.pop(BOUND).seconds
            for place, each in found.items():
                yield Row(op, size, ranks, dtype, kind, place, each.seconds, limit, each.wrong)
