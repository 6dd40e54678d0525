"""Everything that is said of a plan before it runs, gathered: what `howdah plan` prints.

One rank of every pipeline stage stands for the others of its stage, which do the same work; where
sizes do not divide it is the first, and others may hold or send a few elements less.

Where the plan does not fit the device, `closest` looks for the smallest change of layout on the
same devices that does: up to three changes at once, the cheapest first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

from howdah.plan.activations import Kernels, howdah
from howdah.plan.cluster import Cluster
from howdah.plan.layout import Layout, needs_own
from howdah.plan.plan import Plan, make_plan
from howdah.plan.problems import BadInput
from howdah.plan.ranks import axis
from howdah.sim.cost import Cost, hourly, run_cost
from howdah.sim.memory import Held, memory, peak
from howdah.sim.step_time import StepTime, step_time
from howdah.sim.traffic import Traffic, Wires, step_traffic

TRIES = 120  # sets of changes that `closest` looks at


@dataclass(frozen=True)
class Prediction:
    """A plan, and what follows from it.

    memory   what one rank of each pipeline stage holds
    traffic  what it sends in a step
    time     of a step, where a cluster is given
    cost     of the whole run, where its tokens are given too
    """

    plan: Plan
    cluster: Cluster | None
    memory: list[list[Held]]
    traffic: list[dict[Traffic, int]]
    time: StepTime | None = None
    cost: Cost | None = None

    @property
    def peak(self) -> int:
        """The most bytes that any stage's device holds."""
        return max(peak(held) for held in self.memory)

    @property
    def capacity(self) -> float | None:
        """Bytes of a device that a run can use."""
        device = self.cluster.device if self.cluster else None
        return device.memory - device.reserved if device else None


def predict(plan: Plan, cluster: Cluster | None = None, *, tokens: float = 0) -> Prediction:
    """What is said of `plan`; time on `cluster`, and the cost of a run of `tokens` there."""
    stages = axis(plan.layout, "pp").group(0)
    wires = Wires()
    if cluster:
        wires = Wires(cluster.inside.name, cluster.between.name, cluster.devices_per_node)
    time = step_time(plan, cluster) if cluster else None
    bill = None
    if cluster and time and tokens:
        rate, devices = time.tokens_per_second, plan.layout.world
        bill = run_cost(tokens, tokens_per_second=rate, devices=devices, rates=hourly(cluster))
    return Prediction(
        plan,
        cluster,
        memory=[memory(plan, rank, kernels_of(plan)) for rank in stages],
        traffic=[step_traffic(plan, rank, wires) for rank in stages],
        time=time,
        cost=bill,
    )


def kernels_of(plan: Plan) -> Kernels:
    """What the operations of this project's own model keep for the backward pass."""
    noise, own = plan.method.dropout > 0, needs_own(plan.layout)
    kept = howdah(compute=plan.narrow, dropout=noise, packed=True, own=own)
    return replace(kept, gathered=plan.layout.inputs == "gathered")


# -- what fits -----------------------------------------------------------------------


class Change(NamedTuple):
    """A change of a layout, and roughly what it costs: the order in which changes are tried."""

    cost: int
    values: dict[str, object]


def closest(plan: Plan, capacity: float) -> Layout | None:
    """The layout on as many devices, with the least changed, whose stages stay in `capacity`."""
    found = list(_changes(plan.layout))
    sets = [chosen for count in range(1, 4) for chosen in combinations(found, count)]
    for chosen in sorted(sets, key=lambda s: sum(change.cost for change in s))[:TRIES]:
        values = {name: value for change in chosen for name, value in change.values.items()}
        if len(values) < sum(len(change.values) for change in chosen):
            continue  # two of them change the same word
        if (other := _changed(plan, values)) and _fits(other, capacity):
            return other.layout
    return None


def _changes(layout: Layout) -> Iterator[Change]:
    """States shared out cost messages, tp more of them, pp a bubble, recomputation flops."""
    for zero in range(layout.zero + 1, 4):
        yield Change(zero, {"zero": zero, "accumulate": None})
    if layout.recompute != "full":
        yield Change(4, {"recompute": "full"})
    for axis_name, sizes in (("tp", (2, 4, 8)), ("pp", (2, 4, 8, 16))):
        before = getattr(layout, axis_name)
        for size in sizes:
            ranks = (layout.dp or 1) * before
            if size > before and ranks % size == 0:
                sp = {"sp": True} if axis_name == "tp" else {}
                yield Change(2 + size // before, {axis_name: size, "dp": ranks // size, **sp})
    if layout.optimizer == "device":
        yield Change(10, {"optimizer": "host"})


def _changed(plan: Plan, changes: dict[str, object]) -> Plan | None:
    """The plan on the changed layout with the same micro-batch; None where that is no plan."""
    try:
        layout = replace(plan.layout, **changes)  # type: ignore[arg-type]
        batch = replace(plan.batch, global_batch=None)
        method = plan.method
        return make_plan(plan.shape, layout, batch, sequence=plan.sequence, method=method)
    except BadInput:
        return None


def _fits(plan: Plan, capacity: float) -> bool:
    """Whether every stage does; most that do not fit show it in the first."""
    stages = axis(plan.layout, "pp").group(0)
    return all(peak(memory(plan, rank, kernels_of(plan))) <= capacity for rank in stages)
