"""The border of a tensor-parallel region: where tokens meet the parts of matrices.

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

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from howdah.comm.group import DONE, Group
from howdah.model.noise import Noise
from howdah.model.transformer import Transformer
from howdah.plan.flat import share

Coming = Callable[[], Tensor]  # waits for a tensor that is on its way


@dataclass(frozen=True)
class Border:
    """A rank's place at the border.

    group   the parts of tp
    length  positions of a sample
    sliced  each part holds a slice of them (sp)
    keeps   what is gathered is kept for the backward pass (inputs=gathered)
    """

    group: Group
    length: int
    sliced: bool
    keeps: bool = False

    def whole(self, x: Tensor) -> Coming:
        """Starts to bring x [b, s, h] of all positions here."""
        if not self.sliced:
            return lambda: x
        rows = x.movedim(1, 0)
        out = rows.new_empty(self.length, *rows.shape[1:])
        started = self.group.all_gather(out, rows, async_op=True)
        return _after(started, lambda: out.movedim(0, 1).contiguous())

    def sum(self, x: Tensor) -> Coming:
        """Starts to sum x [b, s, h] over the parts: the sum, or this rank's slice of it.

        `x` must be of its own memory: it may become the sum.
        """
        if not self.sliced:
            return _after(self.group.all_reduce(x, async_op=True), lambda: x)
        rows = x.movedim(1, 0)
        start, stop = self.slice
        out = rows.new_empty(stop - start, *rows.shape[1:])
        started = self.group.reduce_scatter(out, rows, async_op=True)
        return _after(started, lambda: out.movedim(0, 1).contiguous())

    @property
    def slice(self) -> tuple[int, int]:
        """The positions [start, stop) that are here, between the regions."""
        if not self.sliced:
            return 0, self.length
        return share(self.length, self.group.size, self.group.rank)

    def own(self, x: Tensor) -> Tensor:
        """Of x [b, s], the same on all parts, the positions that are here."""
        start, stop = self.slice
        return x[:, start:stop]

    def noise(self, noise: Noise | None) -> Noise | None:
        """The same noise, for the positions that are here."""
        return noise and replace(noise, first=self.slice[0], length=self.length)


def _after(started: Future[None], give: Coming) -> Coming:
    def wait() -> Tensor:
        started.result()
        return give()

    return give if started is DONE else wait


@dataclass(frozen=True)
class HeadParts:
    """The parts of tp as those who hold the rows of the head (`model/loss.py`)."""

    border: Border
    first: int
    vocab: int

    @property
    def keeps(self) -> bool:
        """What `whole` gave is kept, and not asked for again."""
        return self.border.keeps

    def combine(self, x: Tensor, op: Literal["max", "sum"]) -> None:
        """Over the parts of tp; a number for each token."""
        self.border.group.all_reduce(x, op=op)

    def whole(self, hidden: Tensor, length: int) -> Tensor:
        """Gathered, where slices are here."""
        return self.border.whole(hidden)()

    def sum(self, gradient: Tensor) -> Coming:
        """As at the way in of any region."""
        return self.border.sum(gradient)


def noise_of_slices(model: Transformer, border: Border) -> None:
    """Makes the dropout of `model` drop, of the positions that are here, what one device drops."""
    model.embed = _with_noise(model.embed, border)  # type: ignore[method-assign]
    model.around = _with_noise(model.around, border)  # type: ignore[method-assign]


def _with_noise(run: Callable[..., Any], border: Border) -> Callable[..., Any]:
    def with_noise(*given: Any, noise: Noise | None = None, **named: Any) -> Any:
        return run(*given, noise=border.noise(noise), **named)

    return with_noise
