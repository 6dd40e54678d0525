"""Steps in round numbers: blocks whose forward takes 1 s, on wires chosen for a block's bytes."""

from howdah.machines.cluster import Cluster, Device, Efficiency, Flops, Host, Link, Tree
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.mesh_axes import axis
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.plan.program import program_of
from howdah.plan.sharding import local_buffers
from howdah.plan.sums import sums_of
from howdah.shapes.shape import ModelShape
from howdah.sim.message_times import MessageTimes, RankMessages
from howdah.sim.operator_times import Triple
from howdah.sim.part_times import PartTimes
from howdah.sim.profile import PLAIN
from howdah.sim.rank_clock import RankClock

# Blocks of more than a bucket; embedding and head are next to nothing.
SHAPE = ModelShape(layers=3, width=1024, heads=8, ffn_size=2048, vocab=8, context=8)


def plan_of(layout, shape=SHAPE, **words):
    """A plan in float32, in which weights and gradients have as many bytes, with more words of its
    method.
    """
    method = Method(precision="float32", **words)
    return make_plan(
        shape, resolve(parse_layout(layout), None), Batch(micro_batch=1), sequence=8, method=method
    )


def wires(inside, between=None, *, nodes=1, per_node=8, latency=0.0):
    """A flat cluster with links of so many bytes/s; memory costs no time."""
    return Cluster(
        name="round",
        device=Device("chip", 1e30, 1e30, Flops(float32=1e30)),
        devices_per_node=per_node,
        nodes=nodes,
        inside=Link("inside", inside, latency),
        between=Link("between", between or inside, latency),
        network=Tree(),
        host=Host(1.0, Link("pcie", 1.0, 1.0)),
        nics=per_node,
        efficiency=Efficiency(1.0, 1.0, 1.0, 1.0),
    )


def block_bytes(plan):
    """Bytes of the gradients of a block on one rank."""
    return 4 * next(b.length for b in local_buffers(plan, 0) if b.unit == "layers.1")


def clock_of(plan, cluster, rank=0, *, forward=1.0, profile=PLAIN):
    """The clock of a rank on which a block's forward takes so long, and everything else no time;
    its messages and its program.
    """
    times = MessageTimes(plan, cluster)
    held, sums = local_buffers(plan, rank), sums_of(plan, rank)
    messages = RankMessages(times, plan, rank, sums=sums, held=held)
    index = axis(plan.layout, "pp").index_of(rank)
    parts = {
        stage: {part: PartTimes(Triple(*(forward * part.is_block,) * 3)) for part in some}
        for stage, (some, home) in enumerate(zip(plan.stages.parts, plan.stages.where, strict=True))
        if home == index
    }
    program = program_of(plan).schedule.programs[index]
    return RankClock(plan, program, messages, parts, profile), messages, program
