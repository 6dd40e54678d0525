"""Feeding: micro-batches become tensors of the device before the step that uses them.

    prefetch thread   read → pinned memory → copy stream ──────┐ event
    compute stream    step s ..................................└ step s + 1 ..........
    host's wire       tokens and stop requests of step s + 1 ──┘

On a GPU the copies run beside the step before, and so does the exchange of what all ranks must know
of a step before it begins: how many of its tokens have a label, and whether some rank was asked to
stop. So nothing inside a step waits for the host, or for another rank's host. A stop request takes
effect one step later than on the CPU.

On the CPU arrays are used where they are, and the ranks exchange when the step begins.

Under cp every rank reads whole samples, and takes its own columns of them here (`Columns`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from howdah.comm.handle import Handle
from howdah.comm.lane import Streams, streams_of
from howdah.model.documents import document_starts, one_document_each
from howdah.model.noise import Noise
from howdah.parallel.mesh import Mesh
from howdah.parallel.stages import Given
from howdah.parallel.tensor_border import TpRegion
from howdah.plan.batch import MASKED
from howdah.plan.layout import Layout
from howdah.plan.sharding import chunks
from howdah.text.batches import Micro
from howdah.text.prefetch import Prefetch
from howdah.train.tell import steps_late


class Counts(NamedTuple):
    """What all ranks know of a step before it begins.

    tokens  of the global batch that have a label
    stop    whether some rank was asked to stop
    """

    tokens: float
    stop: bool


@dataclass(frozen=True)
class Columns:
    """The columns of whole samples that a rank works on: under cp, two chunks of the positions."""

    layout: Layout
    rank: int

    @property
    def all(self) -> bool:
        """Whether the rank works on whole samples."""
        return self.layout.cp == 1

    @property
    def asks_host(self) -> bool:
        """Whether attention asks the host where documents end (`parallel/context_ring.py`)."""
        return not self.all and self.layout.context != "all-to-all"

    def of(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rank's columns of `array` [b, S]: the array itself, if these are all."""
        if self.all:
            return array
        parts = chunks(self.layout, array.shape[1], self.rank)
        return np.concatenate([array[:, start:stop] for start, stop in parts], 1)


ALL = Columns(Layout(), 0)


class OnDevice(NamedTuple):
    """A micro-batch as tensors of the device.

    given    the micro-batch without noise
    samples  [b] the number of the sample of each row
    places   [s] the rank's positions in the sample; None: all of them
    length   positions of a whole sample
    """

    given: Given
    samples: Tensor
    places: Tensor | None
    length: int


@dataclass(frozen=True, eq=False)
class Fed(Sequence[Micro]):
    """The micro-batches of a step of this rank.

    micros   as arrays of the host
    tensors  the same on the device
    ready    an event behind their copies; None where nothing was copied
    counts   None: the ranks have not exchanged them yet
    """

    micros: Sequence[Micro]
    tensors: Sequence[OnDevice]
    ready: Any = None
    counts: Counts | None = None

    @overload
    def __getitem__(self, index: int) -> Micro: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Micro]: ...
    def __getitem__(self, index: int | slice) -> Micro | Sequence[Micro]:
        return self.micros[index]

    def __len__(self) -> int:
        return len(self.micros)

    def wait(self, streams: Streams | None) -> None:
        """Orders all later work of the compute stream behind the copies."""
        if streams is not None and self.ready is not None:
            streams.current().wait_event(self.ready)


class Feeder:
    """Brings micro-batches to a device; used by one thread."""

    def __init__(
        self, device: torch.device, streams: Streams | None, columns: Columns = ALL
    ) -> None:
        self._device, self._streams, self._columns = device, streams, columns
        self._stream = streams.new() if streams else None

    def __call__(self, micros: Sequence[Micro]) -> Fed:
        """The micro-batches, on the device once it has passed their event. They must be kept until
        the step that used them has ended: their memory is the copy stream's, which waits for nobody
        (`tell.tell`).
        """
        if self._streams is None:
            return Fed(micros, [self._bring(micro) for micro in micros])
        with self._streams.inside(self._stream):
            tensors = [self._bring(micro) for micro in micros]
            ready = self._streams.event()
            ready.record(self._stream)
        return Fed(micros, tensors, ready)

    def _bring(self, micro: Micro) -> OnDevice:
        return on_device(micro, self._device, self._columns)


