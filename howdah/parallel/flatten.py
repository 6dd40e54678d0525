"""Laying a model's weights in flat buffers, one per unit.

A model is built on the meta device, where it costs nothing. `flatten` allocates the buffers of
the plan and makes every parameter a view into them:

    weights     compute dtype        what the model multiplies with
    masters     at least float32     what the optimizer updates; the weights themselves if wide
    gradients   at least float32     what backward adds to; parameter.grad is a view of it

so that a reduction, an optimizer step or a checkpoint works on runs of memory, and never on
some hundred small tensors. bf16 weights get float32 gradients through `Tensor.grad_dtype`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howdah.model.noise import fill_normal
from howdah.model.norm import promoted
from howdah.plan.boxes import Piece
from howdah.plan.flat import Buffer, pieces
from howdah.plan.seeds import key
from howdah.plan.weights import Weight

Fill = Callable[[Piece, Tensor], None]  # writes a piece's elements into a 1-D tensor


@dataclass(frozen=True)
class FlatUnit:
    """The flat tensors of one unit; all have the buffer's length."""

    buffer: Buffer
    weights: Tensor
    masters: Tensor
    gradients: Tensor

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The named tensors inside one of the unit's flat tensors."""
        return {s.name: flat[s.start : s.stop].view(s.box.size) for s in self.buffer.segments}

    def publish(self) -> None:
        """Casts the masters to the weights, after an update or a load."""
        if self.weights is not self.masters:
            self.weights.copy_(self.masters)


def flatten(
    model: nn.Module, buffers: tuple[Buffer, ...], *, dtype: torch.dtype, device: torch.device
) -> dict[str, FlatUnit]:
    """Moves a model from the meta device into flat units, in forward order; not yet filled."""
    units = {}
    for buffer in buffers:
        wide = torch.zeros(buffer.length, dtype=promoted(dtype), device=device)
        weights = wide if wide.dtype == dtype else wide.to(dtype)
        unit = FlatUnit(buffer, weights, wide, torch.zeros_like(wide))
        gradients = unit.views(unit.gradients)
        for name, view in unit.views(unit.weights).items():
            _replace(model, name, view, gradients[name])
        units[buffer.unit] = unit
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"the table does not list {left}"
    return units


def _replace(model: nn.Module, name: str, view: Tensor, gradient: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(view)
    if gradient.dtype != view.dtype:
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient
    setattr(model.get_submodule(path), leaf, parameter)


def fill_masters(units: dict[str, FlatUnit], fill: Fill) -> None:
    """Fills every master weight piece by piece, then publishes the weights."""
    for unit in units.values():
        for piece, start, stop in pieces(unit.buffer, 0, unit.buffer.length):
            fill(piece, unit.masters[start:stop])
        unit.publish()


def fresh(weights: tuple[Weight, ...], seed: int) -> Fill:
    """Fills pieces with fresh weights: a function of (seed, name, place in the tensor) alone.

    For pieces of whole boxes, whose elements follow each other in the tensor.
    """
    table = {weight.name: weight for weight in weights}

    def fill(piece: Piece, out: Tensor) -> None:
        assert piece.box.size == piece.shape, "fresh weights are drawn for whole boxes"
        weight = table[piece.name]
        name = key(seed, "weight", piece.name)
        fill_normal(out, key=name, start=piece.start, mean=weight.mean, spread=weight.spread)

    return fill
