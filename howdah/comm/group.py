"""Group: the collectives of the ranks along one axis, every byte counted.

Both halves of an all-reduce are one direct exchange each. For three ranks and a buffer cut
into the shares a b c (`plan.flat.share`: sizes differ by at most one element, so any length
works):

    reduce-scatter      rank 0: a₀ b₀ c₀      sends b₀ to 1, c₀ to 2; receives a₁, a₂
                                              and keeps a = a₀ + a₁ + a₂, added in rank order
    all-gather          rank 0: a . .         sends a to 1 and 2; receives b, c

Sent per rank: Ψ - |own| elements, then (N-1)·|own|. One owner adds up each share and the others
copy it, so all ranks hold equal bits.

Operations of a group happen in one order on all ranks. Asynchronous ones run on the group's
progress thread, first come first served; a synchronous one waits for them, then runs on the
caller's thread, without a hop.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import torch
from torch import Tensor

from howdah.comm.counters import Counters
from howdah.comm.transport import Message, Transport
from howdah.plan.flat import share
from howdah.sim.traffic import Traffic


class Group:
    """Collectives over flat, contiguous buffers, in place. Several buffers go in one call."""

    def __init__(self, transport: Transport, *, axis: str, counters: Counters) -> None:
        self.axis, self.rank, self.size = axis, transport.rank, transport.size
        self._transport, self._counters = transport, counters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{axis}-progress")
        self._last: Future[None] | None = None
        self._scratch: Tensor | None = None

    def own(self, flat: Tensor, rank: int | None = None) -> Tensor:
        """The share of a flat buffer that `rank` (this one by default) owns: a view."""
        start, stop = share(flat.numel(), self.size, self.rank if rank is None else rank)
        return flat[start:stop]

    # -- collectives

    def reduce_scatter(self, flats: Sequence[Tensor]) -> None:
        """Sums over the ranks; afterwards each rank's own share holds the sum.

        The rest of each buffer is left as it was.
        """
        self._run(lambda: self._reduce_scatter(flats))

    def all_gather(self, flats: Sequence[Tensor]) -> None:
        """Every rank's own share reaches all ranks."""
        self._run(lambda: self._all_gather(flats))

    def reduce_scatter_async(self, flats: Sequence[Tensor]) -> Future[None]:
        """Starts a reduce-scatter on the progress thread."""
        self._last = self._thread.submit(self._reduce_scatter, flats)
        return self._last

    def all_gather_async(self, flats: Sequence[Tensor]) -> Future[None]:
        """Starts an all-gather on the progress thread."""
        self._last = self._thread.submit(self._all_gather, flats)
        return self._last

    def all_reduce(self, flats: Sequence[Tensor]) -> None:
        """The sum over the ranks, in every rank's buffer: reduce-scatter, then all-gather."""
        self.all_reduce_async(flats).result()

    def all_reduce_async(self, flats: Sequence[Tensor]) -> Future[None]:
        """Starts an all-reduce on the progress thread; `result()` of the future waits for it."""

        def both() -> None:
            self._reduce_scatter(flats)
            self._all_gather(flats)

        self._last = self._thread.submit(both)
        return self._last

    def sum_scalars(self, values: Sequence[float]) -> list[float]:
        """Sums of a few numbers over the ranks, in float64 and in rank order on every rank."""
        mine = torch.tensor(list(values), dtype=torch.float64)
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        heard[self.rank] = mine

        def swap() -> None:
            sends = [(mine, peer) for peer in self._peers()]
            self._exchange("scalars", sends, [(heard[peer], peer) for peer in self._peers()])

        self._run(swap)
        return [sum(column) for column in zip(*(row.tolist() for row in heard), strict=True)]

    def broadcast(self, flat: Tensor, *, root: int) -> None:
        """The root's buffer reaches all ranks."""

        def send_or_receive() -> None:
            if self.rank == root:
                self._exchange("broadcast", [(flat, peer) for peer in self._peers()], [])
            else:
                self._exchange("broadcast", [], [(flat, root)])

        self._run(send_or_receive)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.sum_scalars([0.0])

    def close(self) -> None:
        """Ends the progress thread. What was started is finished first."""
        self._thread.shutdown()

    # -- how they run

    def _run(self, operation: Callable[[], None]) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None
        operation()

    def _peers(self) -> list[int]:
        return [(self.rank + hop) % self.size for hop in range(1, self.size)]

    def _reduce_scatter(self, flats: Sequence[Tensor]) -> None:
        parts: list[dict[int, Tensor]] = []  # for each buffer: rank → its part of our share
        receives: list[Message] = []
        owns = [self.own(flat) for flat in flats]
        landing = self._land([own for own in owns for _ in self._peers()])
        for own in owns:
            part = {peer: next(landing) for peer in self._peers()}
            receives += [(tensor, peer) for peer, tensor in part.items()]
            parts.append({**part, self.rank: own})
        sends = [(self.own(flat, peer), peer) for flat in flats for peer in self._peers()]
        self._exchange("reduce_scatter", sends, receives)
        for part in parts:
            _add_in_rank_order(part[self.rank], part)

    def _land(self, likes: Sequence[Tensor]) -> Iterator[Tensor]:
        """Room for one tensor like each of `likes`, used again by the next call.

        Fresh memory would be mapped, page by page, at every call.
        """
        total = sum(like.numel() for like in likes)
        if not likes:
            return iter(())
        scratch = self._scratch
        if scratch is None or scratch.dtype != likes[0].dtype or scratch.numel() < total:
            scratch = self._scratch = likes[0].new_empty(total)
        return iter(scratch[:total].split([like.numel() for like in likes]))

    def _all_gather(self, flats: Sequence[Tensor]) -> None:
        sends = [(self.own(flat), peer) for flat in flats for peer in self._peers()]
        receives = [(self.own(flat, peer), peer) for flat in flats for peer in self._peers()]
        self._exchange("all_gather", sends, receives)

    def _exchange(
        self, operation: str, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        began = perf_counter()
        sent = self._transport.exchange(
            [(tensor, peer) for tensor, peer in sends if tensor.numel()],
            [(tensor, peer) for tensor, peer in receives if tensor.numel()],
        )
        traffic = Traffic(self.axis, operation, self._transport.link)
        self._counters.add(traffic, bytes=sent, seconds=perf_counter() - began)


def _add_in_rank_order(own: Tensor, parts: dict[int, Tensor]) -> None:
    """own = parts[0] + parts[1] + …, where one of the parts is `own` itself."""
    if parts[0] is own or len(parts) == 2:  # a + b = b + a to the last bit
        for rank in sorted(parts):
            if parts[rank] is not own:
                own += parts[rank]
        return
    total = parts[0]
    for rank in range(1, len(parts)):
        total += parts[rank]
    own.copy_(total)
