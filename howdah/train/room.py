"""Room for the copies of a checkpoint in the memory of this rank's machine."""

from howdah.checkpoint.snapshot import Snapshots, snapshots_of
from howdah.host.facts import free_memory
from howdah.parallel.mesh import Mesh
from howdah.plan.plan import Plan
from howdah.train.report import predicted_memory

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
