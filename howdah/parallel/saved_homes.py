"""Activations whose home is the host or the disk: what a block keeps for its backward pass leaves
the device behind its forward, and comes back ahead of its backward.

    forward     block 0 | block 1 | block 2        backward   block 2 | block 1 | block 0
    evict          | of block 0 | of block 1 |     fetch      | of block 1 | of block 0 |

Two blocks have theirs on the device at a time: the one that runs, and its neighbour. Hooks of
autograd see each tensor that an operation saves. What is moved is its storage, once, however many
tensors are views of it. Weights stay where they are, and so does what all blocks share (the angles
of rotary positions). Recomputation is inside: a block that is made again keeps its input alone, and
that is moved.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from howdah.base.errors import Unfinished, UserError
from howdah.comm.handle import Handle
from howdah.host.scratch import Range
from howdah.model.block import Block, BlockContext, BlockRun
from howdah.model.transformer import Transformer
from howdah.parallel.homes import Homes


class Stay(NamedTuple):
    """A tensor that was not moved."""

    tensor: Tensor


class Moved:
    """A storage in its home: memory of the host, or a range of the file; `of` is the block."""

    def __init__(
        self, there: "Shelf", place: Tensor | Range, storage: UntypedStorage, of: str
    ) -> None:
        self.shelf, self.size, self.of, self.place = there, storage.nbytes(), of, place
        self.storage: UntypedStorage | None = storage  # until it has left
        self.handle: Handle = there.evict(self.place, _flat(storage), of=of)

    def leave(self) -> None:
        """Waits until it has left the device."""
        self.wait()
        self.storage = None

    def wait(self) -> None:
        """Waits until it has moved."""
        self.shelf.homes.wait(f"activations of {self.of}", self.handle)

    def come(self) -> None:
        """Starts to bring it back, if it is not there."""
        if self.storage is None:
            flat = torch.empty(self.size, dtype=torch.uint8, device=self.shelf.homes.device)
            self.storage = flat.untyped_storage()
            self.handle = self.shelf.fetch(flat, self.place, of=self.of)

    def __del__(self) -> None:
        self.shelf.give(self.size, self.place)


class Kept:
    """What one run of a block keeps.

    block   its name
    shared  what all blocks share, which is not moved
    before  the run of the block before, whose backward pass is next
    """

    def __init__(
        self, shelf: "Shelf", block: str, shared: Tensor | None, before: "Kept | None"
    ) -> None:
        self.shelf, self.block, self.before = shelf, block, before
        self._shared = None if shared is None else shared.untyped_storage().data_ptr()
        self.moved: dict[int, Moved] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Called with a tensor that is saved; what it returns is kept in its place."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address == self._shared:
            self.shelf.shared[address] = size
        here = tensor.device.type == self.shelf.homes.device.type  # not a number of the host
        if address == self._shared or address in self.shelf.weights or not size or not here:
            return Stay(tensor.detach())
        if address not in self.moved:
            place = self.shelf.take(size)
            self.moved[address] = Moved(self.shelf, place, storage, self.block)
        form = tensor.size(), tensor.stride(), tensor.storage_offset()
        return self, self.moved[address], tensor.dtype, form

    def leave(self) -> None:
        """Waits until all of it has left the device."""
        for moved in self.moved.values():
            moved.leave()

    def come(self) -> None:
        """Starts to bring all of it back."""
        for moved in self.moved.values():
            moved.come()


class Shelf:
    """The home of a rank's activations.

    held     bytes that are there now
    shared   by address, the bytes of what blocks share, which stays
    weights  addresses of the storages of weights, which stay
    last     the run of a block that was last in this forward pass of a stage
    """

    def __init__(self, homes: Homes, weights: Iterable[Tensor]) -> None:
        self.homes, self.held, self.shared = homes, 0, dict[int, int]()
        self.weights = {tensor.untyped_storage().data_ptr() for tensor in weights}
        self.last: Kept | None = None
        self._free: dict[int, list[Tensor | Range]] = {}

    def take(self, size: int) -> Tensor | Range:
        """Room for `size` bytes: the smallest that is free and large enough, or a new one. What
        experts keep has another size in every micro-batch.
        """
        self.held += size
        enough = (length for length, free in self._free.items() if free and length >= size)
        if length := min(enough, default=0):
            return self._free[length].pop()
        if self.homes.layout.activations == "host":
            return self.homes.memory(size, torch.uint8)
        try:
            return self.homes.scratch.allocate(size)
        except UserError as error:  # it has filled since the run has started
            raise Unfinished(f"{error}; the last checkpoint stands") from error

    def give(self, size: int, place: Tensor | Range) -> None:
        """Takes room back."""
        self.held -= size
        length = place.length if isinstance(place, Range) else len(place)
        self._free.setdefault(length, []).append(place)

    def evict(self, place: Tensor | Range, source: Tensor, *, of: str) -> Handle:
        """Starts to bring bytes of a block there."""
        if isinstance(place, Range):
            part = place._replace(length=len(source))
            return self.homes.evict_range("activations", part, source, of=of)
        return self.homes.copy("activations", "evict", place[: len(source)], source, of=of)

    def fetch(self, out: Tensor, place: Tensor | Range, *, of: str) -> Handle:
        """Starts to bring bytes of a block back."""
        if isinstance(place, Range):
            part = place._replace(length=len(out))
            return self.homes.fetch_range("activations", part, out, of=of)
        return self.homes.copy("activations", "fetch", out, place[: len(out)], of=of)

    def run(self, name: str, run: BlockRun, x: Tensor, context: BlockContext) -> Tensor:
        """Runs the block of a name, and moves what it keeps."""
        if not torch.is_grad_enabled():
            return run(x, context)
        before = self.last
        kept = self.last = Kept(self, name, context.rotary, before)
        with saved_tensors_hooks(kept.pack, _unpack):
            out = run(x, context)
        if before is not None:
            before.leave()
        return out

    def settle(self) -> None:
        """Waits until what the last block of a stage keeps has left."""
        if self.last is not None:
            self.last.leave()
            self.last = None


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Stay):
        return packed.tensor
    kept, moved, dtype, (size, stride, offset) = packed
    kept.come()
    if kept.before is not None:
        kept.before.come()
    moved.wait()
    flat = torch.empty(0, dtype=dtype, device=moved.storage.device)
    return flat.set_(moved.storage, offset, size, stride)


def _flat(storage: UntypedStorage) -> Tensor:
    """The bytes of a storage as a tensor."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def keep_elsewhere(model: Transformer, homes: Homes, weights: Iterable[Tensor]) -> Shelf | None:
    """Makes the blocks of `model` keep their activations in the home of the layout; None if that is
    the device.

    weights  the tensors that hold weights, beside the parameters of the model
    """
    if homes.layout.activations == "device":
        return None
    shelf = Shelf(homes, [*model.parameters(), *weights])
    for number, one in model.layers.items():
        block = cast(Block, one)
        block.run = partial(shelf.run, f"layers.{number}", block.run or block.sublayers)
    return shelf
