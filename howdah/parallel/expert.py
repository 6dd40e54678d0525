"""Expert parallelism: the ranks of ep hold different experts, and send each other's tokens to them
(GShard, Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668).

    rank 0   tokens a b c d   ─┐ all-to-all ┌─   experts 0 1: a c e g   ─┐ all-to-all ┌─   a b c d
    rank 1   tokens e f g h   ─┘            └─   experts 2 3: b d f h   ─┘            └─   e f g h

The ranks are neighbours along dp: they have different tokens. Rows are sorted by expert, so those
for one rank are neighbours; what comes from several ranks is sorted by expert again. With a
capacity all messages have one size; dropless, the ranks first tell each other the numbers of rows.
The backward pass sends gradients the other way round.

An expert's gradient has terms from the tokens of all ep ranks, and is summed over the ranks that
hold the same expert alone (`plan/sharding.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from howdah.comm.group import Group
from howdah.model.grouped import Sizes
from howdah.model.moe import Places
from howdah.model.transformer import Block, Transformer
from howdah.parallel.mesh import Mesh
from howdah.plan.flat_buffers import shares
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan

Feed = Callable[[Tensor, Sizes], Tensor]


class Way(NamedTuple):
    """Who sends how many rows to whom.

    to    rows for each rank
    come  rows from each rank, for each of this rank's experts
    """

    to: list[int]
    come: list[list[int]]


class ExpertExchange:
    """Runs the experts of one block, on rows of all ranks.

    held  how many experts each rank has
    sent  rows that this rank gave to each expert in forward passes so far, its own included
    """

    def __init__(self, plan: Plan, mesh: Mesh, group: Group) -> None:
        assert plan.shape.experts is not None, "a dense model has no experts to send to"
        self.group, self._waited = group, mesh.waited
        self.held = [int(count) for count in shares(plan.shape.experts.count, group.size)]
        self.sent = [0] * plan.shape.experts.count

    def __call__(self, experts: Feed, x: Tensor, at: Places) -> Tensor:
        """What all experts make of rows x [n, h] at these places: [n, h]. Places with holes are
        those of a capacity, equally many on all ranks; evaluation has none, whatever training has.
        """
        sizes = at.sizes
        every = sizes.tolist() if isinstance(sizes, Tensor) else list(sizes)
        self.sent = [before + now for before, now in zip(self.sent, every, strict=True)]
        cuts = list(pairwise(accumulate(self.held, initial=0)))
        mine = slice(*cuts[self.group.rank])
        come = [every[mine]] * self.group.size if at.holes else self._told(every, x)
        way = Way([sum(every[start:stop]) for start, stop in cuts], come)
        here = tuple(sum(some) for some in zip(*come, strict=True))
        taken = cast(Tensor, _There.apply(x, self, way))
        return cast(Tensor, _Back.apply(experts(taken, here), self, way))

    def _told(self, sizes: Sequence[int], x: Tensor) -> list[list[int]]:
        """How many rows for each of this rank's experts come from each rank."""
        own = self.held[self.group.rank]
        counts = torch.tensor(sizes, device=x.device)
        heard = counts.new_empty(own * self.group.size)
        with self._waited:
            received = [own] * self.group.size
            self.group.all_to_all(heard, counts, sent=self.held, received=received)
        return cast(list[list[int]], heard.view(self.group.size, own).tolist())

    def there(self, x: Tensor, way: Way) -> Tensor:
        """The rows for this rank's experts, sorted by expert and then by rank."""
        sizes = [size for some in way.come for size in some]
        out = self._exchange(x, way.to, [sum(some) for some in way.come])
        return _turned(out, sizes, len(way.come))

    def back(self, y: Tensor, way: Way) -> Tensor:
        """Rows of this rank's experts, brought to where they came from."""
        sizes = [size for some in zip(*way.come, strict=True) for size in some]
        mine = _turned(y, sizes, len(way.come[0]))
        return self._exchange(mine, [sum(some) for some in way.come], way.to)

    def _exchange(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = x.new_empty(sum(received), x.shape[1])
        with self._waited:
            self.group.all_to_all(out, x.contiguous(), sent=sent, received=received)
        return out


def _turned(x: Tensor, sizes: Sequence[int], rows: int) -> Tensor:
    """A table of `rows` rows of pieces with `sizes`, one behind the other, column after column."""
    pieces = x.split(list(sizes))
    columns = len(pieces) // rows
    return torch.cat(
        [pieces[row * columns + column] for column in range(columns) for row in range(rows)]
    )


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: ExpertExchange, way: Way) -> Tensor:
        ctx.exchange, ctx.way = exchange, way
        return exchange.there(x, way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.back(grad, ctx.way), None, None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: ExpertExchange, way: Way) -> Tensor:
        ctx.exchange, ctx.way = exchange, way
        return exchange.back(y, way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.there(grad, ctx.way), None, None


def share_experts(model: Transformer, plan: Plan, mesh: Mesh) -> None:
    """Lets blocks with experts send their tokens to the ranks of ep. All ranks call together."""
    group = mesh.group_of(axis(plan.layout, "ep").group(mesh.rank), label="ep")
    for block in cast(Iterable[Block], model.layers.values()):
        if block.sparse:
            block.exchange = ExpertExchange(plan, mesh, group)
