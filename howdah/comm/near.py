"""Rounds over two wires: shared memory between ranks of one machine, messages between machines.

    round 2 of a hierarchical all-reduce on four ranks of two machines
        0 ═══ 1     near: the engine of the machine
        │           far: gloo, under way meanwhile
        2 ═══ 3

In each round the far messages are started, the near ones are passed on, and then the far ones are
waited for. All ranks do so in the same rounds, so none waits for another for ever. Calls are
compared by the wire between the machines.
"""

import re
from collections.abc import Sequence
from functools import partial

from howdah.comm.rounds import Calls, Carrier, Message, Round, bytes_sent
from howdah.comm.transport import PeerLost, Transport


class Near:
    """The messages of programs between ranks of which some share a machine.

    sent  bytes that this rank has sent over shared memory so far
    """

    def __init__(self, wire: Carrier, inside: Transport, here: Sequence[int]) -> None:
        """`inside` connects the ranks `here` of this rank's machine."""
        self._wire, self._inside, self.sent = wire, inside, 0
        self._number = {rank: number for number, rank in enumerate(here)}

    def exchange(self, call: Calls, rounds: Sequence[Round]) -> int:
        """Runs rounds; returns the bytes that this rank sends over both wires."""
        total = bytes_sent(rounds)
        far = [self._apart(one) for one in rounds]
        self.sent += total - bytes_sent(far)
        self._wire.exchange(call, far)
        return total

    def _apart(self, one: Round) -> Round:
        """A round whose near messages are passed on beside the others."""
        near, far = (
            [[each for each in some if (each[1] in self._number) == inside] for some in one[:2]]
            for inside in (True, False)
        )
        if not any(near):
            return one
        return one._replace(sends=far[0], receives=far[1], beside=partial(self._pass, *near))

    def _pass(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        try:
            with self._inside.group():
                for tensor, peer in receives:
                    if tensor.numel():
                        self._inside.receive(tensor, self._number[peer])
                for tensor, peer in sends:
                    if tensor.numel():
                        self._inside.send(tensor, self._number[peer])
        except PeerLost as error:
            raise PeerLost(self._named(str(error))) from None

    def _named(self, said: str) -> str:
        """A sentence about ranks of this machine, with their numbers in the group."""
        what, *called = said.split(";", 1)
        ranks = {str(number): rank for rank, number in self._number.items()}
        what = re.sub(r"\brank (\d+)", lambda found: f"rank {ranks[found[1]]}", what)
        return ";".join([what, *called])

    def abort(self) -> None:
        """Ends the waits of the ranks of this machine."""
        self._inside.abort()

    def close(self) -> None:
        """Releases the memory that they share."""
        self._inside.close()
