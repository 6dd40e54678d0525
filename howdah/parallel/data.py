"""Data parallelism: equal weights on every rank, gradients summed once per step.

The idea (Goyal et al. 2017; Li et al. 2020, https://arxiv.org/abs/2006.15704): every rank runs
its own part of the global batch, and gradients, which are sums over tokens, are summed over the
ranks. The loss was divided by the *global* token count before backward, so nothing is divided
here.

    backward   head ── layers.5 ── layers.4 ── ... ── embedding ─┐
    progress        [  bucket 0  ][  bucket 1  ] ... [ bucket n ]┴─ finish

Phases of a step:
  1. The micro-batches but the last only add to the flat gradients.
  2. `arm` before the last backward: from now on, a parameter that got its gradient is counted.
  3. When a bucket has all of its gradients, its all-reduce starts on the progress thread. Buckets
     start in one fixed order, so that all ranks agree on it.
  4. `finish` starts what backward never reached and waits for everything.

Under ZeRO-1 the all-reduce is its first half alone, the reduce-scatter; `zero.py` has the rest.
Where several groups each share out a copy of the states, a rank's share is then summed over those
who hold the same one (hybrid shards, Zhao et al. 2023, https://arxiv.org/abs/2304.11277).
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
    """The ranks over which gradients are summed: `shard` in one copy, then `across` copies."""

    shard: Group
    across: Group

    @property
    def alone(self) -> bool:
        """Whether there is nobody to sum with."""
        return self.shard.size == self.across.size == 1

    def sum_share(self, flats: list[Tensor]) -> Future[None]:
        """Starts to make the own shares of `flats` those of the sum."""
        inside = self.shard.reduce_scatter(flats, async_op=True)
        if self.across.size == 1:
            return inside
        owns = [self.shard.own_shard(flat) for flat in flats]
        return self.across.all_reduce(owns, async_op=True, after=inside)

    def sum_whole(self, flats: list[Tensor]) -> Future[None]:
        """Starts to make `flats` the sum."""
        return self.shard.all_reduce(flats, async_op=True)


class Reducer:
    """Sums the whole gradients of flat units over the replicas while backward still runs.

    scatter  only the own share of the sum is wanted (ZeRO-1)
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
        """The next backward is the step's last: reduce buckets as they become ready."""
        self._missing = [sum(len(u.segments) for u in bucket) for bucket in self.buckets]
        self._started = []

    def target(self, name: str) -> Tensor:
        """Where the gradient of `name` is added."""
        return self._views[name]

    def take(self, name: str, parameter: Tensor) -> None:
        """Backward has added to the parameter's gradient, which lies where it belongs."""
        self.ready(name)

    def ready(self, name: str) -> None:
        """The gradient of `name` is complete for this micro-batch."""
        if self._missing:
            self._missing[self._of[name]] -= 1
            self._start(whole=False)

    def finish(self) -> None:
        """All gradients are summed when this returns."""
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
    """The gradients that backward adds to; the unit must keep them whole."""
    assert unit.gradients is not None, "only shares of gradients are kept"
    return unit.gradients


def whole_gradients(units: dict[str, FlatUnit]) -> dict[str, Tensor]:
    """The views, by name, of the gradients that units keep whole."""
    views: dict[str, Tensor] = {}
    for unit in units.values():
        views |= unit.views(whole_gradient(unit))
    return views


def listen_to_parameters(model: nn.Module, reducer: "TakesGradients") -> None:
    """Makes every backward through the parameters of `model` tell the reducer."""
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(_tell(reducer, name))


class TakesGradients(Protocol):
    """A reducer, as a parameter's hook sees it."""

    def take(self, name: str, parameter: Tensor) -> None:
        """The gradient of `parameter` is complete for this micro-batch."""
        ...


def _tell(reducer: TakesGradients, name: str) -> Callable[[Tensor], None]:
    def gradient_is_ready(parameter: Tensor) -> None:
        reducer.take(name, parameter)

    return gradient_is_ready
