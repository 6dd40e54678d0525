"""What one rank holds, in bytes, by component, home and moment, before anything is allocated.

A step has two moments. In the *passes* activations come and go, in the *update* the optimizer
works; what a rank needs is the larger. Ψ elements of the rank's own buffers, padding included,
and N ranks that share out one copy of them, in bf16 with Adam:

    component    bytes                              moments
    weights      2Ψ   zero3: ÷N                     both
    masters      4Ψ   from zero1 on ÷N              both     none where weights are wide
    gradients    4Ψ   accumulate=shard: ÷N          both
    moments      8Ψ   from zero1 on ÷N              both     the optimizer's, 4Ψ each
    gathered     2Ψ of two units, in zero3          passes   the unit in use and the next
    reduced      4Ψ of a few buckets, where shares  passes   before they are cut
                 add (`plan/buckets.py`)
    activations  those in flight, by the schedule   passes
    recomputed   what one block keeps no longer     passes   while its backward pass runs

A unit that is not cut (N = 1, or experts that live on one rank each) is neither gathered nor cut,
and what lives on another home leaves the same windows on the device as what is shared out.

Activations are the lists of `shapes/activations.py`; how many micro-batches are in flight is asked
of the schedule itself. Frameworks that keep other formats are another `Width`; the table of the
ZeRO paper (https://arxiv.org/abs/1910.02054, figure 1) is `states` with 2-byte gradients.

Not counted: what a device takes before the first tensor, workspaces of kernels, and the gaps of
an allocator. `bench/memory/` says how much those are in published runs.
"""

from math import prod
from typing import Literal, NamedTuple

from howdah.plan.buckets import window_of
from howdah.plan.flat_buffers import Buffer, share
from howdah.plan.layout import Home, Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import schedule_of
from howdah.plan.schedule.held import peak_held
from howdah.plan.sharding import local_buffers, local_of, replicas_of
from howdah.plan.stages import stages_of
from howdah.shapes.activations import Kernels, bytes_of, made_again, saved, shared

Moment = Literal["passes", "update"]
PASSES: tuple[Moment, ...] = ("passes",)
BOTH: tuple[Moment, ...] = ("passes", "update")

# Units that are whole on the device, of those that are not kept there: in use, and the next.
WINDOW = 2

# What these hold no longer grows with the micro-batches from a few for each rank on.
STEADY = ("naive", "1f1b", "zb-h1", "zb-h2", "zb-v", "terapipe")


class Held(NamedTuple):
    """One component on one rank: where it lives, when, and its bytes."""

    component: str
    home: Home
    moments: tuple[Moment, ...]
    bytes: int


class Width(NamedTuple):
    """Bytes for each element of a component; 0 where there is none. `moments` are all together."""

    weights: int
    masters: int
    gradients: int
    moments: int
    gathered: int
    reduced: int


def width_of(plan: Plan) -> Width:
    """What howdah keeps: everything at least in float32, but weights as they are multiplied."""
    narrow, wide = plan.compute_bytes, plan.master_bytes
    masters = 0 if narrow == wide else wide
    moments = wide * len(plan.method.optimizer.states)
    return Width(narrow, masters, wide, moments, gathered=narrow, reduced=wide)


def memory(plan: Plan, rank: int, kernels: Kernels, width: Width | None = None) -> list[Held]:
    """Everything that `rank` holds; each component is one row, and those of no bytes are none.

    kernels  what the operations save for the backward pass
    width    the formats of another framework; howdah's own if None
    """
    width = width or width_of(plan)
    cuts = [(b.length, _own(b, plan, rank)) for b in local_buffers(plan, rank)]
    rows = [row for whole, own in cuts for row in states(whole, own, plan.layout, width)]
    rows += [*_windows(cuts, plan, rank, width), *_activations(plan, rank, kernels)]
    total: dict[tuple[str, Home, tuple[Moment, ...]], int] = {}
    for name, home, moments, count in rows:
        total[name, home, moments] = total.get((name, home, moments), 0) + count
    return [Held(*key, count) for key, count in total.items() if count]


