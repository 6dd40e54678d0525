"""By which programs the collectives of the torch backend travel between machines.

    as many ranks on each machine, and more than one    a hierarchy: inside the machine through
                                                        shared memory, and once over its card
    two machines of one rank                            long all-reduces in pieces that follow each
                                                        other: the wire works while a rank adds
    other groups                                        directly: each rank to every other one

Directly, what two ranks of a machine both need goes over its card twice. FSDP2 on two machines of
two ranks: for a layer of n bytes, forward and backward, a card sends 3n directly (and over gloo),
3n/2 by a hierarchy. Longer rings are left out: they would round bf16 at each hop.
"""

from howdah.collectives.choice import placement
from howdah.comm.chosen import choosing
from howdah.comm.transport import Transport
from howdah.plan.comm import Algorithms

BY_SIZE = "hierarchical to 256 KiB, hierarchical pieces=4"
HIERARCHY = Algorithms(
    all_reduce=BY_SIZE, reduce_scatter=BY_SIZE, all_gather=BY_SIZE, broadcast="hierarchical"
)
PAIR = Algorithms(all_reduce="default to 1 MiB, segmented_ring pieces=4")


def between_machines(wire: Transport) -> Transport:
    """The transport of a group, with these programs where its ranks are on several machines. All
    ranks of the group call together.
    """
    nodes = wire.among.wires.nodes
    if len(set(nodes)) < 2:
        return wire
    each, _ = placement(nodes)
    if each and each > 1:
        return choosing(wire, HIERARCHY)
    return choosing(wire, PAIR) if wire.size == 2 else wire
