"""Whole tensors by name, whatever the layout, for inspection, tests and `verify`.

    full_parameter(placed, "layers.0.attention.q.weight")     the master weight
    full_gradient(placed, ...)                                summed over the ranks, after a step
    full_state(placed, ..., "exp_avg")                        optimizer state

Each returns a fresh tensor of the global shape. All ranks of the layout call together.
"""

import torch
from torch import Tensor

from howdah.parallel.apply import Placed
from howdah.parallel.flatten import FlatUnit
from howdah.plan.flat import Segment
from howdah.plan.problems import BadInput, nearest


def full_parameter(placed: Placed, name: str) -> Tensor:
    """The master weight `name`, at least float32."""
    unit, segment = _find(placed, name)
    return _whole(placed, unit, segment, unit.masters)


def full_gradient(placed: Placed, name: str) -> Tensor:
    """The gradient of the global batch for `name`, at least float32; after clipping."""
    unit, segment = _find(placed, name)
    return _whole(placed, unit, segment, unit.summed)


def full_state(placed: Placed, name: str, state: str) -> Tensor:
    """The optimizer's `state` of `name`: exp_avg, exp_avg_sq, momentum_buffer or square_avg."""
    unit, segment = _find(placed, name)
    own = torch.zeros_like(unit.masters)
    for part in placed.ranges:
        if part.unit != unit.buffer.unit or not part.master.numel():
            continue
        states = placed.optimizer.state[part.master]
        if state not in states:
            raise BadInput(f"no state {state!r} of {name}{nearest(state, states)}")
        own[part.start - unit.start : part.stop - unit.start] = states[state]
    return _whole(placed, unit, segment, own)


def _whole(placed: Placed, unit: FlatUnit, segment: Segment, own: Tensor) -> Tensor:
    """A tensor of the unit, from every rank's own range of it."""
    flat = own.new_zeros(unit.buffer.length)
    flat[unit.start : unit.stop] = own
    if placed.gatherer:
        placed.mesh.dp.all_gather([flat])
    return flat[segment.start : segment.stop].view(segment.shape).clone()


def parameter_names(placed: Placed) -> list[str]:
    """All names, in forward order."""
    return [s.name for unit in placed.units.values() for s in unit.buffer.segments]


def _find(placed: Placed, name: str) -> tuple[FlatUnit, Segment]:
    for unit in placed.units.values():
        for segment in unit.buffer.segments:
            if segment.name == name:
                return unit, segment
    raise BadInput(f"no parameter {name!r}{nearest(name, parameter_names(placed))}")
