"""A wire whose other ranks say what this one says, so that one GPU runs layouts of several.

Every operation on tensors of the GPU is one of NCCL on a communicator of one rank, on a lane, as in
a run: the same launches, events and buffers. Numbers mean nothing, and are the same in every run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from howdah.comm.cards import connect_nccl
from howdah.comm.lane import CudaStreams, Lane
from howdah.comm.native import Native
from howdah.comm.transport import Counts, SingleRank, SubgroupFactory, Transport, copy_own
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.recording import Wires

SECONDS = 60.0  # after which an operation counts as lost


class LoopWire(SingleRank):
    """Rank 0 of `size` ranks.

    native  carries operations on its device; None: copies on the stream that computes
    before  is called before each operation
    """

    def __init__(
        self, size: int, native: Native | None, among: "Loops", before: Callable[[], None]
    ) -> None:
        self.rank, self.size, self.among = 0, size, among  # type: ignore[misc]
        self.native, self._before = native, before

    def lane_of(self, x: Tensor) -> Lane | None:
        if self.native is None and x.is_cuda:
            return AtOnce(CudaStreams(x.device))
        return self.native.lane_of(x) if self.native else None

    def _of(self, x: Tensor) -> SingleRank | Native:
        self._before()
        carried = self.native is not None and x.device == self.native.device
        return self.native if carried and self.native else SingleRank()

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        self._of(x).all_reduce(x, op)
        return x.nbytes

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        own = x[: counts[0]]
        self._of(x).reduce_scatter(out, own, counts[:1], op)
        return x.nbytes - own.nbytes

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        first, *others = out.split(list(counts))
        self._of(x).all_gather(first, x, counts[:1])
        for part in others:
            part.copy_(first[: len(part)])
        return len(others) * x.nbytes

    def broadcast(self, x: Tensor, root: int) -> int:
        self._of(x).broadcast(x, 0)
        return 0

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        self._before()
        copy_own(out, x)
        return 0


class AtOnce(Lane):
    """A lane that is the stream that computes: nothing is beside anything."""

    def __init__(self, streams: CudaStreams) -> None:
        super().__init__(streams)
        self._stream = streams.current()


class Loops(SubgroupFactory):
    """Makes the wires of subgroups, each with a communicator of its own.

    pool  has communicators; None where nothing is sent
    """

    def __init__(self, pool: "Pool | None", before: Callable[[], None]) -> None:
        self._pool, self._before = pool, before
        self.wires = Wires("loop", "loop")

    def __call__(self, ranks: Sequence[int]) -> Transport:
        return self.of(len(ranks))

    def of(self, size: int) -> LoopWire:
        native = self._pool.take() if self._pool else None
        return LoopWire(size, native, self, self._before)


class Pool:
    """Communicators of one rank, which runs use one after another: making one takes a while."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[Native] = []
        self._free: list[Native] = []

    def take(self) -> Native:
        if not self._free:
            self._made.append(connect_alone(self._device))
            return self._made[-1]
        return self._free.pop()

    def give_back(self) -> None:
        self._free = [*self._made]

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        for native in self._made:
            native.close()


@contextmanager
def looped(pool: Pool | None, before: Callable[..., None] = lambda: None) -> Iterator[Loops]:
    """Wires of one rank that plays several. What zero3 asks the others needs no answer."""
    try:
        with patch.object(ShardedWeights, "_ask_others", lambda self, unit: None):
            yield Loops(pool, before)
    finally:
        if pool:
            pool.give_back()


def connect_alone(device: torch.device) -> Native:
    """A communicator of one rank: NCCL's, or on the CPU gloo's."""
    store = dist.HashStore()
    if device.type == "cuda":
        return connect_nccl(store, rank=0, size=1, device=device, seconds=SECONDS)
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return Native(gloo(store, 0, 1, options), link="gloo")
