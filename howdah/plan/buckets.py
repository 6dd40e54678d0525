"""Buckets: the units whose gradients are reduced in one call.

Every call costs a latency, however small its message; filling a large bucket delays gradients that
could already be sent. Units are taken in the order in which the backward pass finishes them, and a
bucket is closed as soon as it holds enough bytes.

    backward finishes   head  layers.5  layers.4  layers.3  ...  embedding
    buckets            [head  layers.5][layers.4  layers.3] ... [embedding]

The stages of a pipeline rank finish at different times, so each stage has buckets of its own. So
has a tied embedding whose two stages are on two ranks.

Where a rank keeps only its share of the gradients, full gradients exist in a window of a few slots,
each as long as the longest bucket. One slot is filled while another is reduced; the slots of some
buckets stay open longer.
"""

from collections.abc import Sequence

from howdah.plan.flat_buffers import Buffer
from howdah.plan.layout import family_of
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import schedule_of, stage_parts, tied_stages
from howdah.plan.schedule.actions import Kind
from howdah.plan.sharding import local_buffers, summed_over_tp
from howdah.shapes.weights import parts_of

BUCKET_BYTES = 4 << 20


def fill_buckets(
    buffers: Sequence[Buffer], *, element_bytes: int, least_bytes: int | None = None
) -> list[list[Buffer]]:
    """The buckets of `buffers`, in the order in which the backward pass completes them.

    buffers        in forward order
    element_bytes  bytes of one gradient element
    least_bytes    every bucket but the last holds at least so many bytes; None: BUCKET_BYTES
    """
    least_bytes = BUCKET_BYTES if least_bytes is None else least_bytes
    buckets: list[list[Buffer]] = [[]]
    for buffer in reversed(buffers):
        filled = sum(b.length for b in buckets[-1]) * element_bytes
        if buckets[-1] and filled >= least_bytes:
            buckets.append([])
        buckets[-1].append(buffer)
    return [bucket for bucket in buckets if bucket]


def summed_together(plan: Plan, rank: int) -> dict[int, list[list[Buffer]]]:
    """The buffers whose gradients `rank` reduces together: one list or two for each of its stages.

    The second list holds a tied embedding whose stages are on two ranks. A buffer that several
    stages use is reduced with the stage that computes its gradients last.
    """
    buffers = local_buffers(plan, rank)
    if plan.layout.pp == 1:
        return {0: [list(buffers)]}
    place = axis(plan.layout, "pp").index_of(rank)
    program, mine = schedule_of(plan).programs[place], stage_parts(plan, place)
    ends = [a.stage for a in program if a.kind in (Kind.BACKWARD, Kind.WEIGHT)]
    last = {stage: number for number, stage in enumerate(ends)}
    apart = tied_stages(plan) is not None
    found: dict[int, list[list[Buffer]]] = {stage: [[], []] for stage in mine}
    for buffer in buffers:
        users = set(parts_of(buffer.unit, plan.shape))
        used = [stage for stage, parts in mine.items() if set(parts) & users]
        stage = max(used, key=last.__getitem__)
        found[stage][apart and buffer.unit == "tied"].append(buffer)
    return {stage: [group for group in groups if group] for stage, groups in found.items()}


def window_of(plan: Plan, rank: int) -> tuple[int, int]:
    """The window for full gradients on `rank`: its number of slots, and the elements of a slot.

    (0, 0) where the rank keeps full gradients, or where there is only one replica.
    """
    layout = plan.layout
    if layout.accumulate != "shard" or layout.replicas == 1:
        return 0, 0
    buckets = [
        bucket
        for groups in summed_together(plan, rank).values()
        for group in groups
        for bucket in fill_buckets(group, element_bytes=plan.master_bytes)
    ]
    names = {buffer.unit for bucket in buckets for buffer in bucket}
    heads = {"head", "tied"} & names
    stays_open = "tied" in names and _uses_twice(plan, rank)  # between head and embedding
    early = (plan.schedule is not None or family_of(layout).split) and bool(heads)
    parts = layout.tp > 1 and any(
        len(summed_over_tp(plan.weight(name), plan, rank)) > 1
        for bucket in buckets
        for buffer in bucket
        for name in buffer.names
    )
    slots = 2 + (stays_open or early) + parts
    longest = max(sum(buffer.length for buffer in bucket) for bucket in buckets)
    return min(slots, len(buckets)), longest


def used_by_several(plan: Plan, rank: int) -> frozenset[str]:
    """The names of the weights that several stages of `rank` use."""
    mine = stage_parts(plan, axis(plan.layout, "pp").index_of(rank))
    return frozenset(
        name
        for buffer in local_buffers(plan, rank)
        for users in [set(parts_of(buffer.unit, plan.shape))]
        if sum(bool(set(parts) & users) for parts in mine.values()) > 1
        for name in buffer.names
    )


def _uses_twice(plan: Plan, rank: int) -> bool:
    """Whether embedding and head, the two uses of a tied weight, are both on `rank`."""
    place = axis(plan.layout, "pp").index_of(rank)
    mine = {part for parts in stage_parts(plan, place).values() for part in parts}
    return {"embedding", "head"} <= mine
