"""Shard: the weights of a server's chunks, and the optimizer that updates them.

A push is a sum over tokens, and comes with their number. The updates of a round are added in the
order of the workers, and divided once by all their tokens: so an average is never averaged, and bsp
computes what one process does. Each chunk has an optimizer of its own, with its own number of
updates, on one or two ranges: what decays, and what does not.

    plain       g = sum / tokens
    staleness   the learning rate is divided by 1 + the age of the weights in versions
                (Zhang et al. 2016, https://arxiv.org/abs/1511.05950)
    delay       g + compensation · g ⊙ g ⊙ (w - what the worker had pulled)
                (Zheng et al. 2017, https://arxiv.org/abs/1609.08326)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from howdah.optim.optimizers import Range, build_optimizer, make_states, set_rate
from howdah.plan.method import Method, Sync
from howdah.server.chunks import Chunk
from howdah.server.clocks import Round

Rate = Callable[[int], float]  # clock → learning rate


class Term(NamedTuple):
    """What a worker pushes for a key: a gradient summed over `tokens`, flat, at least float32."""

    summed: Tensor
    tokens: float


class Shard:
    """The chunks of one server.

    masters  by key, the weights, at least float32: they are updated in place
    rate     the learning rate of a clock
    """

    def __init__(
        self, chunks: Sequence[Chunk], masters: Sequence[Tensor], method: Method, rate: Rate
    ) -> None:
        self.chunks, self.masters, self._rate = chunks, masters, rate
        self._sync = method.sync or Sync()
        self._sums = [torch.zeros_like(master) for master in masters]
        self._before: dict[tuple[int, int], Tensor] = {}  # by worker and key, what it has pulled
        self.ranges: list[list[Range]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for chunk, master, gradient in zip(chunks, masters, self._sums, strict=True):
            turn = min(max(chunk.decay_stop - chunk.start, 0), chunk.length)
            cuts = [(0, turn, True), (turn, chunk.length, False)]
            ranges = [
                Range(
                    chunk.unit, chunk.start + a, chunk.start + b, decay, master[a:b], gradient[a:b]
                )
                for a, b, decay in cuts
            ]
            optimizer = build_optimizer(method.optimizer, ranges)
            make_states(method.optimizer, optimizer, ranges, step=0)
            self.ranges.append(ranges)
            self.optimizers.append(optimizer)

    def pulled(self, worker: int, key: int) -> Tensor:
        """The weights of a key, for a worker: valid until its next update."""
        if self._sync.compensation:
            self._before[worker, key] = self.masters[key].clone()
        return self.masters[key]

    def apply(self, one: Round, terms: Mapping[int, Term]) -> None:
        """One update of a key, by the terms of the round's workers."""
        key, total = one.updates[0].key, sum(terms[u.worker].tokens for u in one.updates)
        first, *others = (terms[update.worker].summed for update in one.updates)
        gradient = self._sums[key]
        for other in others:
            first = torch.add(first, other, out=gradient)
        torch.div(first, max(total, 1.0), out=gradient)
        if self._sync.compensation:
            for update in one.updates:  # an asynchronous round has one
                before = self._before.get((update.worker, key), self.masters[key])
                drift = self.masters[key] - before
                gradient.addcmul_(gradient.square(), drift, value=self._sync.compensation)
        rate = self._rate(one.updates[0].clock)
        if self._sync.rate == "staleness":
            rate /= 1 + one.stale
        set_rate(self.optimizers[key], rate)
        self.optimizers[key].step()
