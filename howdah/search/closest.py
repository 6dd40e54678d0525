"""The nearest plan to one that does not fit its device: the smallest change of layout that fits.

The number of devices stays the same. Up to three changes are combined; the cheapest combinations
are tried first. Where none of them fits, states leave the device: those that move least first.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from howdah.base.errors import UserError
from howdah.plan.homes import states_away
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan, beside, make_plan
from howdah.search.space import HOMES
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory, peak

TRIES = 120  # most combinations of changes that are tried


class Change(NamedTuple):
    """One change of a layout.

    cost    rough cost, which determines the order in which changes are tried
    values  the changed fields of the layout, with their new values
    """

    cost: int
    values: dict[str, object]


def closest(
    plan: Plan, capacity: float, homeless: Callable[[Plan], object] = lambda plan: False
) -> Layout | None:
    """The layout nearest to that of `plan`, on as many devices, that fits; None if none is found.

    capacity  bytes of device memory that one rank of any stage may need
    homeless  whether there is no room for what a plan keeps off the device
    """
    found = list(_changes(plan.layout))
    sets = [chosen for count in range(1, 4) for chosen in combinations(found, count)]
    for chosen in sorted(sets, key=lambda s: sum(change.cost for change in s))[:TRIES]:
        values = {name: value for change in chosen for name, value in change.values.items()}
        if len(values) < sum(len(change.values) for change in chosen):
            continue  # two of them change the same field
        other = _changed(plan, values)
        if other and _fits(other, capacity) and not homeless(other):
            return other.layout
    for values in _away(plan.layout):
        other = _changed(plan, values)
        if other and _fits(other, capacity) and not homeless(other):
            return other.layout
    return None


def _away(layout: Layout) -> Iterator[dict[str, object]]:
    """Homes for the states of a layout, with what they need; and with recomputation."""
    if states_away(layout):
        return
    for home in filter(None, HOMES):
        cut = layout.replicas > 1 and "gradients" in home
        shared = {"zero": 3, "accumulate": None} if cut else {}
        yield {**home, **shared}
        if layout.recompute != "full":
            yield {**home, **shared, "recompute": "full"}


def _changes(layout: Layout) -> Iterator[Change]:
    """All single changes that reduce memory, with their costs.

    Sharded states cost messages, tp costs more of them, pp costs a bubble, recomputation flops.
    """
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
    """The plan on the changed layout, with the same micro-batch size; None if it is not valid."""
    try:
        layout = replace(plan.layout, **changes)  # type: ignore[arg-type]
        batch = replace(plan.batch, global_batch=None)
        sequence, method = plan.sequence, plan.method
        other = make_plan(plan.shape, layout, batch, sequence=sequence, method=method)
        return beside(plan, other)
    except UserError:
        return None


def _fits(plan: Plan, capacity: float) -> bool:
    """Whether every stage needs at most `capacity` bytes; the first stage usually needs most."""
    stages = axis(plan.layout, "pp").group(0)
    return all(peak(memory(plan, rank, kernels_of(plan))) <= capacity for rank in stages)
