"""Bytes that pass through memory because weights are gathered in 8 bits, or gradients are summed in
4 (`plan/quantised.py`): processors and GPUs do it in one pass over what is read and written.

    a gather   a rank rounds its share; a message of all shares is moved aside and restored
    a hop      all that is sent is rounded; what is heard is added to a sum that is k times shorter
"""

from howdah.plan.flat_buffers import Buffer
from howdah.plan.gather_order import units_at
from howdah.plan.plan import Plan
from howdah.plan.quantised import hops, message_bytes
from howdah.plan.sharding import local_buffers, shard_axes
from howdah.shapes.part import Part
from howdah.shapes.weights import FROZEN


def rounded(plan: Plan, rank: int, part: Part) -> tuple[float, float]:
    """Bytes of one pass of a part, forward and backward, for one micro-batch (and token slice)."""
    if not plan.in_blocks or plan.layout.zero < 2:
        return 0.0, 0.0
    units, restored, summed = {*units_at(plan, part)}, 0.0, 0.0
    for buffer in local_buffers(plan, rank):
        if buffer.unit.removeprefix(FROZEN) not in units:
            continue
        ranks = shard_axes(plan.layout, buffer.unit)[0].size
        if ranks > 1 and plan.quantised:
            restored += _restored(plan, buffer, ranks)
        if ranks > 1 and buffer.trains and plan.method.gradient_dtype == "int4":
            summed += _summed(plan, buffer, ranks)
    back = restored * (part not in plan.marks.still)
    if plan.layout.release == "step":
        restored, back = restored / plan.micros, 0.0
    slices = plan.layout.slices
    return restored / slices, (back + summed) / slices


def _restored(plan: Plan, buffer: Buffer, ranks: int) -> float:
    message, whole = message_bytes(buffer.length), buffer.length * plan.compute_bytes
    return (message + whole) / ranks + 3 * message + whole


def _summed(plan: Plan, buffer: Buffer, ranks: int) -> float:
    near = plan.layout.hpz or ranks
    sizes = [near, ranks // near] if plan.layout.hpz else [ranks]
    found, width = 0.0, plan.master_bytes
    for hop in hops(buffer.length, sizes):
        found += 3 * hop.elements * width + 2 * hop.ranks * hop.message
    return found
