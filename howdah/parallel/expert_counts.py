"""How many tokens each expert had in a step, over all ranks; and the biases of routers that follow.

The rule of https://arxiv.org/abs/2408.15664: an expert that had fewer tokens than the mean gets a
bias that is larger by `rate`, one that had more a smaller one. Counts are whole numbers in float64,
so their sum does not depend on the layout, and neither does a bias.

A bias is a weight like others, so that it has a place in flat units and checkpoints; its gradient
is zero and it does not decay, so no optimizer moves it.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from howdah.parallel.apply import ParallelModel
from howdah.parallel.flat_params import FlatUnit
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
            mine.add_(step[first - segment.start : last - segment.start].to(mine.dtype))
