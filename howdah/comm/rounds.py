"""Rounds: messages that start together, one round after another.

    round 0   send a to 1, receive b from 3; then add b
    round 1   send b to 1, receive c from 3; then add c

Round k of a rank belongs to round k of all others, so every rank has all rounds up to its last one,
empty ones too. Several lists of rounds that are run together are run as one: their rounds k start
together, and no list waits for another.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from howdah.comm.signature import RECORD, agree, caller, disagreement, pack
from howdah.comm.transport import Transport

if TYPE_CHECKING:
    from howdah.comm.flow import Flow

Message = tuple[Tensor, int]  # a flat tensor, and the peer that receives or sends it
Calls = str | dict[int, str]  # a call as text, or by peer, where each pair has a text of its own


def nothing() -> None:
    """What most rounds do besides."""


class Round(NamedTuple):
    """Messages that are sent and received together; when all are done, `after` is called.

    meets  whether it starts on no rank before all ranks have come to it
    """

    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()
    after: Callable[[], object] = nothing
    meets: bool = False


Started = tuple[Calls, Sequence[Round]]  # an operation: what the ranks compare, and what runs


class Work(Protocol):
    """A program on tensors (`programs.py`)."""

    def rounds(self) -> list[Round]:
        """As rounds, of which each ends before the next one starts."""
        ...

    def flow(self) -> "Flow":
        """As tasks that start as soon as they can."""
        ...


class Carrier(Transport, Protocol):
    """A transport that also carries rounds of messages, and programs."""

    def exchange(self, call: Calls, rounds: Sequence[Round]) -> int:
        """Runs rounds in which all ranks take part, after their calls were compared. Returns the
        bytes that this rank sends. Raises Disagreement, which names both calls.
        """
        ...

    def carry(self, call: Calls, work: Work) -> int:
        """Runs a program in which all ranks take part, as `exchange` runs rounds."""
        ...


def bytes_sent(rounds: Sequence[Round]) -> int:
    """Bytes of all messages that are sent."""
    return sum(tensor.nbytes for one in rounds for tensor, _ in one.sends)


def run_rounds(wire: Transport, started: Sequence[Started]) -> None:
    """Runs lists of rounds together, by the messages of a wire. Raises Disagreement."""
    _compare(wire, "; ".join(_of_all(call) for call, _ in started))
    for together in zip_longest(*(rounds for _, rounds in started), fillvalue=Round()):
        receives = [one for each in together for one in each.receives if one[0].numel()]
        sends = [one for each in together for one in each.sends if one[0].numel()]
        if receives or sends:
            with wire.group():
                for tensor, peer in receives:
                    wire.receive(tensor, peer)
                for tensor, peer in sends:
                    wire.send(tensor, peer)
        for each in together:
            each.after()


def _of_all(call: Calls) -> str:
    """What of a call is equal on all ranks: not the counts of each pair."""
    return call if isinstance(call, str) else f"{next(iter(call.values())).partition(' [')[0]})"


def _compare(wire: Transport, call: str) -> None:
    """Compares a call with those of all ranks. Raises Disagreement."""
    mine = pack(call, wire.site or caller())
    heard = torch.empty(wire.size * RECORD, dtype=torch.uint8)
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    wire.all_gather(heard, own, [RECORD] * wire.size)
    records = heard.numpy().tobytes()
    for peer in range(wire.size):
        theirs = records[peer * RECORD : (peer + 1) * RECORD]
        if not agree(mine, theirs):
            raise disagreement(wire.rank, mine, peer, theirs, (call, call))
