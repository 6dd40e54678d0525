"""Everything that is predicted for a plan before it runs: what `howdah plan` prints.

Memory and traffic are computed for one rank of every pipeline stage, and for one server; the others
do the same work. It is the first rank: where sizes do not divide evenly, the others may hold or
send a few elements less.
"""

from dataclasses import dataclass

from howdah.machines.cluster import Cluster, usable_memory
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan, for_gpus
from howdah.plan.recording import Traffic, Wires
from howdah.plan.servers import fullest
from howdah.sim.chosen import settled_plan
from howdah.sim.cost import Cost, hourly, run_cost
from howdah.sim.kernels import kernels_of
from howdah.sim.measured import profile_for
from howdah.sim.memory import Held, memory, peak
from howdah.sim.profile import Profile
from howdah.sim.step_time import StepTime, step_time
from howdah.sim.traffic import padding, step_traffic


@dataclass(frozen=True)
class Prediction:
    """A plan and everything that is predicted for it.

    memory   what one rank of each pipeline stage holds; last what a parameter server does, if any
    traffic  bytes that the same ranks send in a step
    time     time of a step; None without a cluster
    cost     cost of the whole run; None without a cluster or without the tokens of the run
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
    def padding(self) -> int:
        """Of the bytes of the rank that sends most, those that make shares equal on GPUs."""
        ranks = axis(self.plan.layout, "pp").group(0)
        most = max(range(len(ranks)), key=lambda stage: sum(self.traffic[stage].values()))
        return padding(self.plan, ranks[most])

    @property
    def capacity(self) -> float | None:
        """Bytes of a device's memory that a run can use; None without a cluster."""
        return usable_memory(self.cluster) if self.cluster else None


def predict(
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    tokens: float = 0,
    rent: float | None = None,
    profile: Profile | None = None,
) -> Prediction:
    """The prediction for `plan`.

    cluster  the machines; adds the time of a step
    tokens   tokens of the whole run; with a cluster, adds the cost of the run
    rent     USD per device and hour; None: the cluster's own
    profile  of the framework whose time it is; None: howdah

    On GPUs the shares of the plan are equal, as those of a run are.
    """
    if cluster and cluster.device.cuda_names:
        plan = for_gpus(plan)
    plan = settled_plan(plan, cluster)
    stages = [*axis(plan.layout, "pp").group(0)]
    stages += [fullest(plan.layout, plan.comm, plan.method.sync)] if plan.layout.server else []
    wires = Wires()
    if cluster:
        wires = Wires(cluster.inside.name, cluster.between.name, cluster.devices_per_node)
    time = (
        step_time(plan, cluster, profile or profile_for(cluster, plan.method)) if cluster else None
    )
    bill = None
    if cluster and time and tokens:
        rate, devices, rates = time.tokens_per_second, plan.layout.world, hourly(cluster, rent=rent)
        bill = run_cost(tokens, tokens_per_second=rate, devices=devices, rates=rates)
    return Prediction(
        plan,
        cluster,
        memory=[memory(plan, rank, kernels_of(plan)) for rank in stages],
        traffic=[step_traffic(plan, rank, wires) for rank in stages],
        time=time,
        cost=bill,
    )
