"""StageLinks: what carries messages between two pipeline ranks, each direction by itself.

    rank 0 ──── activations ───> rank 1      one transport and one progress thread for each
           <──── gradients ─────             direction of each pair: full-duplex wires

All messages of a direction are of one order, which both ends know (`plan/schedule/messages.py`):
none needs a name. That order would also do for both directions in one queue, as wires without
tags want it; then a message would wait behind those of the other direction.
"""

from collections.abc import Iterable
from concurrent.futures import Future

from torch import Tensor

from howdah.comm.group import Group
from howdah.parallel.mesh import Mesh
from howdah.plan.mesh_axes import axis
from howdah.plan.schedule.actions import Schedule
from howdah.plan.schedule.messages import message_order

Pair = tuple[int, int]  # places along pp: from, to


class StageLinks:
    """The directions that this rank has a part in; peers are named by their place along pp."""

    def __init__(self, mesh: Mesh, directions: Iterable[Pair]) -> None:
        ranks, self._own = axis(mesh.layout, "pp").group(mesh.rank), mesh.place("pp")
        self._groups: dict[Pair, Group] = {}
        for pair in sorted(directions):  # in one order on all ranks, or they wait for each other
            if self._own in pair:
                both = sorted(ranks[place] for place in pair)
                self._groups[pair] = mesh.join(both, label="pp")

    def send(self, x: Tensor, to: int) -> Future[None]:
        """Starts to send `x`, which must stay as it is until the future is done."""
        group = self._groups[self._own, to]
        return group.send(x, 1 - group.rank, async_op=True)

    def receive(self, x: Tensor, source: int) -> Future[None]:
        """Starts to receive into `x`."""
        group = self._groups[source, self._own]
        return group.receive(x, 1 - group.rank, async_op=True)


def directions_of(schedule: Schedule) -> set[Pair]:
    """Who sends to whom."""
    queues = message_order(schedule).values()
    return {(message.source, message.target) for queue in queues for message in queue}
