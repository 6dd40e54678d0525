"""The transport between machines: rounds of messages as frames over TCP, several lines per pair.

    all_reduce(x)          of `direct.py`: rounds of messages
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

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from socket import socket

import torch
from torch import Tensor

from howdah.comm.direct import Direct, Spelled, Started
from howdah.comm.frames import FIELDS, FrameError
from howdah.comm.rounds import Round, nothing
from howdah.comm.signature import CALL, RECORD, agree, disagreement
from howdah.comm.tcp_lines import Lines, Lost, Segment, segments
from howdah.comm.transport import PeerLost


class TcpTransport(Direct):
    """The transport over TCP connections; see `transport.Transport` for the operations."""

    def __init__(
        self, rank: int, size: int, lines: dict[int, list[socket]], *, seconds: float
    ) -> None:
        """lines  connected sockets with each peer, in the order of their numbers"""
        super().__init__(rank, size)
        self._seconds, self._lines = seconds, Lines(lines, seconds=seconds)
        self._broken = ""  # why no call is possible any more
        self._unheard = set[int]()  # peers whose calls are not compared yet

    def _carry(self, spelled: Spelled, started: Sequence[Started]) -> None:
        if self._broken:
            raise PeerLost(f"{self._broken}; this rank called {self._said}")
        try:
            self._rounds(spelled, started)
        except Lost as lost:
            raise self._lost(f"{lost}, as rank {self.rank} saw") from None
        except FrameError as error:
            raise self._lost(f"{error}, as rank {self.rank} saw") from None
        except TimeoutError as error:
            silence = f"rank {error} was silent for {self._seconds:g} s, as rank {self.rank} saw"
            raise self._lost(silence) from None
        except PeerLost as error:  # of a wire beside this one
            self._broken = str(error).partition("; this rank called")[0]
            self._lines.give_up(self._broken)
            raise
        except BaseException:  # a Disagreement: lines stay in the middle of a call
            self._broken = self._broken or f"rank {self.rank} gave up before"
            raise

    def _lost(self, why: str) -> PeerLost:
        if self._gave_up:
            why = self._why or f"rank {self.rank} gave up; what it says tells why"
        self._broken = why
        self._lines.give_up(why)
        return PeerLost(f"{why}; this rank called {self._said}")

    def _rounds(self, spelled: Spelled, started: Sequence[Started]) -> None:
        rounds = [*zip_longest(*(rounds for _, rounds in started), fillvalue=Round())]
        calls: Spelled | None = spelled  # until they are sent
        self._unheard = set(spelled.records)
        for turn, together in enumerate(rounds or [()]):
            self._post(turn, together, calls)
            calls = None
            beside = [one.beside for one in together if one.beside is not nothing]
            if beside and turn == 0:  # nothing is passed on before all have agreed
                self._lines.pump(lambda: not self._unheard)
            elif beside:
                self._lines.start()
            for meanwhile in beside:
                meanwhile()
            self._lines.pump()
            for one in together:
                one.after()

    def _post(self, turn: int, together: Sequence[Round], calls: Spelled | None) -> None:
        """Starts the messages of one round; with `calls`, those that are compared."""
        out: dict[int, list[memoryview]] = {peer: [] for peer in calls.records} if calls else {}
        due: dict[int, list[memoryview]] = {peer: [] for peer in calls.records} if calls else {}
        for one in together:
            for found, messages in ((out, one.sends), (due, one.receives)):
                for tensor, peer in messages:
                    if tensor.numel():
                        found.setdefault(peer, []).append(bytes_of(tensor))
        for peer, buffers in due.items():
            record = calls.records[peer] if calls else b""
            frames = [*segments(self._calls[peer], turn, buffers, record)]
            if calls:
                heard = partial(self._hear, calls, peer, frames[1:])
                frames = [frames[0]._replace(heard=heard)]  # the others when the calls agree
            self._lines.expect(peer, frames)
        for peer, buffers in out.items():
            first = _fields(calls, peer) if calls else b""
            self._lines.post(peer, [*segments(self._calls[peer], turn, buffers, first)])
            if calls:
                self.record_bytes += len(first)

    def _hear(self, calls: Spelled, peer: int, rest: Sequence[Segment], fields: bytes) -> None:
        """Compares the call of a peer; expects the rest of its round. Raises Disagreement."""
        mine, theirs = calls.records[peer], fields[:RECORD]
        if not agree(mine, theirs):
            text = fields[RECORD:].decode(errors="replace") or calls.texts[peer]
            raise disagreement(self.rank, mine, peer, theirs, (calls.texts[peer], text))
        self._unheard.discard(peer)
        self._lines.expect(peer, rest, first=1)

    # -- its end

    def abort(self) -> None:
        """Ends all connections: waits of other ranks for this one, and its own waits, raise."""
        if not self._closed:
            self._gave_up = True
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
