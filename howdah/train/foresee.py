"""What the plan says of a run before its first step, and what the run measures of it.

Weights, masters, gradients and moments are tensors that can be asked for their size; what
autograd keeps between forward and backward is counted once, in a forward pass of its own on the
first micro-batch. Resident memory is not compared: it holds the interpreter and caches too.
"""

from collections import Counter
from collections.abc import Mapping

import torch

from howdah.model.noise import Noise
from howdah.model.saved import SavedBytes
from howdah.parallel.apply import Placed
from howdah.parallel.mesh import Mesh
from howdah.plan.plan import Plan
from howdah.sim.memory import memory
from howdah.sim.predict import kernels_of
from howdah.sim.traffic import step_traffic
from howdah.text.batches import Micro
from howdah.train.records import MIB
from howdah.train.step import Stepper, micro_loss

Bytes = Mapping[str, int]  # by component


def foretell(plan: Plan, mesh: Mesh) -> list[str]:
    """The predicted memory of this rank, and what it sends in a step."""
    held = predicted_memory(plan, mesh.rank)
    parts = ", ".join(f"{name} {count / MIB:.1f}" for name, count in held.items())
    sent = sum(step_traffic(plan, mesh.rank, mesh.wires).values())
    return [
        f"plan        {plan.layout}: {sum(held.values()) / MIB:,.1f} MiB a rank ({parts}); "
        f"sends {sent / MIB:,.1f} MiB a step"
    ]


def predicted_memory(plan: Plan, rank: int) -> Bytes:
    """Bytes of a rank by component, as the simulator has them."""
    rows: Counter[str] = Counter()
    for held in memory(plan, rank, kernels_of(plan)):
        rows[held.component] += held.bytes
    return rows


def measured_memory(stepper: Stepper, micro: Micro) -> Bytes:
    """The same, measured: on a model that has its optimizer state, with one micro-batch."""
    return {**_tensors(stepper.placed), "activations": _activations(stepper, micro)}


def _tensors(placed: Placed) -> dict[str, int]:
    units = placed.units.values()
    found = {
        "weights": sum(unit.weights.nbytes for unit in units),
        "masters": sum(u.masters.nbytes for u in units if u.masters.dtype != u.weights.dtype),
        "gradients": sum((u.summed if u.gradients is None else u.gradients).nbytes for u in units),
        "moments": sum(
            value.nbytes
            for states in placed.optimizer.state.values()
            for value in states.values()
            if value.ndim  # not the count of updates
        ),
    }
    return {name: count for name, count in found.items() if count}


def _activations(stepper: Stepper, micro: Micro) -> int:
    placed = stepper.placed
    noise = Noise(stepper.seed, 0, torch.from_numpy(micro.samples))
    with SavedBytes(placed.model.parameters()) as kept:
        loss = micro_loss(placed, micro, noise=noise)
    return kept.count(loss)


def compare(plan: Plan, mesh: Mesh, measured: Bytes) -> list[str]:
    """Measured beside predicted, component by component."""
    predicted = predicted_memory(plan, mesh.rank)
    parts = ", ".join(
        f"{name} {count / MIB:.1f} (predicted {predicted[name] / MIB:.1f})"
        for name, count in measured.items()
    )
    return [f"memory      MiB of rank {mesh.rank}: {parts}"]
