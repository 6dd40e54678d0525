"""Data parallelism: all ranks have equal weights, and gradients are summed once per step.

The idea (Goyal et al. 2017; Li et al. 2020, https://arxiv.org/abs/2006.15704): every rank computes
on its own rows of the global batch, and gradients, which are sums over tokens, are summed over the
ranks. The loss was divided by the *global* token count before backward, so nothing is divided here.

    backward   head ── layers.5 ── layers.4 ── ... ── embedding ─┐
    progress        [  bucket 0  ][  bucket 1  ] ... [ bucket n ]┴─ finish

Phases of a step:
  1. All micro-batches but the last only add to the flat gradients.
  2. `arm` is called before the last backward. From then on, parameters that got their gradient are
     counted.
  3. When a bucket has all of its gradients, its all-reduce starts on the progress thread. Buckets
     start in one fixed order, so that all ranks agree on it.
  4. `finish` starts the buckets that backward did not reach, and waits for all of them.

Under ZeRO-1, only the first half of the all-reduce is done here, the reduce-scatter; `zero.py` has
the rest. Where several groups each shard a copy of the states, a rank's share is then summed over
the ranks with the same share in other groups (hybrid shards, Zhao et al. 2023,
https://arxiv.org/abs/2304.11277).
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from torch import Tensor, nn

from howdah.comm.group import Group
from howdah.parallel.flat_params import FlatUnit
from howdah.plan.buckets import fill_buckets
from howdah.plan.flat_buffers import Buffer


@dataclass(frozen=True)
class Replicas:
    """The ranks over which gradients are summed: `shard` within one copy of the states, then
    `across` the copies.
    """

    shard: Group
    across: Group

    @property
    def alone(self) -> bool:
        """Whether there is only one replica, so that there is nothing to sum."""
        return self.shard.size == self.across.size == 1

    def sum_share(self, flats: list[Tensor]) -> Future[None]:
        """Starts to replace this rank's shares of `flats` by those of the sum over the replicas."""
        inside = self.shard.reduce_scatter(flats, async_op=True)
        if self.across.size == 1:
            return inside
        owns = [self.shard.own_shard(flat) for flat in flats]
        return self.across.all_reduce(owns, async_op=True, after=inside)

    def sum_whole(self, flats: list[Tensor]) -> Future[None]:
        """Starts to replace `flats` by the sum over the replicas."""
        return self.shard.all_reduce(flats, async_op=True)


class Reducer:
    """Sums the whole gradients of flat units over the replicas while backward still runs.

    scatter       whether only this rank's share of the sum is needed (ZeRO-1)
    bucket_bytes  least size of a bucket; None: the default
    """

    def __init__(
        self,
        units: dict[str, FlatUnit],
        replicas: Replicas,
        *,
        scatter: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        assert scatter or replicas.across.size == 1, "without shares there is one group"
        self._reduce = replicas.sum_share if scatter else replicas.sum_whole
        self.buckets = buckets_of(units, bucket_bytes)
        self._flats = [[whole_gradient(units[b.unit]) for b in bucket] for bucket in self.buckets]
        self._of = {s.name: i for i, b in enumerate(self.buckets) for u in b for s in u.segments}
        self._views = whole_gradients(units)
        self._missing: list[int] = []
        self._started: list[Future[None]] = []
        self.exposed = 0.0  # seconds that `finish` has waited, over the whole run

    def arm(self) -> None:
        """Announces the last backward of the step: from now on, buckets are reduced once they are
        ready.
        """
        self._missing = [sum(len(u.segments) for u in bucket) for bucket in self.buckets]
        self._started = []

    def target(self, name: str) -> Tensor:
        """The tensor to which the gradient of `name` is added."""
        return self._views[name]

    def take(self, name: str, parameter: Tensor) -> None:
        """Called after backward has added to `parameter.grad`, which is a view of the flat
        gradient.
        """
        self.ready(name)

    def ready(self, name: str) -> None:
        """Called when the gradient of `name` is complete for this micro-batch."""
        if self._missing:
            self._missing[self._of[name]] -= 1
            self._start(whole=False)

    def finish(self) -> None:
        """Waits until all gradients are summed."""
        self._start(whole=True)
        self._missing = []
        began = perf_counter()
        for future in self._started:
            future.result()
        self.exposed += perf_counter() - began

    def _start(self, *, whole: bool) -> None:
        while len(self._started) < len(self.buckets):
            if not whole and self._missing[len(self._started)]:
                return
            self._started.append(self._reduce(self._flats[len(self._started)]))


def buckets_of(units: dict[str, FlatUnit], least_bytes: int | None = None) -> list[list[Buffer]]:
    """The units in buckets, in the order in which backward finishes them."""
    element_bytes = next(iter(units.values())).summed.element_size()
    buffers = [unit.buffer for unit in units.values()]
    return fill_buckets(buffers, element_bytes=element_bytes, least_bytes=least_bytes)


def whole_gradient(unit: FlatUnit) -> Tensor:
    """The flat gradient to which backward adds; the unit must keep it whole."""
    assert unit.gradients is not None, "only shares of gradients are kept"
    return unit.gradients


def whole_gradients(units: dict[str, FlatUnit]) -> dict[str, Tensor]:
    """Views of the gradients, by name, of units that keep them whole."""
    views: dict[str, Tensor] = {}
    for unit in units.values():
        views |= unit.views(whole_gradient(unit))
    return views


def listen_to_parameters(model: nn.Module, reducer: "TakesGradients") -> None:
    """Makes every parameter of `model` notify the reducer when backward has added its gradient."""
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(_tell(reducer, name))


class TakesGradients(Protocol):
    """A reducer, as the hook of a parameter sees it."""

    def take(self, name: str, parameter: Tensor) -> None:
        """Called when the gradient of `parameter` is complete for this micro-batch."""
        ...


def _tell(reducer: TakesGradients, name: str) -> Callable[[Tensor], None]:
    def gradient_is_ready(parameter: Tensor) -> None:
        reducer.take(name, parameter)

    return gradient_is_ready
