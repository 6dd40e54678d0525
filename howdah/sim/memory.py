"""What one rank holds, in bytes, by component, home and moment, before anything is allocated.

A step has two moments. In the *passes* activations come and go, in the *update* the optimizer
works; what a rank needs is the larger. Letters: Ψ elements of the rank's own buffers, padding
included; N the ranks that share out one copy; 2, 4 bytes for bf16, where masters are apart.

    component    bytes                               moments
    weights      2Ψ            zero3: 2Ψ/N           both
    masters      4Ψ            from zero1 on 4Ψ/N    both      none where weights are wide
    gradients    4Ψ            shares: 4Ψ/N          both
    moments      4Ψ per state  from zero1 on ÷N      both
    gathered     2Ψ of two units, zero3              passes    the unit in use and the next
    reduced      4Ψ of one unit, where shares add up passes    before it is cut
    activations  those in flight, by the schedule    passes
    recomputed   one block's, with recompute=full    passes

Activations are the explicit list of `plan/activations.py`; how many micro-batches are in flight
is asked of the schedule itself. The ZeRO paper's table (https://arxiv.org/abs/1910.02054, figure
1) follows from `states`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from howdah.plan.activations import Kernels, bytes_of, saved, shared
from howdah.plan.dims import Local
from howdah.plan.flat import Buffer, share
from howdah.plan.layout import Home, Layout
from howdah.plan.plan import Plan
from howdah.plan.ranks import axis
from howdah.plan.schedule.held import peak_held
from howdah.plan.schedule.registry import build
from howdah.plan.sharding import local_buffers, local_of, replicas_of

Moment = Literal["passes", "update"]
PASSES: tuple[Moment, ...] = ("passes",)
BOTH: tuple[Moment, ...] = ("passes", "update")

# What is kept on another home leaves a window on the device: the unit in use and the next.
WINDOW = 2


class Held(NamedTuple):
    """One component on one rank: where it lives, when, and its bytes."""

    component: str
    home: Home
    moments: tuple[Moment, ...]
    bytes: int


class Width(NamedTuple):
    """Bytes of an element.

    narrow   of weights and activations
    wide     of masters and moments
    reduced  of gradients
    """

    narrow: int
    wide: int
    reduced: int


def memory(plan: Plan, rank: int, kernels: Kernels) -> list[Held]:
    """Everything that `rank` holds. `kernels` says what the operations save for backward."""
    buffers = local_buffers(plan, rank)
    lengths = [(b.length, _own(b, plan, rank)) for b in buffers]
    width = Width(plan.narrow, plan.wide, plan.wide)
    held = [
        row
        for whole, own in lengths
        for row in states(whole, own, plan.layout, width, moments=len(plan.method.optimizer.states))
    ]
    largest = sorted((whole for whole, _ in lengths), reverse=True)
    return [
        *_sum(held),
        *_transient(largest, plan.layout, width),
        *_activations(plan, rank, kernels),
    ]


def states(whole: int, own: int, layout: Layout, width: Width, *, moments: int) -> list[Held]:
    """Weights, gradients and optimizer state of `whole` elements of which `own` are the share."""
    zero = layout.zero
    parts = {
        "weights": ((own if zero == 3 else whole) * width.narrow, layout.weights),
        "masters": ((own if zero else whole) * width.wide, layout.optimizer),
        "gradients": (_kept(whole, own, layout) * width.reduced, layout.gradients),
        "moments": ((own if zero else whole) * width.wide * moments, layout.optimizer),
    }
    if width.narrow == width.wide:
        del parts["masters"]
    return [Held(name, home, BOTH, count) for name, (count, home) in parts.items()]


def peak(held: list[Held], home: Home = "device") -> int:
    """The most bytes that `home` holds at any moment."""
    return max(
        sum(row.bytes for row in held if row.home == home and moment in row.moments)
        for moment in BOTH
    )


# -- parts -----------------------------------------------------------------------


def _own(buffer: Buffer, plan: Plan, rank: int) -> int:
    experts = replicas_of(buffer.unit) == "expert_replicas"
    group = axis(plan.layout, "expert_shard" if experts else "shard")
    start, stop = share(buffer.length, group.size, group.place(rank))
    return stop - start


def _kept(whole: int, own: int, layout: Layout) -> int:
    """Elements of gradients that stay between micro-batches."""
    return own if layout.accumulate == "shard" else whole


def _sum(held: list[Held]) -> list[Held]:
    """Rows of the same component, home and moments as one."""
    total: dict[tuple[str, Home, tuple[Moment, ...]], int] = {}
    for name, home, moments, count in held:
        total[name, home, moments] = total.get((name, home, moments), 0) + count
    return [Held(*key, count) for key, count in total.items() if count]


def _transient(largest: list[int], layout: Layout, width: Width) -> list[Held]:
    """Whole units that come and go on the device, beside shares and what lives elsewhere."""
    rows = []
    if layout.zero == 3 or layout.weights != "device":
        rows.append(Held("gathered", "device", PASSES, sum(largest[:WINDOW]) * width.narrow))
    if layout.accumulate == "shard" or layout.gradients != "device":
        rows.append(Held("reduced", "device", PASSES, sum(largest[:1]) * width.reduced))
    return rows


def _activations(plan: Plan, rank: int, kernels: Kernels) -> list[Held]:
    layout, of = plan.layout, local_of(plan, rank)
    mine = [s for s, home in enumerate(plan.stages.where) if home == axis(layout, "pp").place(rank)]
    per_stage = [0] * len(plan.stages.where)
    for stage in mine:
        per_stage[stage] = _stage_bytes(plan, stage, kernels, of)
    count = _in_flight(plan, rank, per_stage)
    rows = [Held("activations", layout.activations, PASSES, count)]
    if layout.recompute == "full" or layout.activations != "device":
        parts = [part for stage in mine for part in plan.stages.parts[stage] if "." in part]
        again = max((_bytes(plan, kernels, of)(part) for part in parts), default=0)
        rows.append(Held("recomputed", "device", PASSES, again))
    return rows


def _stage_bytes(plan: Plan, stage: int, kernels: Kernels, of: Local) -> int:
    parts, recompute = plan.stages.parts[stage], plan.layout.recompute
    kept = [one for part in parts for one in saved(plan.shape, part, kernels, recompute)]
    return bytes_of([*kept, *shared(plan.shape, kernels)], of, compute=plan.narrow)


def _bytes(plan: Plan, kernels: Kernels, of: Local) -> Callable[[str], int]:
    return lambda part: bytes_of(saved(plan.shape, part, kernels), of, compute=plan.narrow)


def _in_flight(plan: Plan, rank: int, per_stage: list[int]) -> int:
    """The most bytes that the schedule holds at once on `rank`."""
    layout = plan.layout
    if layout.schedule is None:
        return sum(per_stage)
    schedule = build(
        layout.schedule,
        ranks=layout.pp,
        micros=min(plan.micros, 4 * layout.pp * layout.virtual),  # it repeats itself from there on
        virtual=layout.virtual,
        slices=layout.slices,
    )
    return peak_held(schedule, axis(layout, "pp").place(rank), sizes=per_stage)
