"""Expert parallelism: the ranks of ep hold different experts, and send each other's tokens to them
(GShard, Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668).

    rank 0   tokens a b c d   ─┐ all-to-all ┌─   experts 0 1: a c e g   ─┐ all-to-all ┌─   a b c d
    rank 1   tokens e f g h   ─┘            └─   experts 2 3: b d f h   ─┘            └─   e f g h

The ranks are neighbours along dp: they have different tokens. Rows are sorted by expert, so those
for one rank are neighbours; what comes from several ranks is sorted by expert again. With a
capacity all messages have one size; dropless, the ranks first tell each other the numbers of rows.
The backward pass sends gradients the other way round. A shared expert, which all tokens pass, is
computed while rows are on their way there, and its gradients while theirs come back.

An expert's gradient has terms from the tokens of all ep ranks, and is summed over the ranks that
hold the same expert alone (`plan/sharding.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from howdah.comm.group import Group
from howdah.comm.handle import Handle
from howdah.model.block import Block
from howdah.model.moe import Beside, Both, Feed, Numbering
from howdah.model.places import Places
from howdah.model.transformer import Transformer
from howdah.parallel.mesh import Mesh
from howdah.plan.flat_buffers import Orders, shares
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan


@dataclass
class Way:
    """Who sends how many rows to whom.

    to      rows for each rank
    come    rows from each rank, for each of this rank's experts
    beside  whether something else is computed while rows go to their experts, and while their
            gradients come back
    flying  what is on its way: the handle, what is sent, and where it comes
    """

    to: list[int]
    come: list[list[int]]
    beside: bool
    flying: tuple[Handle, Tensor, Tensor] | None = None

    @property
    def coming(self) -> list[int]:
        """Rows from each rank."""
        return [sum(some) for some in self.come]


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
        self._beside = plan.shape.experts.shared > 0

    def __call__(self, experts: Feed, x: Tensor, at: Places, beside: Beside) -> Both:
        """What all experts make of rows x [n, h] at these places: [n, h], without empty rows unless
        their numbers are fixed. Those of a capacity are, and are equal on all ranks; evaluation has
        no capacity, whatever training has. And what `beside` makes while the rows are on their way.
        """
        sizes = at.sizes
        every = sizes.tolist() if isinstance(sizes, Tensor) else list(sizes)
        self.sent = [before + now for before, now in zip(self.sent, every, strict=True)]
        cuts = list(pairwise(accumulate(self.held, initial=0)))
        mine = slice(*cuts[self.group.rank])
        come = [every[mine]] * self.group.size if at.fixed else self._told(every, x)
        way = Way([sum(every[start:stop]) for start, stop in cuts], come, self._beside)
        full = sum(every)  # behind, rows may be empty
        tie = _There.apply(x if full == len(x) else x[:full], self, way)
        made = beside()
        here = tuple(sum(some) for some in zip(*come, strict=True))
        taken = cast(Tensor, _Arrived.apply(tie, self, way))
        return cast(Tensor, _Back.apply(experts(taken, here), self, way)), made

    def _told(self, sizes: Sequence[int], x: Tensor) -> list[list[int]]:
        """How many rows for each of this rank's experts come from each rank."""
        own = self.held[self.group.rank]
        counts = torch.tensor(sizes, device=x.device)
        heard = counts.new_empty(own * self.group.size)
        with self._waited:
            received = [own] * self.group.size
            self.group.all_to_all(heard, counts, sent=self.held, received=received)
        return cast(list[list[int]], heard.view(self.group.size, own).tolist())

    def start(self, x: Tensor, way: Way, *, back: bool = False, alone: bool = False) -> None:
        """Sends rows to the ranks of their experts, or `back`. `alone`: nothing is computed until
        they have landed.
        """
        sent, received = (way.coming, way.to) if back else (way.to, way.coming)
        x, out = x.contiguous(), x.new_empty(sum(received), x.shape[1])
        with self._waited:
            async_op = way.beside and not alone
            handle = self.group.all_to_all(out, x, sent=sent, received=received, async_op=async_op)
        way.flying = handle, x, out

    def land(self, way: Way) -> Tensor:
        """Waits for what was started: the rows that have come, rank after rank."""
        assert way.flying is not None, "nothing is on its way"
        handle, _, out = way.flying
        with self._waited:
            handle.result()
        way.flying = None
        return out

    def at_once(self, x: Tensor, way: Way, *, back: bool) -> Tensor:
        """Sends rows, and waits for those that come."""
        self.start(x, way, back=back, alone=True)
        return self.land(way)


def _by_expert(x: Tensor, way: Way) -> Tensor:
    """Rows that came from each rank, sorted by expert and then by rank."""
    return _turned(x, [size for some in way.come for size in some], len(way.come))


def _by_rank(x: Tensor, way: Way) -> Tensor:
    """The inverse."""
    by_expert = [size for some in zip(*way.come, strict=True) for size in some]
    return _turned(x, by_expert, len(way.come[0]))


def _turned(x: Tensor, sizes: Sequence[int], rows: int) -> Tensor:
    """A table of `rows` rows of pieces with `sizes`, one behind the other, column after column."""
    pieces = x.split(list(sizes))
    columns = len(pieces) // rows
    return torch.cat(
        [pieces[row * columns + column] for column in range(columns) for row in range(rows)]
    )


class _There(torch.autograd.Function):
    """Starts to send rows to the ranks of their experts; in the backward pass their gradients have
    come back. What it returns is no row, but ties its two passes to those of `_Arrived`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: ExpertExchange, way: Way) -> Tensor:
        ctx.exchange, ctx.way = exchange, way
        exchange.start(x, way)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tie: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.land(ctx.way), None, None


class _Arrived(torch.autograd.Function):
    """Rows that have come, sorted by expert; their gradients are sent back. What was computed
    between the two forwards has its backward between the two backwards.
    """

    @staticmethod
    def forward(ctx: Any, tie: Tensor, exchange: ExpertExchange, way: Way) -> Tensor:
        ctx.exchange, ctx.way = exchange, way
        return _by_expert(exchange.land(way), way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.exchange.start(_by_rank(grad, ctx.way), ctx.way, back=True)
        return grad.new_zeros(()), None, None


class _Back(torch.autograd.Function):
    """Rows of this rank's experts, brought to where they came from."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: ExpertExchange, way: Way) -> Tensor:
        ctx.exchange, ctx.way = exchange, way
        return exchange.at_once(_by_rank(y, way), way, back=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _by_expert(ctx.exchange.at_once(grad, ctx.way, back=False), ctx.way), None, None


def share_experts(model: Transformer, plan: Plan, mesh: Mesh, orders: Orders) -> None:
    """Lets blocks with experts send their tokens to the ranks of ep, which have them in these
    orders. All ranks call together.
    """
    group = mesh.group_of(axis(plan.layout, "ep").group(mesh.rank), label="ep")
    for block in cast(Iterable[Block], model.layers.values()):
        if block.sparse:
            block.exchange = ExpertExchange(plan, mesh, group)
    number_experts(model, orders, mesh.device)


def number_experts(model: Transformer, orders: Orders, device: torch.device) -> None:
    """Tells blocks at which places their experts are."""
    for layer, block in cast(Iterable[tuple[str, Block]], model.layers.items()):
        if found := orders.get(f"layers.{layer}"):
            order = torch.tensor(found, device=device)
            block.numbering = Numbering(order, order.argsort())
