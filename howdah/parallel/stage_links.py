"""StageLinks: the connections that carry messages between two pipeline ranks, one per direction.

    rank 0 ──── activations ───> rank 1      one transport and one progress thread for each
           <──── gradients ─────             direction of each pair: full-duplex wires

All messages of a direction have one order, which both ends know (`plan/schedule/messages.py`), so
messages need no tags. This order would also allow one queue for both directions, as transports
without tags require; but then a message would wait behind those of the other direction.
"""

from collections.abc import Iterable

from torch import Tensor

from howdah.comm.group import Group
from howdah.comm.handle import Handle
from howdah.parallel.mesh import Mesh
from howdah.plan.mesh_axes import axis
from howdah.plan.schedule.actions import Schedule
from howdah.plan.schedule.messages import message_order

Pair = tuple[int, int]  # indices along pp: from, to


class StageLinks:
    """The directions in which this rank sends or receives; peers are named by their index along
    pp.
    """

    def __init__(self, mesh: Mesh, directions: Iterable[Pair]) -> None:
        ranks, self._own = axis(mesh.layout, "pp").group(mesh.rank), mesh.index_of("pp")
        self._groups: dict[Pair, Group] = {}
        for pair in sorted(directions):  # in one order on all ranks, to avoid deadlock
            if self._own in pair:
                both = sorted(ranks[index] for index in pair)
                self._groups[pair] = mesh.join(both, label="pp")

    def send(self, x: Tensor, to: int) -> Handle:
        """Starts to send `x` to the peer `to`. `x` must not change until the handle is done."""
        group = self._groups[self._own, to]
        return group.send(x, 1 - group.rank, async_op=True)

    def receive(self, x: Tensor, source: int) -> Handle:
        """Starts to receive from the peer `source` into `x`."""
        group = self._groups[source, self._own]
        return group.receive(x, 1 - group.rank, async_op=True)


def directions_of(schedule: Schedule) -> set[Pair]:
    """The pairs (from, to) of pipeline ranks between which messages are sent."""
    queues = message_order(schedule).values()
    return {(message.source, message.target) for queue in queues for message in queue}
