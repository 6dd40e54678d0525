"""When the host learns the numbers of a step: at once on the CPU, one step late on a GPU.

A GPU computes what the host has launched. A host that reads a number of a step waits until all of
that step has been computed; then the GPU has nothing to do until more is launched. So the numbers
travel to pinned memory behind the step, and are read when the next step has been launched:

    host   launch 1 | launch 2 | read 1 | launch 3 | read 2 | launch 4 ...
    GPU             step 1 ............. step 2 ............. step 3 ...

The host is at most two steps ahead of the GPU. Saves and evaluations come after all that is not yet
told (`Untold.settle`). On the CPU the same code runs with a delay of no steps.
"""

from collections import deque
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from howdah.comm.group import Group
from howdah.comm.lane import Streams

Check = Callable[[], None]


def steps_late(device: torch.device) -> int:
    """After how many more steps the numbers of a step are read."""
    return 0 if device.type == "cpu" else 1


def over_ranks(world: Group, values: Tensor) -> Tensor:
    """The sums of float64 `values` [n] over all ranks, added in rank order: equal bits on all
    ranks. They stay on their device.
    """
    if values.is_cpu:
        return torch.tensor(world.sum_scalars(values.tolist()), dtype=torch.float64)
    if world.size == 1:
        return values
    every = values.new_empty(world.size, len(values))
    world.gather_scalars(every, values, async_op=True).result()
    return reduce(torch.add, every.unbind())


class Told:
    """Numbers on their way from the device to the host."""

    def __init__(
        self, values: Tensor, ready: Any = None, keep: object = None, check: Check = lambda: None
    ) -> None:
        self._values, self._ready, self._keep, self._check = values, ready, keep, check

    def values(self) -> list[float]:
        """The numbers. Waits until the device has computed them. Raises PeerLost if a rank was lost
        meanwhile: then the device was stopped before it had computed them.
        """
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = self._keep = None
            self._check()
        values: list[float] = self._values.tolist()
        return values


def tell(values: Tensor, world: Group, *, streams: Streams | None, keep: object = None) -> Told:
    """Sends `values` [n] to the host, behind all that was computed so far; nobody waits.

    world    the group of all ranks, of which some may be lost while the host waits
    streams  of the device; None for the CPU
    keep     what must not be freed before the numbers are there: memory that another stream of the
             device filled, and would fill again
    """
    if streams is None:
        return Told(values)
    there = pinned_like(values)
    there.copy_(values, non_blocking=True)
    ready = streams.event()
    ready.record(streams.current())
    return Told(there, ready, keep, world.check)


def pinned_like(values: Tensor) -> Tensor:
    """Memory of the host for `values` that a GPU can write to by itself."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)


class Untold:
    """Steps that were launched and are not reported yet, the oldest first.

    late  how many of them there may be
    """

    def __init__(self, late: int) -> None:
        self._late = late
        self._reports: deque[Callable[[], None]] = deque()

    def add(self, report: Callable[[], None]) -> None:
        """Adds the newest step. `report` reads its numbers, and is called when they may be read."""
        self._reports.append(report)
        self._leave(self._late)

    def settle(self) -> None:
        """Reports all steps; waits for the device."""
        self._leave(0)

    def _leave(self, count: int) -> None:
        while len(self._reports) > count:
            self._reports.popleft()()
