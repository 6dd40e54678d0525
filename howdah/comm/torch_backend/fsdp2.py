"""FSDP2 without copies between ranks: its buffers lie in the memory that the ranks share.

    for layer in model.layers: fully_shard(layer)
    fully_shard(model)
    share_buffers(model)

    all-gather       one buffer for all ranks: each copies its shard in, and all meet
    reduce-scatter   each rank's gradients lie in the arena, from which their owners add them

FSDP2 calls `allocate`, copies in, and calls the collective. A buffer of an all-gather is written
again after BUFFERS more of its size; so that no rank writes what a slower one still reads, at most
BUFFERS - 1 of them are in use at once, which every rank checks before it meets the others. Between
machines, and for other devices, memory is ordinary, and the collectives are those of the group.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from howdah.base.errors import UserError
from howdah.comm.engine import Engine
from howdah.comm.torch_backend.process_group import HowdahGroup

Size = Sequence[int | torch.SymInt]
BUFFERS = 3  # of each size: one that is read, one that is gathered ahead, one that comes next


def share_buffers(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, buffers: int = BUFFERS
) -> int:
    """Lets all units of a model that `fully_shard` has made use shared memory; returns how many do.
    Raises UserError.

    group    over which they are sharded; None: all ranks
    buffers  of each size, for all-gathers; more if more of them are prefetched
    """
    group = group or dist.group.WORLD
    if not isinstance(group, HowdahGroup):
        raise UserError(
            'share_buffers: the group is not of howdah: init_process_group("howdah") comes first'
        )
    if buffers < BUFFERS:
        raise UserError(f"share_buffers: buffers is {buffers}: at least {BUFFERS} are needed")
    gathers, reduces, found = Gathers(group, buffers), Reduces(group), 0
    for unit in _units(module):
        unit.set_custom_all_gather(gathers)
        unit.set_custom_reduce_scatter(reduces)
        found += 1
    if not found:
        raise UserError("share_buffers: no module was given to fully_shard before")
    return found


def _units(module: nn.Module) -> Iterator[Any]:
    return (one for one in module.modules() if isinstance(one, FSDPModule))


class _Slot(NamedTuple):
    """A buffer that is handed out again when no tensor uses it any more."""

    room: Tensor  # bytes
    lent: list["ReferenceType[Any]"]  # to whom; empty: to nobody yet

    @property
    def free(self) -> bool:
        """Whether no tensor in it lives."""
        return not self.lent or self.lent[0]() is None

    def lend(self, dtype: torch.dtype) -> Tensor:
        """The memory as a new tensor, which is not free until all of its views are gone."""
        array = self.room.numpy().view()
        self.lent[:] = [ref(array)]
        return torch.from_numpy(array).view(dtype)


class _Rings:
    """Slots by size. All ranks must ask for the same sizes in the same order.

    where  of whose memory the slots are: a rank's, or None: each rank's own
    """

    def __init__(self, engine: Engine, length: int, where: int | None) -> None:
        self._engine, self._length, self._where = engine, length, where
        self._rings: dict[int, list[_Slot]] = {}
        self._asked: dict[int, int] = {}

    def next(self, size: int) -> tuple[_Slot, _Slot]:
        """The slot for this time, and the one for the next."""
        if size not in self._rings:
            made = [self._engine.allocate(size, torch.uint8) for _ in range(self._length)]
            if self._where is not None:
                made = [self._engine.there(x, self._where) for x in made]
            self._rings[size], self._asked[size] = [_Slot(x, []) for x in made], 0
        ring, asked = self._rings[size], self._asked[size]
        self._asked[size] += 1
        return ring[asked % self._length], ring[(asked + 1) % self._length]


class _Shared:
    """What both collectives have in common."""

    def __init__(self, group: HowdahGroup, length: int, where: int | None) -> None:
        self._group = group
        wire = group.wire
        self._rings = _Rings(wire, length, where) if isinstance(wire, Engine) else None

    def _slots(self, size: Size, dtype: torch.dtype, device: torch.device) -> Any:
        nbytes = prod(int(one) for one in size) * dtype.itemsize
        if self._rings is None or torch.device(device).type != "cpu" or not nbytes:
            return None
        return self._rings.next(nbytes)

    def _check(self, group: object) -> None:
        if group is not self._group:
            raise UserError(
                "share_buffers: a unit is sharded over another group: give it as group="
            )


class Gathers(_Shared, AllGather):
    """All-gathers in one buffer for all ranks."""

    def __init__(self, group: HowdahGroup, buffers: int = BUFFERS) -> None:
        super().__init__(group, buffers, 0)
        self._starts = set[int]()

    def allocate(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer [sum(size)] whose content is not defined. Raises UserError."""
        slots = self._slots(size, dtype, device)
        if slots is None:
            return torch.empty(*size, dtype=dtype, device=device)
        slot, after = slots
        if not slot.free or not after.free:
            raise UserError(
                "share_buffers: more all-gathers of one size are in use at once than there are "
                "buffers: give it more (buffers=)"
            )
        self._starts.add(slot.room.data_ptr())
        return slot.lend(dtype).view(*size)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Returns when all ranks have copied their shards in; with async_op its Work."""
        self._check(group)
        options = dist.BarrierOptions()
        options.asyncOp = async_op
        if output_tensor.data_ptr() in self._starts:
            work = self._group.barrier(options)
        else:
            work = self._group.all_gather_single(output_tensor, input_tensor, options)
        return work if async_op else None


class Reduces(_Shared, ReduceScatter):
    """Reduce-scatters of gradients that lie where the other ranks read them."""

    def __init__(self, group: HowdahGroup) -> None:
        super().__init__(group, 2, None)
        self._is_input = True

    def allocate(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for the terms, or for their sum, by turns: FSDP2 asks for both in this order."""
        is_input, self._is_input = self._is_input, not self._is_input
        slots = self._slots(size, dtype, device) if is_input else None
        if slots is None or not slots[0].free:
            return torch.empty(*size, dtype=dtype, device=device)
        tensor: Tensor = slots[0].lend(dtype).view(*size)
        return tensor

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Writes this rank's share of the sum; with async_op its Work."""
        self._check(group)
        options = dist.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, async_op
        work = self._group.reduce_scatter_single(output_tensor, input_tensor, options)
        return work if async_op else None
