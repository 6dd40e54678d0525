"""What ranks send each other of a unit under zero3, and keep of it: the rows of `plan/gathers.py`.

    window     |weights of the unit ………………………………………|     message: the weights themselves,
               |message ………|                               or in 8 bits, in the same memory
    scratch    |message ………|  → restored over the window
    copy       |share|          of the message, kept for the next gather among neighbours (hpzG)

With `method.gather_dtype=int8` a rank rounds its own share into the message, and takes what it sent
out of it like everybody else, so that all ranks multiply with the same weights. A second copy is
kept in the form of the message: what is gathered from it is the first message again, bit by bit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from howdah.comm.group import Group
from howdah.comm.handle import Handle, Note
from howdah.model.blockwise import quantise, restore
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.mesh import Mesh
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.quantised import message_bytes


class Sent(NamedTuple):
    """A message that is to be gathered by `group`; `own` is this rank's share of it, or None where
    it is in its place.
    """

    group: Group
    message: Tensor
    own: Tensor | None


class Messages:
    """The messages of units of which each rank has a share.

    eight_bits  whether weights are sent in 8 bits
    near        the ranks of a node that share out a second copy; None: there is none
    copies      this rank's share of it, by name of a buffer
    scratch     room for a message while it is restored
    """

    def __init__(
        self, units: Iterable[FlatUnit] = (), *, eight_bits: bool = False, near: Group | None = None
    ) -> None:
        self._eight_bits, self._near = eight_bits, near
        cut = [unit for unit in units if unit.shared_out]
        self.copies = {unit.buffer.unit: self._copy_of(unit) for unit in cut if near}
        longest = max((message_bytes(unit.buffer.length) for unit in cut), default=0)
        like = cut[0].weights if cut else torch.empty(0)
        self.scratch = like.new_zeros(longest * eight_bits, dtype=torch.uint8)
        self._copied: set[str] = set()  # the buffers whose copies are those of this pass

    def _copy_of(self, unit: FlatUnit) -> Tensor:
        assert self._near is not None
        whole = unit.weights.new_empty(unit.buffer.length, device="meta")
        return torch.zeros_like(
            self._near.own_shard(self._message(whole)), device=unit.weights.device
        )

    def _message(self, flat: Tensor) -> Tensor:
        return flat.view(torch.uint8)[: message_bytes(len(flat))] if self._eight_bits else flat

    def end(self) -> None:
        """Ends a pass: the weights may change, and copies are of no use."""
        self._copied.clear()

    def send(self, unit: FlatUnit, flat: Tensor, sharers: Group) -> Sent:
        """The message that makes `flat` the weights of a unit: from all sharers, or from the copies
        of neighbours where they have them.
        """
        message = self._message(flat)
        if unit.buffer.unit in self._copied:
            assert self._near is not None
            return Sent(self._near, message, self.copies[unit.buffer.unit])
        if self._eight_bits:
            quantise(unit.weights, sharers.own_shard(message))
            return Sent(sharers, message, None)
        return Sent(sharers, message, unit.weights)

    def arriving(
        self, handle: Handle, some: Sequence[FlatUnit], flats: Sequence[Tensor], shares: int
    ) -> Handle:
        """The handle of a gather, which is done when copies are kept and weights are restored.

        shares  of a message: as many as there are sharers
        """
        if not (self._eight_bits or self._near):
            return handle

        def arrived() -> None:
            for one, flat in zip(some, flats, strict=True):
                self._arrived(one, flat, shares)

        return Arriving(handle, arrived)

    def _arrived(self, unit: FlatUnit, flat: Tensor, shares: int) -> None:
        name, message = unit.buffer.unit, self._message(flat)
        if self._near and unit.shared_out and name not in self._copied:
            self.copies[name].copy_(self._near.own_shard(message))
            self._copied.add(name)
        if self._eight_bits:
            scratch = self.scratch[: len(message)]
            restore(scratch.copy_(message), flat, shares=shares)


def messages_of(plan: Plan, mesh: Mesh, units: Mapping[str, FlatUnit]) -> Messages:
    """The messages of the units of a plan. All ranks call together."""
    neighbours = axis(plan.layout, "hpz").group(mesh.rank) if plan.layout.hpz else None
    near = mesh.group_of(neighbours, label="dp") if neighbours else None
    return Messages(units.values(), eight_bits=plan.quantised, near=near)


class Arriving:
    """A handle that calls a function once, when its result is first asked for, on that thread."""

    def __init__(self, handle: Handle, arrived: Callable[[], None]) -> None:
        self._handle, self._arrived = handle, [arrived]

    def result(self) -> None:
        """Waits for the operation, then calls the function if it was not called."""
        self._handle.result()
        while self._arrived:
            self._arrived.pop()()

    def then(self, note: Note) -> None:
        """Calls `note` when the operation has ended."""
        self._handle.then(note)

    def done(self) -> bool:
        """Whether the operation has ended."""
        return self._handle.done()
