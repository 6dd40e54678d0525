"""The boundary of a tensor-parallel region, where tokens meet the slices of matrices: Megatron-LM's
f and g; with sequence parallelism (`sp`), g and its conjugate.

Inside a region, between the matrices of a block, every tp rank has some of the columns of all
tokens. Around it (norms, dropout, residuals), every tp rank has all tokens or, under `sp`, a slice
of the positions (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198):

             around          in                  between          out                  around
    tp       all tokens      as they are         columns          all-reduce           all tokens
    tp sp    a slice         all-gather          columns          reduce-scatter       a slice

    backward runs it from right to left: an all-reduce, or reduce-scatter, at the way in, and
    nothing, or an all-gather, at the way out

So `sp` sends the same bytes as `tp`, in two halves at different points, plus a quarter: only the
slice of the input is kept, so the backward pass gathers the input again. With `inputs=gathered` the
gathered input is kept, and nothing is sent twice.

Slices are shares of the positions of each sample; their lengths may differ by one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from howdah.base.stopwatch import Stopwatch
from howdah.comm.group import Group
from howdah.comm.handle import Handle
from howdah.plan.flat_buffers import share

Pending = Callable[[], Tensor]  # waits for a tensor that is being communicated, and returns it


@dataclass(frozen=True)
class TpRegion:
    """The boundary of the tensor-parallel regions, as one rank sees it.

    group   the tp ranks
    length  positions of a sample
    sliced  whether each tp rank has a slice of the positions outside of regions (sp)
    keeps   whether the gathered input is kept for the backward pass (inputs=gathered)
    waited  runs while computation waits here
    """

    group: Group
    length: int
    sliced: bool
    keeps: bool
    waited: Stopwatch

    def gather_in(self, x: Tensor, *, now: bool = False) -> Pending:
        """Starts to gather x [b, s, h], a slice of the positions under sp, to all S positions.
        Returns a function that waits for the result.

        now  communicate on the calling thread; the result is then ready at once
        """
        if not self.sliced:
            return lambda: x
        rows = x.movedim(1, 0).contiguous()
        out = rows.new_empty(self.length, *rows.shape[1:])
        with self.waited:
            started = self.group.all_gather(out, rows, async_op=not now)
        return self._after(started, lambda: out.movedim(0, 1).contiguous())

    def reduce_out(self, x: Tensor, *, now: bool = False) -> Pending:
        """Starts to sum x [b, S, h] over the tp ranks. Returns a function that waits for the
        result: the sum, or under sp this rank's slice of it.

        now  communicate on the calling thread; the result is then ready at once

        `x` must own its memory, because the sum may be written into it.
        """
        if not self.sliced:
            with self.waited:
                started = self.group.all_reduce(x, async_op=not now)
            return self._after(started, lambda: x)
        rows = x.movedim(1, 0).contiguous()
        start, stop = self.slice
        out = rows.new_empty(stop - start, *rows.shape[1:])
        with self.waited:
            started = self.group.reduce_scatter(out, rows, async_op=not now)
        return self._after(started, lambda: out.movedim(0, 1).contiguous())

    def combine(self, x: Tensor, op: Literal["max", "sum"]) -> None:
        """All-reduces `x` in place: the maximum or the sum over the tp ranks."""
        with self.waited:
            self.group.all_reduce(x, op=op)

    @property
    def slice(self) -> tuple[int, int]:
        """The positions [start, stop) that this rank has outside of regions."""
        if not self.sliced:
            return 0, self.length
        return share(self.length, self.group.size, self.group.rank)

    def own_slice(self, x: Tensor) -> Tensor:
        """Of x [b, S], which is equal on all tp ranks, the positions of this rank."""
        start, stop = self.slice
        return x[:, start:stop]

    def _after(self, started: Handle, give: Pending) -> Pending:
        def wait() -> Tensor:
            with self.waited:
                started.result()
            return give()

        return wait


@dataclass(frozen=True)
class TpVocabShards:
    """The tp ranks as the holders of the rows of the head (`VocabShards` in `model/loss.py`).

    first  this rank's first row
    vocab  number of rows of all ranks together
    """

    region: TpRegion
    first: int
    vocab: int

    @property
    def keeps(self) -> bool:
        """Whether the result of `gather_in` is kept; else it is gathered again in backward."""
        return self.region.keeps

    def combine(self, x: Tensor, op: Literal["max", "sum"]) -> None:
        """All-reduces `x`, a number for each token, over the tp ranks."""
        self.region.combine(x, op)

    def gather_in(self, hidden: Tensor) -> Tensor:
        """The hidden states of all positions; under sp, `hidden` is a slice of them."""
        return self.region.gather_in(hidden, now=True)()

    def reduce_out(self, gradient: Tensor) -> Pending:
        """Starts to sum the gradient of the hidden states over the tp ranks, as TpRegion does."""
        return self.region.reduce_out(gradient)


class WholeOnEach(TpVocabShards):
    """The tp ranks where each holds all rows of a head for labels, which may be fewer than ranks:
    under sp each gathers all positions, and all compute the same loss and the same gradient.
    """

    def combine(self, x: Tensor, op: Literal["max", "sum"]) -> None:
        """Does nothing: all rows are here."""

    def reduce_out(self, gradient: Tensor) -> Pending:
        """Returns a function that returns the gradient of this rank's positions."""
        return lambda: self.region.own_slice(gradient)
