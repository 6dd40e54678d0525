"""What a run that ran out of memory could change: layouts of the same ranks and the same global
batch whose tensors take less.

    1. smaller micro-batches, and more of them     takes time where kernels become small
    2. recompute=full                              a third more flops
    3. the nearest other layout (`closest.py`)     more messages, or a bubble
    4. the first two together
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from howdah.base.errors import UserError
from howdah.plan.homes import homes
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan, beside, make_plan
from howdah.plan.support import unsupported
from howdah.search.closest import closest
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory, peak

Ways = Iterator[Plan]


class Smaller(NamedTuple):
    """A layout that takes less memory, in its spelling; the samples of its micro-batches; and the
    bytes of the rank that takes most.
    """

    layout: str
    micro_batch: int
    bytes: int


def smaller(plan: Plan, most: float) -> list[Smaller]:
    """What could run in place of `plan` with at most `most` bytes on every rank: the first of each
    way that fits, at most two of them.
    """
    found: dict[str, Smaller] = {}
    for way in WAYS:
        for other in way(plan, most):
            taken = _takes(other)
            if taken <= most and _runs(other, plan):
                here = Smaller(str(other.layout), other.micro_batch, taken)
                found.setdefault(here.layout, here)
                break
        if len(found) == 2:
            break
    return [*found.values()]


def _runs(other: Plan, plan: Plan) -> bool:
    """Whether `other` can run in place of `plan`, and saves memory: on CPUs the host is the
    device.
    """
    more = homes(other.layout) - homes(plan.layout)
    saves = plan.on_gpus or "host" not in more
    return saves and not unsupported(other.shape, other.layout)


def _micro_batches(plan: Plan, most: float) -> Ways:
    size = plan.micro_batch
    while size > 1:
        size = -(-size // 2)
        yield from _with(plan, plan.layout, micro_batch=size)


def _recompute(plan: Plan, most: float) -> Ways:
    if plan.layout.recompute != "full" or plan.layout.recompute_blocks is not None:
        yield from _with(plan, _all_again(plan.layout), micro_batch=plan.micro_batch)


def _other_layout(plan: Plan, most: float) -> Ways:
    if other := closest(plan, most):
        yield from _with(plan, other, micro_batch=plan.micro_batch)


def _both(plan: Plan, most: float) -> Ways:
    for other in _micro_batches(plan, most):
        yield from _with(plan, _all_again(plan.layout), micro_batch=other.micro_batch)


WAYS: tuple[Callable[[Plan, float], Ways], ...] = (
    *(_micro_batches, _recompute, _other_layout, _both),
)


def _all_again(layout: Layout) -> Layout:
    return replace(layout, recompute="full", recompute_blocks=None)


def _with(plan: Plan, layout: Layout, *, micro_batch: int) -> Ways:
    """The plan on another layout and with other micro-batches of the same global batch; nothing if
    they do not go together.
    """
    batch = replace(plan.batch, micro_batch=micro_batch)
    try:
        layout = replace(layout, micros=None)
        other = make_plan(plan.shape, layout, batch, sequence=plan.sequence, method=plan.method)
        yield beside(plan, other)
    except UserError:
        return


def _takes(plan: Plan) -> int:
    stages = axis(plan.layout, "pp").group(0)
    return max(peak(memory(plan, rank, kernels_of(plan))) for rank in stages)
