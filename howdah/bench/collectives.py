"""Measures collectives on the ranks of any transport, and checks every result.

    for each size          one block of each in turn, and again, `repeats` times
      own tensors            own    arena  bound
      tensors in the arena   arena  bound  own
      the bound              ...                      so all of them meet the same machine

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from hmac import compare_digest
from secrets import token_hex
from time import perf_counter

import torch
from torch import Tensor

from howdah.bench.table import Request, Row, bound_bytes
from howdah.bench.trials import Memory, check, make_trial
from howdah.comm.engine import Engine
from howdah.comm.meeting import Kind
from howdah.comm.transport import Transport
from howdah.host.facts import gloo_address

CALLS = 20_000  # the most calls in a block
LOOPBACK = "127.0.0.1"
WORD = 32  # characters of the secret by which rank 0 recognizes rank 1
FRESH = 0x3C  # every byte of an input in a timed call

Loop = Callable[[int], float]  # number of calls → their seconds on this rank


Room = Callable[[int], Tensor]  # bytes → a tensor of so many bytes


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


# -- all measurements of a request -------------------------------------------------------


def measure(transport: Transport, request: Request) -> list[Row]:
    """All rows of a request as one list, as the function that workers run."""
    return list(rows(transport, request))


def rows(transport: Transport, request: Request) -> Iterator[Row]:
    """Measures every operation and size, and yields the rows, equal on all ranks. All ranks must
    consume all rows, because each one takes collectives.
    """
    largest = (
        request.sizes[-1] + request.width * request.ranks
    )  # all_to_all may receive a little more than n
    rooms: dict[str, Room] = {"own": lambda size: torch.empty(size, dtype=torch.uint8)}
    if request.arena and isinstance(transport, Engine):
        rooms["arena"] = lambda size: transport.allocate(size, torch.uint8)
    memory = {place: (room(largest), room(largest)) for place, room in rooms.items()}
    with ExitStack() as stack:
        wire = open_wire(transport) if transport.link == "tcp" else None
        if wire is not None:
            stack.enter_context(closing(wire))
        for op in request.ops:
            for size in request.sizes:
                shared = transport.link == "shared"
                least = bound_bytes(op, size, transport.size, shared=shared)
                bound = copying(transport, least) if shared else sending(transport, wire, least)
                yield from _sized(transport, request, op, size, memory=memory, bound=bound)


def _sized(
    transport: Transport,
    request: Request,
    op: str,
    size: int,
    *,
    memory: dict[str, tuple[Tensor, Tensor]],
    bound: Loop,
) -> Iterator[Row]:
    dtype: torch.dtype = getattr(torch, request.dtype)
    trials = {}
    for place, (first, second) in memory.items():
        whole = second[: len(second) // request.width * request.width].view(dtype)
        trials[place] = make_trial(transport, op, Memory(first[:size].view(dtype), whole))
    loops = {place: loop(transport, trial.call, trial.given) for place, trial in trials.items()}
    loops["bound"] = bound
    wrong = {place: check(transport, trial) for place, trial in trials.items()}
    calls = {name: fitting(transport, run, seconds=request.block) for name, run in loops.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for repeat in range(request.repeats):
        at = repeat % len(names)
        for name in names[at:] + names[:at]:
            if name in trials:
                wrong[name] += check(transport, trials[name])
            seconds[name].append(loops[name](calls[name]) / calls[name])
    times = {name: tuple(slowest(transport, each)) for name, each in seconds.items()}
    told = torch.tensor([wrong[place] for place in trials], dtype=torch.int64)
    transport.all_reduce(told)
    kind, ranks, limit = _kind(transport), transport.size, times.pop("bound")
    for place, count in zip(trials, told.tolist(), strict=True):
        yield Row(op, size, ranks, request.dtype, kind, place, times[place], limit, count)


def _kind(transport: Transport) -> Kind:
    return "engine" if isinstance(transport, Engine) else "torch"
