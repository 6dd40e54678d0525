"""The average of the weights in their place, for as long as it is evaluated.

Masters and averages change places, range by range, and back: the bits are those of before. What
other ranks need of the weights is gathered again; none of it is counted as part of a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from howdah.parallel.apply import ParallelModel
from howdah.parallel.flat_params import publish
from howdah.plan.method import AVERAGE


@contextmanager
def averaged(placed: ParallelModel) -> Iterator[None]:
    """Inside the block, the weights are the averages. All ranks call together."""
    placed.sync_weights()
    with placed.mesh.counters.aside():
        _exchange(placed)
        try:
            yield
        finally:
            _exchange(placed)
            placed.sync_weights()


@torch.no_grad()
def _exchange(placed: ParallelModel) -> None:
    if placed.homes and placed.update:
        _exchange_at_home(placed)
    else:
        for part in placed.ranges:
            if part.master.numel():
                average = placed.optimizer.state[part.master][AVERAGE]
                before = part.master.clone()
                part.master.copy_(average)
                average.copy_(before)
        publish(placed.units.values())
    if placed.gatherer:
        placed.gatherer.updated()


def _exchange_at_home(placed: ParallelModel) -> None:
    """Exchanges masters and averages where they are on the host or the disk."""
    homes = placed.homes
    assert homes is not None
    homes.settle()
    for unit in placed.units.values():
        if not len(unit.masters):
            continue
        masters = homes.own(unit, "masters", 0, None).clone()
        average = homes.own(unit, AVERAGE, 0, None).clone()
        homes.put(unit, "masters", average)
        homes.put(unit, AVERAGE, masters)
        if unit.apart:
            homes.put(unit, "weights", average.to(unit.weights.dtype))
