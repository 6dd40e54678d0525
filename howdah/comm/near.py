"""Programs over two wires: shared memory inside a machine, messages between machines.

    turn 2 of a hierarchical all-reduce on four ranks of two machines
        0 ═══ 1     near: the engine of the machine, which passes all messages of a turn at once
        │           far: TCP or gloo, under way meanwhile
        2 ═══ 3

The tasks of a flow between ranks of one machine are marked; `flow.py` says when they are passed.
Calls are compared by the wire between the machines.
"""

import re
from collections.abc import Sequence

from howdah.comm.direct import Direct
from howdah.comm.flow import Flow, bytes_sent, in_turns
from howdah.comm.rounds import Calls, Message, Round, Work
from howdah.comm.transport import PeerLost, Transport


class Near:
    """The messages of programs between ranks of which some share a machine.

    sent  bytes that this rank has sent over shared memory so far
    """

    def __init__(self, wire: Direct, inside: Transport, here: Sequence[int]) -> None:
        """`inside` connects the ranks `here` of this rank's machine."""
        self._wire, self._inside, self.sent = wire, inside, 0
        self._number = {rank: number for number, rank in enumerate(here)}

    def exchange(self, call: Calls, rounds: Sequence[Round]) -> int:
        """Runs rounds; returns the bytes that this rank sends over both wires."""
        return self._run(call, in_turns(rounds))

    def carry(self, call: Calls, work: Work) -> int:
        """Runs a program; returns the bytes that this rank sends over both wires."""
        return self._run(call, work.flow())

    def _run(self, call: Calls, flow: Flow) -> int:
        near = [task.peer in self._number for task in flow]
        self.sent += bytes_sent([task for task, here in zip(flow, near, strict=True) if here])
        marked = [
            task._replace(beside=self) if here else task
            for task, here in zip(flow, near, strict=True)
        ]
        return self._wire.run(call, marked)

    def __call__(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Passes the messages of a turn."""
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

    def abort(self, why: str = "") -> None:
        """Ends the waits of the ranks of this machine."""
        self._inside.abort(why)

    def close(self) -> None:
        """Releases the memory that they share."""
        self._inside.close()
