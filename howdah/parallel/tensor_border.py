"""The region of a tensor-parallel region: where tokens meet the parts of matrices; Megatron-LM's
f and g, under sequence slices g and its conjugate.

Between the matrices of a block every part of tp has a part of the columns of all tokens. Around
them (norms, dropout, residuals) either every part holds all tokens alike, or, under `sp`, each
holds a slice of the positions (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198):

             around          in                  between          out                  around
    tp       all tokens      as they are         columns          all-reduce           all tokens
    tp sp    a slice         all-gather          columns          reduce-scatter       a slice

    backward runs it from right to left: an all-reduce, or reduce-scatter, at the way in, and
    nothing, or an all-gather, at the way out

So `sp` sends what `tp` sends, in two halves at other places; it sends a quarter more because the
slice is kept, and not what was gathered: the backward pass gathers it once more. With
`inputs=gathered` it is kept, and nothing is sent twice.

Slices are shares of the positions of each sample; their lengths may differ by one.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from torch import Tensor

from howdah.comm.group import Group
from howdah.plan.flat_buffers import share

Pending = Callable[[], Tensor]  # waits for a tensor that is on its way


@dataclass
class Waited:
    """Seconds that computation has stood still at a region, over the whole run."""

    seconds: float = 0.0

    @contextmanager
    def here(self) -> Iterator[None]:
        """What is done inside is waiting."""
        began = perf_counter()
        yield
        self.seconds += perf_counter() - began


@dataclass(frozen=True)
class TpRegion:
    """A rank's place at the region.

    group   the parts of tp
    length  positions of a sample
    sliced  each part holds a slice of them (sp)
    keeps   what is gathered is kept for the backward pass (inputs=gathered)
    waited  at this region
    """

    group: Group
    length: int
    sliced: bool
    keeps: bool = False
    waited: Waited = field(default_factory=Waited)

    @property
    def exposed(self) -> float:
        """Seconds that this rank has waited for others, over the whole run."""
        return self.waited.seconds

    def gather_in(self, x: Tensor, *, now: bool = False) -> Pending:
        """Starts to bring x [b, s, h] of all positions here; it is there if it is wanted `now`."""
        if not self.sliced:
            return lambda: x
        rows = x.movedim(1, 0)
        out = rows.new_empty(self.length, *rows.shape[1:])
        with self.waited.here():
            started = self.group.all_gather(out, rows, async_op=not now)
        return self._after(started, lambda: out.movedim(0, 1).contiguous())

    def reduce_out(self, x: Tensor, *, now: bool = False) -> Pending:
        """Starts to sum x [b, s, h] over the parts: the sum, or this rank's slice of it. It is
        there if it is wanted `now`, on the thread that asks.

        `x` must be of its own memory: it may become the sum.
        """
        if not self.sliced:
            with self.waited.here():
                started = self.group.all_reduce(x, async_op=not now)
            return self._after(started, lambda: x)
        rows = x.movedim(1, 0)
        start, stop = self.slice
        out = rows.new_empty(stop - start, *rows.shape[1:])
        with self.waited.here():
            started = self.group.reduce_scatter(out, rows, async_op=not now)
        return self._after(started, lambda: out.movedim(0, 1).contiguous())

    def combine(self, x: Tensor, op: Literal["max", "sum"]) -> None:
        """`x` becomes the largest, or the sum, over the parts."""
        with self.waited.here():
            self.group.all_reduce(x, op=op)

    @property
    def slice(self) -> tuple[int, int]:
        """The positions [start, stop) that are here, between the regions."""
        if not self.sliced:
            return 0, self.length
        return share(self.length, self.group.size, self.group.rank)

    def own_slice(self, x: Tensor) -> Tensor:
        """Of x [b, s], the same on all parts, the positions that are here."""
        start, stop = self.slice
        return x[:, start:stop]

    def _after(self, started: Future[None], give: Pending) -> Pending:
        def wait() -> Tensor:
            with self.waited.here():
                started.result()
            return give()

        return wait


@dataclass(frozen=True)
class TpVocabShards:
    """The parts of tp as those who hold the rows of the head (`model/loss.py`)."""

    region: TpRegion
    first: int
    vocab: int

    @property
    def keeps(self) -> bool:
        """What `whole` gave is kept, and not asked for again."""
        return self.region.keeps

    def combine(self, x: Tensor, op: Literal["max", "sum"]) -> None:
        """Over the parts of tp; a number for each token."""
        self.region.combine(x, op)

    def gather_in(self, hidden: Tensor) -> Tensor:
        """Gathered, where slices are here."""
        return self.region.gather_in(hidden, now=True)()

    def reduce_out(self, gradient: Tensor) -> Pending:
        """As at the way in of any region."""
        return self.region.reduce_out(gradient)
