"""The mesh: this process's place in the layout, and a group for each axis.

layout dp2          rank 0 ── dp ── rank 1
"""

from dataclasses import dataclass

import torch

from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.comm.transport import Transport
from howdah.plan.layout import Layout
from howdah.sim.traffic import Wires


@dataclass(frozen=True)
class Mesh:
    """A resolved layout seen from one rank.

    wires  the classes of link that the counters tell apart
    """

    layout: Layout
    rank: int
    device: torch.device
    dp: Group
    counters: Counters
    wires: Wires

    def close(self) -> None:
        """Ends the groups' progress threads."""
        self.dp.close()


def connect_mesh(layout: Layout, transport: Transport, device: torch.device) -> Mesh:
    """The mesh of `layout` over the ranks that `transport` connects."""
    assert layout.world == transport.size, f"{layout} on {transport.size} ranks"
    counters = Counters()
    dp = Group(transport, axis="dp", counters=counters)
    wires = Wires(transport.link, transport.link)
    return Mesh(layout, transport.rank, device, dp, counters, wires)
