"""Laying a model's weights in flat buffers, one per unit.

A model is built on the meta device, where it costs nothing. `flatten` allocates the buffers of
the plan and makes every parameter a view into them:

    weights     compute dtype        what the model multiplies with, whole
    masters     at least float32     what this rank's optimizer updates: its own range of the unit.
                                     Where the weights are wide, a view of them
    gradients   at least float32     what backward adds to, whole; parameter.grad is a view of it
    summed      at least float32     the own range of the sum over the replicas: a view of
                                     `gradients`, or, where shares add up, all that is kept

so that a reduction, an optimizer step or a checkpoint works on runs of memory, and never on
some hundred small tensors. bf16 weights get float32 gradients through `Tensor.grad_dtype`.

The own range is everything where each replica updates everything; ZeRO makes it a share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from howdah.model.noise import fill_normal
from howdah.model.norm import promoted
from howdah.plan.boxes import Piece
from howdah.plan.flat import Buffer, pieces
from howdah.plan.seeds import key
from howdah.plan.weights import Weight

Fill = Callable[[Piece, Tensor], None]  # writes a piece's elements into a 1-D tensor
Own = Callable[[Buffer], tuple[int, int]]  # the range [start, stop) that this rank updates


@dataclass(frozen=True)
class FlatUnit:
    """The flat tensors of one unit: whole ones, and those of the own range from `start` on.

    gradients  None where only the own share is kept between micro-batches
    """

    buffer: Buffer
    start: int
    weights: Tensor
    masters: Tensor
    gradients: Tensor | None
    summed: Tensor

    @property
    def stop(self) -> int:
        """Where the own range ends."""
        return self.start + len(self.masters)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The named tensors inside one of the unit's whole flat tensors."""
        return {s.name: flat[s.start : s.stop].view(s.box.size) for s in self.buffer.segments}

    def publish(self) -> None:
        """Casts the masters to the own range of the weights, after an update or a load."""
        if self.weights.dtype != self.masters.dtype:
            self.weights[self.start : self.stop].copy_(self.masters)


def everything(buffer: Buffer) -> tuple[int, int]:
    """The own range of a rank that updates all."""
    return 0, buffer.length


def flatten(
    model: nn.Module,
    buffers: tuple[Buffer, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
    own: Own = everything,
    whole_gradients: bool = True,
) -> dict[str, FlatUnit]:
    """Moves a model from the meta device into flat units, in forward order; not yet filled."""
    units = {}
    for buffer in buffers:
        unit = _allocate(buffer, dtype, device, own(buffer), whole_gradients)
        gradients = unit.views(unit.gradients) if unit.gradients is not None else {}
        for name, view in unit.views(unit.weights).items():
            _replace(model, name, view, gradients.get(name), unit.summed.dtype)
        units[buffer.unit] = unit
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"the table does not list {left}"
    return units


def _allocate(
    buffer: Buffer, dtype: torch.dtype, device: torch.device, own: tuple[int, int], whole: bool
) -> FlatUnit:
    start, stop = own
    wide = promoted(dtype)
    weights = torch.zeros(buffer.length, dtype=dtype, device=device)
    same = weights.dtype == wide
    masters = weights[start:stop] if same else weights.new_zeros(stop - start, dtype=wide)
    gradients = weights.new_zeros(buffer.length, dtype=wide) if whole else None
    summed = masters.new_zeros(stop - start) if gradients is None else gradients[start:stop]
    return FlatUnit(buffer, start, weights, masters, gradients, summed)


def _replace(
    model: nn.Module, name: str, view: Tensor, gradient: Tensor | None, wide: torch.dtype
) -> None:
    path, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(view)
    if wide != view.dtype:
        parameter.grad_dtype = wide
    parameter.grad = gradient
    setattr(model.get_submodule(path), leaf, parameter)


def fill_masters(units: dict[str, FlatUnit], fill: Fill) -> None:
    """Fills masters and weights piece by piece; weights of other ranks' ranges too, so that
    nothing has to be sent before the first step.
    """
    for unit in units.values():
        masters = unit.masters
        whole = masters.new_zeros(unit.buffer.length)
        for piece, start, stop in pieces(unit.buffer, 0, unit.buffer.length):
            fill(piece, whole[start:stop])
        unit.weights.copy_(whole)
        masters.copy_(whole[unit.start : unit.stop])


def fresh(weights: tuple[Weight, ...], seed: int) -> Fill:
    """Fills pieces with fresh weights: a function of (seed, name, place in the tensor) alone."""
    table = {weight.name: weight for weight in weights}

    def fill(piece: Piece, out: Tensor) -> None:
        weight, name = table[piece.name], key(seed, "weight", piece.name)
        places = places_of(piece)
        fill_normal(out, key=name, places=places, mean=weight.mean, spread=weight.spread)

    return fill


def places_of(piece: Piece) -> Callable[[Tensor], Tensor]:
    """Where in the whole tensor, row by row, the elements of a piece stand (int64, 1-D)."""
    corner, size = piece.box.corner, piece.box.size
    strides = [prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape))]

    def places(index: Tensor) -> Tensor:
        rest, found = index + piece.start, torch.zeros_like(index)
        for first, length, stride in reversed(list(zip(corner, size, strides, strict=True))):
            found += (rest % length + first) * stride
            rest = rest // length
        return found

    if size[1:] == piece.shape[1:]:  # whole rows follow each other
        offset = piece.start + (corner[0] * strides[0] if corner else 0)
        return lambda index: index + offset
    return places
