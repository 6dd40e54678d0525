"""The transport between machines: messages as frames over TCP, several lines per pair.

    all_reduce(x)          of `direct.py`: messages, each of which starts when it can (`flow.py`)
      └ _carry             each message as segments, in frames (`tcp_lines.py`)
          └ pump           over sockets that were greeted with the run's secret (`tcp_connect.py`)

Payload goes from the sender's tensor to the kernel, and from there to the place where it stays;
nothing is copied besides. Each frame has a checksum. Calls are compared as over gloo, and the bits
of all operations are gloo's: both run the same rounds.

A rank is lost when its connection ends, when its link does not answer (`heartbeat.py`), when it is
stopped (`pulse.py`), or when it makes no call within the timeout. No connection is made again: a
round that was cut cannot be told from one that was done. A frame that is damaged raises PeerLost,
too, and names who sent it; what it brought is used nowhere.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from socket import socket

import torch
from torch import Tensor

from howdah.comm.direct import Direct, Spelled
from howdah.comm.flow import Flows
from howdah.comm.frames import FIELDS, FrameError
from howdah.comm.segments import SEGMENT, Last, Segment, segments
from howdah.comm.signature import CALL, RECORD, Disagreement, agree, disagreement
from howdah.comm.slow_links import SlowLinks
from howdah.comm.tcp_line import Lost
from howdah.comm.tcp_lines import Lines
from howdah.comm.transport import PeerLost, gave_up

AHEAD = 2 * SEGMENT  # bytes of messages to one peer that are handed to the kernel at a time


class TcpTransport(Direct):
    """The transport over TCP connections; see `transport.Transport` for the operations."""

    turns = True

    def __init__(
        self, rank: int, size: int, lines: dict[int, list[socket]], *, seconds: float
    ) -> None:
        """lines  connected sockets with each peer, in the order of their numbers"""
        super().__init__(rank, size)
        self._seconds, self._lines = seconds, Lines(lines, seconds=seconds)
        self._slow = SlowLinks(rank, lines)
        self._broken = ""  # why no call is possible any more
        self._unheard = set[int]()  # peers whose calls are not compared yet
        self._dealt = Counter[tuple[int, bool]]()  # frames of this call, by peer and direction

    def _carry(self, spelled: Spelled, flows: Flows) -> None:
        if self._broken:
            raise PeerLost(f"{self._broken}; this rank called {self._said}")
        try:
            self._flow(spelled, flows)
        except Lost as lost:
            raise self._lost(f"{lost}, as rank {self.rank} saw") from None
        except FrameError as error:
            raise self._lost(f"{error}, as rank {self.rank} saw") from None
        except TimeoutError as error:
            silence = f"rank {error} was silent for {self._seconds:g} s, as rank {self.rank} saw"
            raise self._lost(silence) from None
        except PeerLost as error:  # of a wire beside this one
            told = self._lines.last_words()
            why = f"{told}, as rank {self.rank} saw" if told else str(error)
            raise self._lost(why.partition("; this rank called")[0]) from None
        except Disagreement:  # which peers find, too; lines stay in the middle of a call
            self._broken = self._broken or f"rank {self.rank} gave up before"
            raise
        except BaseException as error:  # of this rank alone: nobody else could know
            self._broken = self._broken or f"rank {self.rank} gave up before"
            told = f"{type(error).__name__}: {error}"
            self.cause(f"rank {self.rank} gave up: {told}")
            self._lines.give_up(told)
            raise

    def _lost(self, why: str) -> PeerLost:
        why = (self._why or gave_up(self.rank)) if self._gave_up else self.cause(why)
        self._broken = why
        self._lines.give_up(why)
        return PeerLost(f"{why}; this rank called {self._said}")

    def _flow(self, spelled: Spelled, work: Flows) -> None:
        self._unheard, self._dealt = set(spelled.records), Counter[tuple[int, bool]]()
        work.ahead = AHEAD
        for peer in spelled.records:
            self._expect_call(spelled, peer, work)
        for peer in spelled.records:
            number, fields = work.first(peer, sends=True), _fields(spelled, peer)
            self._lines.post(peer, self._frames(work, number, peer, sends=True, first=fields))
            self.record_bytes += len(fields)
        self._lines.pump(lambda: not self._unheard)  # nothing is written before all have agreed

        def start(numbers: Sequence[int]) -> None:
            for number in numbers:
                peer, sends = work.tasks[number].peer, work.tasks[number].sends
                frames = self._frames(work, number, peer, sends=sends)
                put = self._lines.post if sends else self._lines.expect
                put(peer, frames)
            self._lines.start()

        def wait() -> None:
            work.fresh = False
            self._lines.pump(lambda: work.fresh)

        work.run(start, wait)
        self._lines.pump()
        for sentence in self._slow.look(self._lines.long):
            logging.getLogger("howdah").warning("%s", sentence)

    def _expect_call(self, calls: Spelled, peer: int, work: Flows) -> None:
        """Expects the call of a peer; the rest of its first message when the calls agree."""
        number = work.first(peer, sends=False)
        call, *rest = self._frames(work, number, peer, sends=False, first=calls.records[peer])
        heard = partial(self._hear, calls, peer, rest)
        self._lines.expect(peer, [call._replace(heard=heard)])

    def _frames(
        self, work: Flows, number: int | None, peer: int, *, sends: bool, first: bytes = b""
    ) -> list[Segment]:
        """The frames of a message to or from a peer; with the fields of a call, which goes first,
        those of one that is not there, too.
        """
        buffers = [] if number is None else [bytes_of(x) for x in work.tasks[number].tensors]
        at = self._dealt[peer, sends]
        found = [*segments(self._calls[peer], at, buffers, first)]
        self._dealt[peer, sends] += len(found)
        if number is None:
            return found
        done = Last(len(found), partial(work.done, number))
        return [segment._replace(done=done) for segment in found]

    def _hear(self, calls: Spelled, peer: int, rest: Sequence[Segment], fields: bytes) -> None:
        """Compares the call of a peer; expects the rest of its message. Raises Disagreement."""
        mine, theirs = calls.records[peer], fields[:RECORD]
        if not agree(mine, theirs):
            text = fields[RECORD:].decode(errors="replace") or calls.texts[peer]
            raise disagreement(self.rank, mine, peer, theirs, (calls.texts[peer], text))
        self._unheard.discard(peer)
        self._lines.expect(peer, rest, first=1)

    # -- its end

    def abort(self, why: str = "") -> None:
        """Ends all connections: waits of other ranks for this one, and its own waits, raise."""
        if not self._closed:
            self._gave_up = True
            if why:
                self.cause(f"rank {self.rank} gave up: {why}")
                self._lines.give_up(why)
            self._lines.hang_up()

    def close(self) -> None:
        """Ends the connections. Other ranks do not take it for a loss, unless this one gave up."""
        if not self._closed:
            super().close()
            with suppress(OSError):
                self._lines.close(farewell=not (self._gave_up or self._broken))


def _fields(calls: Spelled, peer: int) -> bytes:
    """The fields of a CALL: the record, and the whole text of a call that is cut in it."""
    text = calls.texts[peer].encode()
    return calls.records[peer] + (text[: FIELDS - RECORD] if len(text) > CALL else b"")


def bytes_of(x: Tensor) -> memoryview:
    """The memory of a flat tensor."""
    return x.detach().view(torch.uint8).numpy().data
