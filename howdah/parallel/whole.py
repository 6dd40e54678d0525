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
    return unit.masters[segment.start : segment.stop].view(segment.shape).clone()


def full_gradient(placed: Placed, name: str) -> Tensor:
    """The gradient of the global batch for `name`, at least float32; after clipping."""
    unit, segment = _find(placed, name)
    return unit.gradients[segment.start : segment.stop].view(segment.shape).clone()


def full_state(placed: Placed, name: str, state: str) -> Tensor:
    """The optimizer's `state` of `name`: exp_avg, exp_avg_sq, momentum_buffer or square_avg."""
    unit, segment = _find(placed, name)
    whole = torch.empty(segment.stop - segment.start, dtype=unit.masters.dtype)
    for part in placed.ranges:
        first, last = max(part.start, segment.start), min(part.stop, segment.stop)
        if part.unit != unit.buffer.unit or first >= last:
            continue
        states = placed.optimizer.state[part.master]
        if state not in states:
            raise BadInput(f"no state {state!r} of {name}{nearest(state, states)}")
        whole[first - segment.start : last - segment.start] = states[state][
            first - part.start : last - part.start
        ]
    return whole.view(segment.shape)


def parameter_names(placed: Placed) -> list[str]:
    """All names, in forward order."""
    return [s.name for unit in placed.units.values() for s in unit.buffer.segments]


def _find(placed: Placed, name: str) -> tuple[FlatUnit, Segment]:
    for unit in placed.units.values():
        for segment in unit.buffer.segments:
            if segment.name == name:
                return unit, segment
    raise BadInput(f"no parameter {name!r}{nearest(name, parameter_names(placed))}")
