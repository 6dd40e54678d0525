"""Measures the links between hosts: a few seconds, before a run, by the messages of its own wire.

    1. who is there   names of the hosts, and their clocks
    2. short rounds   one byte to the next host, one message and several: a message's way, and the
                      work of a rank on each
    3. long messages  from host to host, pair beside pair (`machines/topology.py`, `phases`), by one
                      rank of each host: what cards and switches let through

A long message is sent in two lengths, and the difference counts: neither a message's way nor what
a switch lets through before it holds back is in it. All ranks of a group call together; all of them
get the same topology, that of rank 0's table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from platform import node
from statistics import median
from time import perf_counter, time

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.chosen import carrier_of
from howdah.comm.near import Near
from howdah.comm.rounds import Carrier, Round
from howdah.comm.transport import Transport
from howdah.machines.topology import Pair, Rates, Topology, phases

ROUNDS, TIMES, SEVERAL = 16, 5, 4  # short rounds of a call, calls, and messages of a fuller round
ENOUGH = 0.1  # seconds of a long message
FIRST, MOST, INSIDE = 1 << 18, 1 << 26, 1 << 23  # bytes of the first one, the most, inside a host
NOISE = 0.1  # of the seconds of the longer message: a smaller difference, of 3/4 of it, is noise
NAME = 64  # bytes of a host's name
PRODUCT, PRODUCTS = 256, 200  # rows of a matrix, and how often it is multiplied by itself


@dataclass(frozen=True)
class Seen:
    """What one rank knows of the hosts.

    nodes   the host of each rank
    names   of the hosts
    at      of each, the wire between hosts, and the address at which its first rank listens
    clocks  seconds by which each host's clock is ahead of that of host 0
    """

    nodes: tuple[int, ...]
    names: tuple[str, ...]
    at: tuple[str, ...]
    clocks: tuple[float, ...]

    @property
    def leads(self) -> list[int]:
        """The first rank of each host."""
        return [self.nodes.index(host) for host in range(len(self.names))]

    @property
    def ranks(self) -> int:
        """Of a host."""
        return len(self.nodes) // len(self.names)


def hosts_of(transport: Transport) -> Seen:
    """The hosts of a group. All ranks call together.

    Raises UserError unless there are several, with equal numbers of ranks, one after the other.
    """
    nodes = transport.among.wires.nodes
    count = len(set(nodes))
    each = len(nodes) // max(count, 1)
    if count < 2:
        raise UserError("links between hosts are measured, and all ranks are on one: start more")
    if [*nodes] != [rank // each for rank in range(len(nodes))]:
        raise UserError(
            f"hosts have {', '.join(str(nodes.count(h)) for h in range(count))} ranks, or not one "
            "after the other: start as many on each, in the order of the hosts"
        )
    transport.barrier()
    among = transport.among
    said = (node(), f"{among.wires.between} {among.address}")
    padded = b"".join(one.encode()[:NAME].ljust(NAME) for one in said)
    own = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    now = torch.tensor([time()], dtype=torch.float64).view(torch.uint8)
    heard = _gathered(transport, torch.cat([own, now]))
    leads = [heard[rank] for rank in range(0, len(nodes), each)]
    names, at = (tuple(_text(one[n * NAME :][:NAME]) for one in leads) for n in range(2))
    clocks = [one[2 * NAME :].clone().view(torch.float64).item() for one in leads]
    return Seen(tuple(nodes), names, at, tuple(clock - clocks[0] for clock in clocks))


def _text(padded: Tensor) -> str:
    return bytes(padded.tolist()).decode(errors="replace").strip()


def measured(transport: Transport, seen: Seen) -> Topology:
    """The links between the hosts of a group. All ranks call together; some seconds."""
    carrier = carrier_of(transport)
    try:
        probe = _Probe(transport, carrier, seen)
        latency, message = probe.short(seen.ranks)
        inside = probe.inside() if seen.ranks > 1 else None
        rates = probe.rates()
    finally:
        if isinstance(carrier, Near):
            carrier.close()
    found = Topology(seen.names, seen.ranks, rates, latency, message, inside, str(date.today()))
    return found


class _Probe:
    """Times rounds of messages."""

    def __init__(self, transport: Transport, carrier: Carrier | Near, seen: Seen) -> None:
        self._transport, self._carrier, self._seen = transport, carrier, seen
        self._rank, self._size = transport.rank, transport.size

    def short(self, hop: int) -> tuple[float, float]:
        """Seconds of a message's way between ranks `hop` apart, and those of a rank's work on one;
        inside of hosts, the ring is that of a host.
        """
        one, several = self._per_round(hop, 1), self._per_round(hop, SEVERAL)
        message = max((several - one) / (2 * (SEVERAL - 1)), 0.0)
        return max(one - 2 * message, 0.0), message

    def inside(self) -> Pair:
        """The link between ranks of a host."""
        latency, message = self.short(1)
        to, source = self._ring(1)
        rate = self._rate(partial(_long, to=[to], source=[source]), most=INSIDE)
        return Pair(min(self._told(rate)), latency, message)

    def rates(self) -> Rates:
        """Bytes/s from host to host, as the receiver saw them."""
        leads, hosts = self._seen.leads, len(self._seen.names)
        table = [[0.0] * hosts for _ in range(hosts)]
        for flows in phases(hosts):
            to = [leads[b] for a, b in flows if leads[a] == self._rank]
            source = [leads[a] for a, b in flows if leads[b] == self._rank]
            told = self._told(self._rate(partial(_long, to=to, source=source)))
            for a, b in flows:
                table[a][b] = told[leads[b]]
        return tuple(map(tuple, table))

    def _ring(self, hop: int) -> tuple[int, int]:
        """The rank that this one sends to, and that it hears; with hop 1, of its host."""
        each = self._seen.ranks
        if hop == 1 and each > 1:
            first = self._rank - self._rank % each
            return first + (self._rank + 1) % each, first + (self._rank - 1) % each
        return (self._rank + hop) % self._size, (self._rank - hop) % self._size

    def _per_round(self, hop: int, messages: int) -> float:
        """Median seconds of a round of so many one-byte messages to the next rank; the first and
        the last of a call, in which it begins and ends, are not in it.
        """
        to, source = self._ring(hop)

        def rounds(count: int) -> list[Round]:
            byte = [torch.zeros(1, dtype=torch.uint8) for _ in range(2 * messages)]
            sends = [(one, to) for one in byte[:messages]]
            return [Round(sends, [(one, source) for one in byte[messages:]])] * count

        few, many = (
            median(self._seconds(rounds(count), f"{count} rounds") for _ in range(TIMES))
            for count in (ROUNDS, 3 * ROUNDS)
        )
        return max(self._told((many - few) / (2 * ROUNDS)))

    def _rate(self, rounds: Callable[[int], list[Round]], most: int = MOST) -> float:
        """Bytes/s of a long message that this rank receives: the difference of two lengths, of
        which the longer takes long enough on the slowest rank.
        """
        size = FIRST
        while True:
            took = max(self._told(self._seconds(rounds(size), f"{size} bytes")))
            if took >= ENOUGH / 2 or size >= most:
                break
            size = min(max(int(size * min(ENOUGH / took, 16)), 2 * size), most)
        short, long = (
            min(self._seconds(rounds(length), f"{length} bytes") for _ in range(2))
            for length in (size // 4, size)
        )
        more, took = size - size // 4, long - short
        return more / took if took > NOISE * long else size / long

    def _seconds(self, rounds: Sequence[Round], what: str) -> float:
        """Seconds of rounds on this rank, of which all begin together."""
        self._transport.barrier()
        began = perf_counter()
        self._carrier.exchange(f"measure({what})", rounds)
        return perf_counter() - began

    def _told(self, value: float) -> list[float]:
        """A number of each rank."""
        own = torch.tensor([value], dtype=torch.float64).view(torch.uint8)
        return [one.clone().view(torch.float64).item() for one in _gathered(self._transport, own)]


def _long(size: int, to: Sequence[int], source: Sequence[int]) -> list[Round]:
    """One round of a long message to and from these ranks, if any."""
    x = torch.zeros(size if to or source else 1, dtype=torch.uint8)
    return [Round([(x, rank) for rank in to], [(torch.empty_like(x), rank) for rank in source])]


def _gathered(transport: Transport, own: Tensor) -> list[Tensor]:
    """Bytes of each rank."""
    out = torch.empty(len(own) * transport.size, dtype=torch.uint8)
    transport.all_gather(out, own, [len(own)] * transport.size)
    return [*out.view(transport.size, -1)]


def processors(transport: Transport, seen: Seen) -> list[float]:
    """Seconds of one product of matrices on the slowest rank of each host. All ranks call together.

    The least of many short ones counts, so that what else runs there does not.
    """
    x, took = torch.ones(PRODUCT, PRODUCT), list[float]()
    for _ in range(PRODUCTS):
        began = perf_counter()
        x @ x
        took.append(perf_counter() - began)
    own = torch.tensor([min(took)], dtype=torch.float64).view(torch.uint8)
    every = [one.clone().view(torch.float64).item() for one in _gathered(transport, own)]
    return [max(every[lead : lead + seen.ranks]) for lead in seen.leads]


def told_by_first(transport: Transport, word: str) -> str:
    """The word of rank 0, on every rank. All ranks call together."""
    text = torch.frombuffer(bytearray(word.encode() or b" "), dtype=torch.uint8)
    length = torch.tensor([len(text)], dtype=torch.int64)
    transport.broadcast(length, 0)
    if transport.rank:
        text = torch.empty(int(length), dtype=torch.uint8)
    transport.broadcast(text, 0)
    return bytes(text.tolist()).decode().strip()
