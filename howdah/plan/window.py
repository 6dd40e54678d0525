"""The window: the memory for whole gradients on a rank that keeps only shares of them.

A bucket (`plan/sums.py`) has a slot of the window from its first gradient until it is reduced to
shares. One slot is filled while another is reduced; the slots of some buckets stay open longer:

    tied embedding         from the head, which the backward pass reaches first, to the embedding
    relative positions     from the last block of a stack to its first
    split backward passes  the head's gradient is added before the pass that adds the others
    sums over tp ranks     until these sums have come back, while the next unit is computed

How many slots are open at once is counted here by running the schedule of the rank.
"""

from collections import Counter
from collections.abc import Sequence

from howdah.plan.gather_order import gradient_units
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import stage_parts, steady_schedule
from howdah.plan.schedule.actions import Kind
from howdah.plan.sharding import local_buffers
from howdah.plan.sum_order import Complete, SumOrder
from howdah.plan.sums import Sum, sums_of, used_by_several


def window_of(plan: Plan, rank: int) -> tuple[int, int]:
    """The window for full gradients on `rank`: its number of slots, and the elements of a slot.

    (0, 0) where the rank keeps full gradients.
    """
    sums = sums_of(plan, rank)
    buckets = [sum(row.messages) for row in sums if row.in_window]
    if not buckets:
        return 0, 0
    return min(_most_open(plan, rank, sums) + 1, len(buckets)), max(buckets)


class _Slots:
    """Counts the slots that are open, and the most that have been."""

    def __init__(self, sums: Sequence[Sum]) -> None:
        self.sums, self.now, self.most = sums, 0, 0

    def open(self, number: int, *, add: bool) -> bool:
        self.now += 1
        self.most = max(self.most, self.now)
        return True

    def start(self, number: int) -> Complete:
        self.now -= self.sums[number].in_window
        return lambda: None


def _most_open(plan: Plan, rank: int, sums: Sequence[Sum]) -> int:
    """The most slots that are open at once in a step."""
    slots = _Slots(sums)
    order = SumOrder(sums, slots)
    bucket = {span.unit: n for n, row in enumerate(sums) if row.in_window for span in row.spans}
    names = {buffer.unit: buffer.names for buffer in local_buffers(plan, rank)}
    pp_index, shared = axis(plan.layout, "pp").index_of(rank), used_by_several(plan, rank)
    parts = stage_parts(plan, pp_index)
    units = {stage: list(gradient_units(plan, some)) for stage, some in parts.items()}
    program = steady_schedule(plan).programs[pp_index]
    last = {action.stage: action for action in program if action.kind is not Kind.FORWARD}
    awaited: Counter[str] = Counter()  # uses of units whose gradients have not come

    for action in program:
        used = units[action.stage]
        if action.kind is Kind.FORWARD:
            awaited.update(unit for unit in used if unit in shared)
            continue
        if action.kind is Kind.INPUT:  # the gradient of the head is added at once
            early = {"head", "tied"} & bucket.keys() if "head" in parts[action.stage] else ()
            for unit in early:
                order.open(bucket[unit])
            continue
        if last[action.stage] == action:
            order.arm(action.stage)
        awaited.update(unit for unit in used if unit not in shared)
        for unit in reversed(used):
            if unit in bucket:
                order.open(bucket[unit])
            awaited[unit] -= 1
            if not awaited[unit]:
                for name in names[unit]:
                    order.ready(name)
        if last[action.stage] != action:
            order.finish(action.stage)
    for stage in last:  # as in the program: at the end of the step
        order.finish(stage)
    return slots.most
