"""How many tokens each expert had in a step, over all ranks; and the biases of routers that follow.

The rule of https://arxiv.org/abs/2408.15664: an expert that had fewer tokens than the mean gets a
bias that is larger by `rate`, one that had more a smaller one. Counts are whole numbers in float64,
so their sum does not depend on the layout, and neither does a bias.

A bias is a weight like others, so that it has a place in flat units and checkpoints; its gradient
is zero and it does not decay, so no optimizer moves it.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from howdah.base.quantities import spell
from howdah.checkpoint.facts import Routed
from howdah.parallel.apply import ParallelModel
from howdah.parallel.flat_params import FlatUnit
from howdah.plan.expert_places import mean_busiest
from howdah.plan.flat_buffers import BY_NUMBER, Orders
from howdah.shapes.weights import ROUTER_BIAS


def expert_counts(placed: ParallelModel) -> dict[str, Tensor]:
    """By name of a block with experts, the sum over all ranks of what its routers counted in the
    last step: [E + 1], tokens of each expert, and how many were dropped. All ranks call together.
    """
    shape, mesh = placed.plan.shape, placed.mesh
    if shape.experts is None:
        return {}
    names = [f"layers.{layer}" for layer in range(shape.layers) if shape.sparse(layer)]
    counts = torch.zeros(
        len(names), shape.experts.count + 1, dtype=torch.float64, device=mesh.device
    )
    if mesh.index_of("tp") == 0:  # all tp ranks have counted the same
        for row, name in zip(counts, names, strict=True):
            if name in placed.executor.loads:
                row.copy_(placed.executor.loads[name])
    if mesh.world.size > 1:
        with mesh.waited:
            mesh.world.all_reduce(counts.view(-1))
    return dict(zip(names, counts, strict=True))


class RoutedTokens:
    """Adds up how many tokens each expert had since the last checkpoint, which `before` is of."""

    def __init__(self, before: Routed) -> None:
        self._before, self._steps = before, 0
        self._sums: dict[str, list[int]] = {}

    def add(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Adds those of a step: of each block, and last how many were dropped."""
        self._steps += 1
        for name, (*tokens, _) in counts.items():
            sums = self._sums.setdefault(name, [0] * len(tokens))
            self._sums[name] = [a + b for a, b in zip(sums, tokens, strict=True)]

    def take(self) -> Routed:
        """The counts since it was asked last; where there are none, what it said then."""
        if self._sums:
            tokens = tuple(map(tuple, self._sums.values()))
            self._before = Routed(tuple(self._sums), tokens, self._steps)
            self._sums, self._steps = {}, 0
        return self._before


def told(
    routed: Routed, ranks: int, after: Orders, *, before: Orders | None = None, sent: int = 0
) -> str:
    """A line about the places of experts on the ranks of ep: how busy the busiest is by load, would
    be by number, and was `before`.

    sent  bytes that a rank has sent to bring experts there
    """
    tokens = routed.by_block
    usual, will = (mean_busiest(tokens, by, ranks) for by in (BY_NUMBER, after))
    had = "" if before is None else f"; it had {mean_busiest(tokens, before, ranks):.2f}"
    moved = f"; {spell(sent, 'bytes')} moved" if sent else ""
    return (
        f"experts     placed by the load of {routed.steps} steps: the busiest rank of ep{ranks} "
        f"has {will:.2f} of the mean, by number {usual:.2f}{had}{moved}"
    )


def move_biases(
    units: Iterable[FlatUnit], counts: Mapping[str, Tensor], *, rate: float | Tensor
) -> None:
    """Moves this rank's ranges of the biases of routers by `rate`; those that are frozen stay."""
    for unit in (one for one in units if one.buffer.trains) if counts else ():
        for segment in unit.buffer.segments:
            block, _, weight = segment.name.partition(f".{ROUTER_BIAS}")
            first, last = max(segment.start, unit.start), min(segment.stop, unit.stop)
            if weight or first >= last or block not in counts:
                continue
            tokens = counts[block][:-1]
            step = (tokens.mean() - tokens).sign() * rate
            mine = unit.masters[first - unit.start : last - unit.start]
            mine.add_(step[first - segment.start : last - segment.start].to(mine))
