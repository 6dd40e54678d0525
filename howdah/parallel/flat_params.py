"""Moves a model's weights into flat buffers, one per unit.

A model is built on the meta device, where it takes no memory. `flatten` allocates the buffers of
the plan and makes every parameter a view into them:

    weights     compute dtype        what the model multiplies with: whole, or only the own range,
                                     and whole only while they are used (`zero3.py`)
    masters     at least float32     what this rank's optimizer updates: its own range of the unit.
                                     If weights are at least float32, too, a view of them
    gradients   at least float32     what backward adds to, whole; parameter.grad is a view of it
    summed      at least float32     the own range of the sum over the replicas: a view of
                                     `gradients`, or, where only shares are kept, a tensor itself.
                                     Of a server that only adds, its range, which it does not update

So a reduction, an optimizer step or a checkpoint works on contiguous ranges of memory, and not on
hundreds of small tensors. bf16 weights get float32 gradients through `Tensor.grad_dtype`.

The own range is the whole unit where each replica updates everything; with ZeRO it is a share.

Of frozen weights there is nothing but `weights`.

What has its home on the host is memory of its own there, also where the device is the CPU. What has
its home on the disk is a tensor of the meta device, which has a length and no elements: these are
in a file (`homes.py`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from howdah.base.seeds import key
from howdah.host.page_memory import whole_pages
from howdah.model.islands import promoted
from howdah.model.noise import fill_even, fill_normal
from howdah.plan.boxes import Piece
from howdah.plan.flat_buffers import Buffer, pieces
from howdah.plan.layout import Home, Layout
from howdah.plan.method import Precision
from howdah.shapes.weights import Weight

DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,  # weights; the products of blocks are in 8 bits
    "float64": torch.float64,
}

Fill = Callable[[Piece, Tensor], None]  # writes a piece's elements into a 1-D tensor
Own = Callable[[Buffer], tuple[int, int]]  # the range [start, stop) that this rank updates
Put = Callable[["FlatUnit", str, Tensor], None]  # writes to the own range of a kind of tensor


class Whole(NamedTuple):
    """Which tensors are kept whole; of the others, only the own range is kept."""

    gradients: bool = True
    weights: bool = True


ALL = Whole()
HERE = Layout()  # all homes are the device


@dataclass(frozen=True)
class FlatUnit:
    """The flat tensors of one unit. Some are whole, others hold only the own range, from `start`
    on.

    weights     whole, or only the own range
    gradients   whole; None where only the own range is kept between micro-batches
    apart       whether the masters are tensors of their own, and not a view of the weights
    away        whether the weights have another home than the device
    """

    buffer: Buffer
    start: int
    weights: Tensor
    masters: Tensor
    gradients: Tensor | None
    summed: Tensor
    apart: bool = False
    away: bool = False

    @property
    def stop(self) -> int:
        """The end of the own range; of frozen weights, of the range that is here."""
        return self.start + len(self.masters if self.trains else self.weights)

    @property
    def trains(self) -> bool:
        """Whether its weights are trained."""
        return self.buffer.trains

    @property
    def shared_out(self) -> bool:
        """Whether `weights` holds only the own range."""
        return len(self.weights) < self.buffer.length

    @property
    def comes(self) -> bool:
        """Whether weights have to come before they are used: from other ranks, or their home."""
        return self.shared_out or self.away

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The named tensors inside `flat`, which is one of the unit's whole flat tensors."""
        return {s.name: flat[s.start : s.stop].view(s.box.size) for s in self.buffer.segments}

    @property
    def own_weights(self) -> Tensor:
        """The own range of the weights."""
        return self.weights if self.shared_out else self.weights[self.start : self.stop]

    def copy_to_weights(self) -> None:
        """Casts the masters into the own range of the weights, after a load."""
        if self.weights.dtype != self.masters.dtype:
            self.own_weights.copy_(self.masters)


def copied(unit: FlatUnit, kind: str, values: Tensor) -> None:
    """Writes to the own range of a unit's weights or masters, where they are memory."""
    (unit.own_weights if kind == "weights" else unit.masters).copy_(values)


def publish(units: Iterable[FlatUnit]) -> None:
    """Casts the masters of all units into the own ranges of their weights, after an update."""
    narrow = [unit for unit in units if unit.apart]
    if narrow:
        torch._foreach_copy_([u.own_weights for u in narrow], [u.masters for u in narrow])


def everything(buffer: Buffer) -> tuple[int, int]:
    """The own range of a rank that updates the whole buffer."""
    return 0, buffer.length


