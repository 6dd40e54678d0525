"""Whole tensors by name, for any layout; for inspection, tests and `verify`.

    full_parameter(placed, "layers.0.attention.q.weight")     the master weight
    full_gradient(placed, ...)                                summed over the ranks, after a step
    full_state(placed, ..., "exp_avg")                        optimizer state

Each function returns a new tensor of the global shape. All ranks of the layout call together. Every
element is counted by one rank: each rank writes the elements that it counts into zeros, and the sum
over all ranks is the whole tensor.
"""

import torch
from torch import Tensor

from howdah.base.errors import UserError, nearest
from howdah.parallel.apply import ParallelModel
from howdah.parallel.flat_params import index_of_piece
from howdah.plan.flat_buffers import pieces


def full_parameter(placed: ParallelModel, name: str) -> Tensor:
    """The master weight `name`, in at least float32."""
    return _whole(placed, name, "masters")


def full_gradient(placed: ParallelModel, name: str) -> Tensor:
    """The gradient of the global batch for `name`, in at least float32; after clipping."""
    return _whole(placed, name, "summed")


def full_state(placed: ParallelModel, name: str, state: str) -> Tensor:
    """The optimizer's `state` of `name`: exp_avg, exp_avg_sq, momentum_buffer or square_avg."""
    names = placed.plan.method.optimizer.states
    if state not in names:
        raise UserError(f"no state {state!r} of {name}{nearest(state, names)}")
    return _whole(placed, name, state)


def _whole(placed: ParallelModel, name: str, kind: str) -> Tensor:
    if name not in parameter_names(placed):
        raise UserError(f"no parameter {name!r}{nearest(name, parameter_names(placed))}")
    weight = placed.plan.weight(name)
    if kind != "masters" and not weight.rate:
        raise UserError(f"{name} is frozen by method.train: it has no gradient and no states")
    like = next(iter(placed.units.values())).masters
    out = like.new_zeros(weight.elements, device=placed.mesh.device)
    for unit, first, last in placed.counted():
        if unit.buffer.unit != weight.unit:
            continue
        for piece, start, stop in pieces(unit.buffer, first, last):
            if piece.name == name:
                index = torch.arange(piece.elements, device=out.device)
                mine = placed.own(unit, kind, start - unit.start, stop - unit.start)
                out[index_of_piece(piece)(index)] = mine.to(out)
    placed.mesh.world.all_reduce(out)
    return out.view(weight.shape)


def parameter_names(placed: ParallelModel) -> list[str]:
    """The names of all weights, in forward order."""
    return [weight.name for weight in placed.plan.weights]