def states(whole: int, own: int, layout: Layout, width: Width) -> list[Held]:
    """Weights, gradients and the optimizer's of `whole` elements of which `own` are the share."""
    sharded = own if layout.zero else whole
    parts = {
        "weights": (own if layout.zero == 3 else whole, layout.weights),
        "masters": (sharded, layout.optimizer),
        "gradients": (own if layout.accumulate == "shard" else whole, layout.gradients),
        "moments": (sharded, layout.optimizer),
    }
    return [
        Held(name, home, BOTH, count * getattr(width, name))
        for name, (count, home) in parts.items()
    ]


def peak(held: list[Held], home: Home = "device") -> int:
    """The most bytes that `home` holds at any moment."""
    return max(
        sum(row.bytes for row in held if row.home == home and moment in row.moments)
        for moment in BOTH
    )


# -- shares and windows ------------------------------------------------------------


def _own(buffer: Buffer, plan: Plan, rank: int) -> int:
    """The elements of the rank's share of a unit."""
    experts = replicas_of(buffer.unit) == "expert_replicas"
    group = axis(plan.layout, "expert_shard" if experts else "shard")
    start, stop = share(buffer.length, group.size, group.place(rank))
    return stop - start


def _windows(cuts: list[tuple[int, int]], plan: Plan, rank: int, width: Width) -> list[Held]:
    """Whole units that come and go on the device, beside shares and what lives elsewhere."""
    layout = plan.layout
    gathered = _comes(cuts, layout.weights, layout.zero == 3)
    if layout.release == "use":
        gathered = gathered[:WINDOW]
    reduced = _comes(cuts, layout.gradients, shared_out=False)[:1]
    reduced = [max([prod(window_of(plan, rank)), *reduced])]
    return [
        Held("gathered", "device", PASSES, sum(gathered) * width.gathered),
        Held("reduced", "device", PASSES, sum(reduced) * width.reduced),
    ]


def _comes(cuts: list[tuple[int, int]], home: Home, shared_out: bool) -> list[int]:
    """Elements of the units that are not kept whole on the device, the largest first."""
    elsewhere = home != "device"
    found = [whole for whole, own in cuts if elsewhere or (shared_out and own < whole)]
    return sorted(found, reverse=True)


# -- activations -------------------------------------------------------------------


def _activations(plan: Plan, rank: int, kernels: Kernels) -> list[Held]:
    layout, of = plan.layout, local_of(plan, rank)
    mine = stages_of(plan.stages.where, axis(layout, "pp").place(rank))

    def kept(part: str) -> int:
        recompute = plan.recompute.get(part, "none")
        return bytes_of(saved(plan.shape, part, kernels, recompute), of, compute=plan.compute_bytes)

    def anew(part: str) -> int:
        recompute = plan.recompute.get(part, "none")
        return bytes_of(
            made_again(plan.shape, part, kernels, recompute), of, compute=plan.compute_bytes
        )

    once = bytes_of(shared(plan.shape, kernels), of, compute=plan.compute_bytes)
    per_stage = [0] * len(plan.stages.where)
    for stage in mine:
        parts = plan.stages.parts[stage]
        blocks = any("." in part for part in parts)
        per_stage[stage] = sum(kept(part) for part in parts) + blocks * once

    elsewhere = layout.activations != "device"
    again = max(
        anew(part) + elsewhere * kept(part) for stage in mine for part in plan.stages.parts[stage]
    )
    return [
        Held("activations", layout.activations, PASSES, _in_flight(plan, rank, per_stage)),
        Held("recomputed", "device", PASSES, again),
    ]


def _in_flight(plan: Plan, rank: int, per_stage: list[int]) -> int:
    """The most bytes that the schedule holds at once on `rank`."""
    layout, micros = plan.layout, plan.micros
    if layout.schedule is None:
        return sum(per_stage)
    if layout.schedule in STEADY and not plan.schedule:
        micros = min(micros, 4 * layout.pp * layout.virtual)
    schedule = schedule_of(plan, micros)
    return peak_held(schedule, axis(layout, "pp").place(rank), sizes=per_stage)
