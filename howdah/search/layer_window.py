"""How many units of weights a device should hold where weights have another home
(`storage.window`; layer windows: https://arxiv.org/abs/2206.03664).

    fetch      | 1 | 2 | 3 |   | 4 | 5 |      a wider window lets the link work ahead while a unit
    compute    | 0 |1|2|    3    |4| 5 …      takes long, and keeps what is used again soon

The step is simulated with windows of 3, 4, 6, 8, 12, … units, as far as the device has room for
them; the narrowest is taken whose step is as short as that of the best, within `GAIN`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from howdah.base.errors import UserError
from howdah.base.quantities import spell
from howdah.machines.cluster import Cluster, usable_memory
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.sharding import local_buffers
from howdah.search.stage_cut import GAIN
from howdah.sim.kernels import kernels_of
from howdah.sim.measured import profile_for
from howdah.sim.memory import memory, peak
from howdah.sim.profile import Profile
from howdah.sim.step_time import StepTime, step_time


class Wider(NamedTuple):
    """A plan with a wider window, the time of its step, and bytes on the fullest device."""

    plan: Plan
    time: StepTime
    peak: int


def has_window(layout: Layout) -> bool:
    """Whether weights come from another home, unit by unit."""
    return layout.weights != "device" and layout.release == "use"


def wider(plan: Plan, cluster: Cluster, profile: Profile, *, capacity: float) -> Wider | None:
    """The plan with the window that it should have; None if that is no wider than its own.

    capacity  bytes of a device
    """
    own = step_time(plan, cluster, profile).seconds
    found = []
    for other in _windows(plan) if has_window(plan.layout) else ():
        if (most := _fullest(other)) > capacity:
            break
        found.append(Wider(other, step_time(other, cluster, profile), most))
    best = min((one.time.seconds for one in found), default=own)
    enough = [one for one in found if one.time.seconds <= best * (1 + GAIN)]
    return enough[0] if best < own * (1 - GAIN) else None


def _windows(plan: Plan) -> Iterator[Plan]:
    """The plan with each wider window, up to one for all units."""
    ranks = axis(plan.layout, "pp").group(0)
    units = max(len(local_buffers(plan, rank)) for rank in ranks)
    sizes = sorted(part << n for part in (2, 3) for n in range(10))
    for window in (*(one for one in sizes if one < units), units):
        if window > plan.storage.window:
            yield replace(plan, storage=replace(plan.storage, window=window))


def _fullest(plan: Plan) -> int:
    kernels, ranks = kernels_of(plan), axis(plan.layout, "pp").group(0)
    return max(peak(memory(plan, rank, kernels)) for rank in ranks)


def advice(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """That a wider window makes the step of a plan shorter, as a sentence."""
    if not has_window(plan.layout):
        return
    try:
        profile = profile_for(cluster, plan.method)
    except UserError:  # another precision was measured
        return
    if found := wider(plan, cluster, profile, capacity=usable_memory(cluster)):
        before = step_time(plan, cluster, profile).seconds
        now, window = spell(found.time.seconds, "seconds"), found.plan.storage.window
        yield (
            f"with storage.window={window}, {window} units of weights on the device in place of "
            f"{plan.storage.window}, a step takes {now} in place of {spell(before, 'seconds')}"
        )