def flatten(  # noqa: PLR0913 (facts that have nothing in common, all by keyword)
    model: nn.Module,
    buffers: tuple[Buffer, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
    own: Own = everything,
    whole: Callable[[Buffer], Whole] = lambda buffer: ALL,
    homes: Layout = HERE,
) -> dict[str, FlatUnit]:
    """Moves a model from the meta device into flat units, in forward order; does not fill them.

    own    the own range of each buffer
    whole  which tensors of each buffer are kept whole
    homes  the layout that says where weights, gradients and the optimizer have theirs

    Parameters whose weights are not whole stay on the meta device, where only their names are used.
    """
    units = allocate(buffers, dtype=dtype, device=device, own=own, whole=whole, homes=homes)
    names: set[str] = set()
    for unit in units.values():
        names.update(unit.buffer.names)
        if unit.comes:
            continue
        gradients = unit.views(unit.gradients) if unit.gradients is not None else {}
        for name, view in unit.views(unit.weights).items():
            _replace(model, name, view, gradients.get(name), unit.summed.dtype)
            if not unit.trains:
                model.get_parameter(name).requires_grad_(False)
    left = [name for name, _ in model.named_parameters() if name not in names]
    assert not left, f"the table does not list {left}"
    return units


def allocate(
    buffers: tuple[Buffer, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
    own: Own = everything,
    whole: Callable[[Buffer], Whole] = lambda buffer: ALL,
    homes: Layout = HERE,
) -> dict[str, FlatUnit]:
    """The flat units of buffers, of zeros, in their order; the arguments are those of `flatten`."""
    return {
        buffer.unit: _allocate(buffer, dtype, device, own(buffer), whole=whole(buffer), homes=homes)
        for buffer in buffers
    }


def _allocate(
    buffer: Buffer,
    dtype: torch.dtype,
    device: torch.device,
    own: tuple[int, int],
    *,
    whole: Whole,
    homes: Layout,
) -> FlatUnit:
    def zeros(length: int, dtype: torch.dtype, home: Home) -> Tensor:
        if home == "host":
            return whole_pages(length, dtype)
        return torch.zeros(length, dtype=dtype, device=device if home == "device" else "meta")

    (start, stop), wide = own, promoted(dtype)
    length = buffer.length if whole.weights else stop - start
    weights = zeros(length, dtype, homes.weights)
    mine = weights[start:stop] if whole.weights else weights
    if not buffer.trains:
        none = zeros(0, wide, "device")
        away = homes.weights != "device"
        return FlatUnit(buffer, start, weights, none, None, none.clone(), away=away)
    apart = dtype != wide or homes.weights != homes.optimizer
    masters = zeros(stop - start, wide, homes.optimizer) if apart else mine
    gradients = zeros(buffer.length, wide, "device") if whole.gradients else None
    if gradients is None:
        summed = zeros(stop - start, wide, homes.gradients)
    else:
        summed = gradients[start:stop]
    away = homes.weights != "device"
    return FlatUnit(buffer, start, weights, masters, gradients, summed, apart, away)


def _replace(
    model: nn.Module, name: str, view: Tensor, gradient: Tensor | None, wide: torch.dtype
) -> None:
    path, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(view)
    if wide != view.dtype:
        parameter.grad_dtype = wide
    parameter.grad = gradient
    setattr(model.get_submodule(path), leaf, parameter)


def fill_masters(
    units: dict[str, FlatUnit], fill: Fill, put: Put = copied, *, on: torch.device | None = None
) -> None:
    """Fills masters and weights piece by piece. Whole weights are also filled outside of the own
    range, so that nothing has to be sent before the first step.

    put  brings what a tensor is filled with to its home
    on   the device that fills it; by default that of the masters
    """
    for unit in units.values():
        masters = unit.masters
        device = on or masters.device
        first, last = (unit.start, unit.stop) if unit.comes else (0, unit.buffer.length)
        filled = torch.zeros(last - first, dtype=masters.dtype, device=device)
        for piece, start, stop in pieces(unit.buffer, first, last):
            fill(piece, filled[start - first : stop - first])
        if unit.comes:
            put(unit, "weights", filled.to(unit.weights.dtype))
        else:
            unit.weights.copy_(filled)
        if unit.apart:
            put(unit, "masters", filled[unit.start - first : unit.stop - first])


def random_init(weights: tuple[Weight, ...], seed: int) -> Fill:
    """A Fill with random initial weights: a function of (seed, name, position in the tensor)
    only.
    """
    table = {weight.name: weight for weight in weights}

    def fill(piece: Piece, out: Tensor) -> None:
        weight, name = table[piece.name], key(seed, "weight", piece.name)
        index_of = index_of_piece(piece)
        if weight.even:
            fill_even(out, key=name, index_of=index_of, reach=weight.spread)
            return
        fill_normal(out, key=name, index_of=index_of, mean=weight.mean, spread=weight.spread)

    return fill


def index_of_piece(piece: Piece) -> Callable[[Tensor], Tensor]:
    """A function: index within a piece → position in the whole tensor, row by row (both int64,
    1-D).
    """
    corner, size = piece.box.corner, piece.box.size
    strides = [prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape))]

    def index_of(index: Tensor) -> Tensor:
        rest, found = index + piece.start, torch.zeros_like(index)
        for first, length, stride in reversed(list(zip(corner, size, strides, strict=True))):
            found += (rest % length + first) * stride
            rest = rest // length
        return found

    if size[1:] == piece.shape[1:]:  # whole rows are contiguous
        offset = piece.start + (corner[0] * strides[0] if corner else 0)
        return lambda index: index + offset
    return index_of
