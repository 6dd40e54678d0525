"""Room in the memory of this machine: for the copies of a checkpoint, and for what is freed."""

from howdah.checkpoint.snapshot import Snapshots, snapshots_of
from howdah.host.facts import free_memory, total_memory
from howdah.parallel.mesh import Mesh
from howdah.plan.homes import homes
from howdah.plan.plan import Plan
from howdah.train.report import predicted_memory

HOLES = 2  # times the memory that it uses, a process has taken that keeps what it frees
SHARE = 0.9  # of what is free; the rest is for files that are read and written


def ranks_here(mesh: Mesh) -> int:
    """The ranks of the run on this rank's machine."""
    nodes = mesh.wires.nodes
    return nodes.count(nodes[mesh.rank]) if nodes else mesh.layout.world


def snapshots_for(plan: Plan, mesh: Mesh) -> Snapshots:
    """The snapshots of this rank, in its part of what is free beside the model and its states: on a
    CPU, less the activations of the plan. Without a bound if the system tells nothing.
    """
    free, on_cpu = free_memory(), mesh.device.type == "cpu"
    coming = predicted_memory(plan, mesh.rank).get("activations", 0) if on_cpu else 0
    room = None if free is None else max(int(SHARE * free) // ranks_here(mesh) - coming, 0)
    return snapshots_of(mesh.device, room)


def keeps_freed(plan: Plan, mesh: Mesh) -> bool:
    """Whether this rank keeps the memory that it frees, with which a step takes less time: always
    with all in memory; never with a home on a disk, which is asked for where memory is short; and
    with one on the host if the machine has room for the holes.
    """
    kinds, there = homes(plan.layout), total_memory()
    if kinds == {"device"} or "disk" in kinds or there is None:
        return "disk" not in kinds
    return HOLES * ranks_here(mesh) * sum(predicted_memory(plan, mesh.rank).values()) <= there
