"""Staging: brings any tensor to the form that transports need: flat, contiguous, on their device.

    Direct   for CPU tensors, and on a GPU's lane: a tensor of this form is passed without a copy;
             any other is copied, and copied back if the operation wrote to it
    Pinned   for a GPU's tensors whose operations go through the host: only the rows that are sent
             come down, and only those that were written go up again

Some backends read a strided tensor as if it were contiguous, which sends the elements next to it in
memory. Tensors of dtypes that cannot be reduced can still be moved: they are passed as bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.checks import is_let_go
from howdah.comm.lane import Streams
from howdah.comm.reduction import REDUCIBLE

ALIGN = 64  # bytes
Rows = tuple[int, int]  # along the first dim: [start, stop)


class Stage(Protocol):
    """Brings tensors to a transport, and back."""

    def take(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """The elements of `x` as a flat tensor; outside of `rows` they may be anything."""
        ...

    def give(self, x: Tensor, taken: Tensor, rows: Sequence[Rows] | None = None) -> None:
        """Writes `taken`, the result of `take(x)`, back to `x`. The operation has written `rows` of
        it, or all.
        """
        ...

    def aside(self) -> AbstractContextManager[Any]:
        """A block whose work on tensors is in order with `take` and `give`, and done at its end."""
        ...


def check_tensor(operation: str, x: Tensor, *, written: bool) -> None:
    """Raises UserError, which names `operation`, if `x` cannot be passed to a transport.

    written  the operation writes to `x`
    """
    if not isinstance(x, Tensor):
        raise UserError(f"{operation}: takes tensors, not {type(x).__name__}")
    if x.layout is not torch.strided or x.is_quantized or x.is_meta:
        kind = "meta" if x.is_meta else "quantized" if x.is_quantized else str(x.layout)
        raise UserError(f"{operation}: a {kind} tensor has no elements to send: make it dense")
    if is_let_go(x):
        raise UserError(f"{operation}: the memory of a tensor was let go: there is nothing to send")
    if (
        written
        and not x.is_contiguous()
        and any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True))
    ):
        raise UserError(f"{operation}: an expanded tensor cannot be written to: clone it first")


class Direct:
    """The stage of tensors that are where the transport wants them."""

    def take(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """A view of `x`; a copy only where no view is flat."""
        if x.requires_grad:
            x = x.detach()
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        if not x.is_contiguous():
            x = x.contiguous()
        flat = x if x.ndim == 1 else x.view(-1)
        return flat if flat.dtype in REDUCIBLE else flat.view(torch.uint8)

    def give(self, x: Tensor, taken: Tensor, rows: Sequence[Rows] | None = None) -> None:
        """Copies back what is a copy.

        In either case autograd registers the change of `x`: a backward pass that had saved the old
        values raises an error instead of using the new ones.
        """
        if x is not taken and x.data_ptr() != taken.data_ptr():
            x.detach().copy_(taken.view(x.dtype).view(x.shape))
        else:
            torch.autograd.graph.increment_version(x)

    def aside(self) -> AbstractContextManager[Any]:
        """A block on the current stream."""
        return nullcontext()


DIRECT = Direct()


class Pinned:
    """The stage of a GPU's tensors whose operations go through the host: for ranks that share a
    GPU, and between machines without NCCL.

    allocate  numbers of bytes → memory of the host that the GPU can copy from by itself

    Copies run on a stream of their own, behind what the compute stream had been given when the
    operation was called. A progress thread, which runs the operation, waits for them. The memory is
    kept for the next operation.
    """

    def __init__(self, streams: Streams, allocate: Callable[[int], Tensor]) -> None:
        self._streams, self._stream, self._allocate = streams, streams.new(), allocate
        self._room, self._used = torch.empty(0, dtype=torch.uint8), 0

    def called(self) -> Any:
        """An event behind what was computed before an operation is called."""
        event = self._streams.event()
        event.record(self._streams.current())
        return event

    def begin(self, called: Any) -> None:
        """Begins an operation: its copies wait for the event `called`."""
        self._used = 0
        self._stream.wait_event(called)

    def take(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """A copy of `rows` of x on the host."""
        with self._streams.inside(self._stream):
            flat = DIRECT.take(x)
            taken = self._lend(flat)
            for start, stop in _elements(x, flat, [rows] if rows else None):
                taken[start:stop].copy_(flat[start:stop], non_blocking=True)
            self._stream.synchronize()
        return taken

    def give(self, x: Tensor, taken: Tensor, rows: Sequence[Rows] | None = None) -> None:
        """Copies `rows` of `taken` to x."""
        with self._streams.inside(self._stream):
            flat = DIRECT.take(x)
            for start, stop in _elements(x, flat, rows):
                flat[start:stop].copy_(taken[start:stop], non_blocking=True)
            DIRECT.give(x, flat)
            self._stream.synchronize()

    def aside(self) -> AbstractContextManager[Any]:
        """A block on the stream of the copies, for whose end the thread waits."""
        return self._waited()

    @contextmanager
    def _waited(self) -> Iterator[None]:
        with self._streams.inside(self._stream):
            yield
            self._stream.synchronize()

    def _lend(self, flat: Tensor) -> Tensor:
        start = -(-self._used // ALIGN) * ALIGN
        if start + flat.nbytes > self._room.numel():  # what was lent before keeps its memory
            self._room, start = self._allocate(2 * (start + flat.nbytes)), 0
        self._used = start + flat.nbytes
        return self._room[start : self._used].view(flat.dtype)


class Scratch:
    """Memory of one device for one operation after another of a group, which run in this order: as
    much as the largest one has needed.
    """

    def __init__(self) -> None:
        self._room, self._used = torch.empty(0, dtype=torch.uint8), 0

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._room.nbytes

    def begin(self) -> None:
        """What was lent is free again."""
        self._used = 0

    def lend(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that holds anything."""
        start = -(-self._used // dtype.itemsize) * dtype.itemsize
        self._used = start + prod(shape) * dtype.itemsize
        if self._used > self._room.nbytes:  # what was lent before keeps its memory
            self._room = torch.empty(self._used, dtype=torch.uint8, device=device)
        return self._room[start : self._used].view(dtype).view(shape)


class Narrowed:
    """A stage that sends tensors as another, narrower dtype, by copies in `scratch`."""

    def __init__(self, stage: Stage, dtype: torch.dtype, scratch: Scratch) -> None:
        self._stage, self._dtype, self._scratch = stage, dtype, scratch
        self._copies: dict[int, Tensor] = {}  # by the identity of what was copied

    def take(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """A narrow copy of x."""
        with self._stage.aside():
            narrow = self._copies[id(x)] = self._scratch.lend(x.shape, self._dtype, x.device)
            narrow.copy_(x.detach())
        return self._stage.take(narrow, rows)

    def give(self, x: Tensor, taken: Tensor, rows: Sequence[Rows] | None = None) -> None:
        """Widens `rows` of what was taken into x."""
        narrow = self._copies[id(x)]
        self._stage.give(narrow, taken, rows)
        with self._stage.aside():
            for start, stop in [(0, len(x))] if rows is None else rows:
                x.detach()[start:stop].copy_(narrow[start:stop])
        torch.autograd.graph.increment_version(x)

    def aside(self) -> AbstractContextManager[Any]:
        """A block of the stage beneath."""
        return self._stage.aside()


def pinned(nbytes: int) -> Tensor:
    """Page-locked memory of the host."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _elements(x: Tensor, flat: Tensor, rows: Sequence[Rows] | None) -> list[Rows]:
    """The ranges of `flat`, the flat form of `x`, that are `rows` of x; all without rows."""
    if rows is None:
        return [(0, flat.numel())]
    width = flat.numel() // max(x.shape[0] if x.ndim else 1, 1)
    return [(start * width, stop * width) for start, stop in rows if start < stop]