def on_device(micro: Micro, device: torch.device, columns: Columns = ALL) -> OnDevice:
    """A micro-batch as tensors on `device`; copies are made by the current stream. Of what
    there is one of for each token a rank takes its columns; documents stay those of whole samples.
    """

    def there(array: npt.NDArray[Any]) -> Tensor:
        x = torch.from_numpy(array)
        return x if device.type == "cpu" else pinned(x).to(device, non_blocking=True)

    documents = None
    if device.type == "cpu" or columns.asks_host:
        documents = torch.from_numpy(micro.documents)
    elif not one_document_each(micro.documents):
        documents = there(document_starts(micro.documents))
    tokens, labels, positions = (
        there(columns.of(array)) for array in (micro.tokens, micro.labels, micro.positions)
    )
    length = micro.tokens.shape[1]
    places, labelled = None, None
    if not columns.all:
        places = there(columns.of(np.arange(length)[None])[0])
        labelled = there((micro.labels != MASKED).sum(1))
    more = {
        name: there(array if name == "seen" else columns.of(array))
        for name, array in micro.more.items()
    }
    given = Given(tokens, labels, positions, documents, None, labelled, more)
    return OnDevice(given, there(micro.samples), places, length)


def pinned(x: Tensor) -> Tensor:
    """A copy of `x` in memory of the host that a GPU can read by itself."""
    return x.pin_memory()


def arrays_of(micro: Micro, device: torch.device, columns: Columns = ALL) -> Given:
    """A micro-batch as tensors on `device`, without noise."""
    return on_device(micro, device, columns).given


def with_noise(one: OnDevice, *, seed: int, step: int, region: TpRegion | None) -> Given:
    """A micro-batch with the noise of `step`; a rank that has some of the positions, or a slice of
    them in a region, drops what one device drops there.
    """
    noise, places = Noise(seed, step, one.samples), one.places
    if region and region.sliced:
        start, stop = region.slice
        every = torch.arange(start, stop, device=one.samples.device)
        places = every if places is None else places[start:stop]
    if places is not None:
        noise = replace(noise, positions=places, length=one.length)
    return replace(one.given, noise=noise)


class Supply:
    """Hands out the batches of a run, step by step; on a GPU with what the ranks have exchanged.

    steps    how many are left; none is exchanged beyond the last
    labels   the number of labelled tokens that this rank adds to the global count of a batch
    asked    whether this rank was asked to stop
    """

    def __init__(
        self,
        batches: Prefetch[Fed],
        mesh: Mesh,
        *,
        steps: int,
        labels: Callable[[Sequence[Micro]], int],
        asked: Callable[[], bool],
    ) -> None:
        self._batches, self._world, self._left = batches, mesh.world, steps
        self._labels, self._asked = labels, asked
        self._ahead = steps_late(mesh.device)
        self._coming: list[tuple[Fed, Handle, Tensor]] = []

    def next(self) -> Fed:
        """The batch of the next step; waits for it if it has not been read yet."""
        if not self._ahead:
            return self._batches.next()
        while self._left and len(self._coming) <= self._ahead:
            self._begin()
        batch, handle, heard = self._coming.pop(0)
        handle.result()
        tokens, stops = (sum(column) for column in zip(*heard.tolist(), strict=True))
        return replace(batch, counts=Counts(tokens, stops > 0))

    def _begin(self) -> None:
        """Takes one more batch, and starts to exchange its numbers on the wire of the host."""
        batch, self._left = self._batches.next(), self._left - 1
        mine = torch.tensor([self._labels(batch), self._asked()], dtype=torch.float64)
        heard = torch.empty(self._world.size, len(mine), dtype=torch.float64)
        handle = self._world.gather_scalars(heard, mine, async_op=True)
        self._coming.append((batch, handle, heard))


def feeder_of(device: torch.device, columns: Columns = ALL) -> Feeder:
    """The feeder of a device, for a rank that works on these columns."""
    return Feeder(device, streams_of(device), columns)


def columns_of(mesh: Mesh) -> Columns:
    """The columns that a rank works on."""
    return Columns(mesh.layout, mesh.rank)
