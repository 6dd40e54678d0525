"""Snapshots: copies of a rank's tensors in memory of the host, written while training goes on.

    compute stream  ─ step 100 ─┬─ forward and backward of step 101 ─┬─ update ─
                                │ take                               │ settle
    lane of copies              └─ device → pinned memory ───────────┤
    thread of the save                                               └─ write ──

Only an update changes what is copied. So on a GPU the copies run beside the next forward and
backward, the compute stream waits for them before the update, and the host waits for nothing
(docs/gpu.md, rule 10). On the CPU the copy is done when `take` returns.

The memory is kept for the next snapshot, and never more than `room`. A snapshot that needs more is
not apart: it holds the tensors themselves, which nobody may change until they are written. Neither
is one of tensors that are on a disk.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from howdah.checkpoint.index import entry_name
from howdah.comm.lane import CudaStreams, Landing, Lane, Streams
from howdah.comm.staging import pinned
from howdah.plan.boxes import Piece


@dataclass(frozen=True)
class Elsewhere:
    """A tensor that is on a disk, and is read when it is written to a checkpoint.

    read  reads it
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def detach(self) -> "Elsewhere":
        """Itself."""
        return self

    def cpu(self) -> Tensor:
        """The tensor."""
        return self.read()


InMemory = tuple[str, Piece, Tensor]  # kind such as "weight", piece, its elements (1-D)
Entry = tuple[str, Piece, Tensor | Elsewhere]
Allocate = Callable[[int], Tensor]  # bytes → memory of the host, uint8


@dataclass(frozen=True)
class Snapshot:
    """What a save writes.

    entries  by the name that each has in a file
    apart    whether they are copies; otherwise they are the tensors of the training
    landing  the copies of a GPU, which may still be on their way
    """

    entries: Mapping[str, Entry]
    apart: bool
    landing: Landing | None = None

    def wait(self) -> None:
        """Waits until the copies are there: the host, in the thread that reads them."""
        if self.landing is not None:
            self.landing.ended.synchronize()


class Snapshots:
    """Takes a rank's snapshots, one at a time, in memory that it keeps.

    room      bytes of the host that the copies may take; None: no bound
    streams   of the device that the tensors are on; None for the CPU
    allocate  makes memory of the host; on a GPU such as it can write to by itself
    enter     is called first by a thread that works with the tensors
    on_card   whether a tensor is on the GPU; others need no memory that it can write to
    """

    def __init__(
        self,
        room: int | None = None,
        *,
        streams: Streams | None = None,
        allocate: Allocate | None = None,
        enter: Callable[[], None] = lambda: None,
        on_card: Callable[[Tensor], bool] = lambda tensor: not tensor.is_cpu,
    ) -> None:
        self.room, self.enter, self._on_card = room, enter, on_card
        self._lane = Lane(streams) if streams else None
        self._allocate = allocate or (pinned if streams else _plain)
        self._buffers: dict[str, Tensor] = {}
        self._landing: Landing | None = None

    def size(self, entries: Iterable[Entry]) -> int:
        """Bytes that copies take. torch rounds each piece of pinned memory up to a power of two;
        what is on the host needs none.
        """
        found = 0
        for _, _, tensor in entries:
            rounds = tensor.nbytes and isinstance(tensor, Tensor) and self._on_card(tensor)
            found += 1 << (tensor.nbytes - 1).bit_length() if rounds else tensor.nbytes
        return found

    def take(self, entries: Iterable[Entry], *, apart: bool) -> Snapshot:
        """A snapshot of tensors as they are now. What was taken before must be written by now.

        apart  copy them, if all are in memory

        Raises ValueError for two entries of one name, and for one that does not fill its piece.
        """
        found: dict[str, Entry] = {}
        for kind, piece, tensor in entries:
            name = entry_name(kind, piece)
            if tensor.shape != (piece.elements,) or name in found:
                raise ValueError(f"{name}: wants {piece.elements} elements, once; {tensor.shape}")
            found[name] = kind, piece, tensor.detach()
        in_memory = {
            name: (kind, piece, tensor)
            for name, (kind, piece, tensor) in found.items()
            if isinstance(tensor, Tensor)
        }
        whole = apart and len(in_memory) == len(found)
        return self._copied(in_memory) if whole else Snapshot(found, apart=False)

    def settle(self) -> None:
        """Orders all later work of the compute stream behind the copies; before an update."""
        if self._landing is not None:
            self._landing.result()
            self._landing = None

    def _copied(self, found: Mapping[str, tuple[str, Piece, Tensor]]) -> Snapshot:
        self._buffers = {name: self._buffer(name, x) for name, (_, _, x) in found.items()}
        taken: dict[str, Entry] = {
            name: (kind, piece, self._buffers[name]) for name, (kind, piece, _) in found.items()
        }
        tensors = [tensor for _, _, tensor in found.values()]

        def copy() -> None:
            for buffer, tensor in zip(self._buffers.values(), tensors, strict=True):
                buffer.copy_(tensor, non_blocking=True)

        if self._lane is None:
            copy()
        else:
            self._landing = self._lane.start(copy, tensors, site="snapshot")
        return Snapshot(taken, apart=True, landing=self._landing)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        """Memory for a tensor: that of the last snapshot, if the sizes are the same."""
        old = self._buffers.pop(name, None)
        if old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
            return old
        del old  # before there is more
        allocate = self._allocate if self._on_card(tensor) else _plain
        return allocate(tensor.nbytes).view(tensor.dtype)


def snapshots_of(device: torch.device, room: int | None) -> Snapshots:
    """The snapshots of what is on `device`."""
    if device.type == "cpu":
        return Snapshots(room)

    def enter() -> None:
        if device.type == "cuda":  # the device of a new thread is the first
            torch.cuda.set_device(device)

    return Snapshots(room, streams=CudaStreams(device), enter=enter)


def _plain(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
