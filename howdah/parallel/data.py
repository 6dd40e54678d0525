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
"""

from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter

from torch import Tensor, nn

from howdah.comm.buckets import fill_buckets
from howdah.comm.group import Group
from howdah.parallel.flatten import FlatUnit
from howdah.plan.flat import Buffer

BUCKET_BYTES = 4 << 20


class Reducer:
    """Sums the whole gradients of flat units over a group while backward still runs.

    scatter  only the own share of the sum is wanted (ZeRO-1)
    """

    def __init__(
        self,
        units: dict[str, FlatUnit],
        group: Group,
        *,
        scatter: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._reduce = group.reduce_scatter_async if scatter else group.all_reduce_async
        self.buckets = buckets_of(units, bucket_bytes)
        self._flats = [[whole_gradient(units[b.unit]) for b in bucket] for bucket in self.buckets]
        self._of = {s.name: i for i, b in enumerate(self.buckets) for u in b for s in u.segments}
        self._missing: list[int] = []
        self._started: list[Future[None]] = []
        self.exposed = 0.0  # seconds that `finish` has waited, over the whole run

    def arm(self) -> None:
        """The next backward is the step's last: reduce buckets as they become ready."""
        self._missing = [sum(len(u.segments) for u in bucket) for bucket in self.buckets]
        self._started = []

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


def buckets_of(units: dict[str, FlatUnit], bucket_bytes: int) -> list[list[Buffer]]:
    """The units in buckets, in the order in which backward finishes them."""
    element_bytes = next(iter(units.values())).summed.element_size()
    buffers = [unit.buffer for unit in units.values()]
    return fill_buckets(buffers, element_bytes=element_bytes, least_bytes=bucket_bytes)


def whole_gradient(unit: FlatUnit) -> Tensor:
    """The gradients that backward adds to; the unit must keep them whole."""
    assert unit.gradients is not None, "only shares of gradients are kept"
    return unit.gradients


def replicate(
    model: nn.Module,
    units: dict[str, FlatUnit],
    group: Group,
    *,
    scatter: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> Reducer | None:
    """Makes `model` one of `group.size` replicas; None when it is the only one."""
    if group.size == 1:
        return None
    reducer = Reducer(units, group, scatter=scatter, bucket_bytes=bucket_bytes)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(_tell(reducer, name))
    return reducer


def _tell(reducer: Reducer, name: str) -> Callable[[Tensor], None]:
    def gradient_is_ready(_: Tensor) -> None:
        reducer.ready(name)

    return gradient_is_ready
