"""ZeRO 1 and 2: what every replica would hold alike is shared out (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054).

    zero1   each rank updates its own range of every unit; masters and moments of that range alone
    zero2   of gradients, too, only the own range is kept between micro-batches

    backward  head ── layers.5 ── …         reduce-scatter of gradients, unit by unit
    update    own range of every unit
    forward         embedding ── layers.0 ── …       all-gather of weights, unit by unit: the
              gather [emb][layers.0][layers.1] …     next forward waits for a unit when it needs it

The bytes are those of plain data parallelism, an all-reduce cut in its two halves, for once per
step: with shares that add up (`accumulate=shard`) the first half is paid for each micro-batch.

`shardG` shares out inside groups of G ranks, each with a copy of everything: weights are gathered
inside a group, where the wires may be faster, and shares of gradients are summed across groups.
"""

from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor, nn

from howdah.comm.group import Group
from howdah.parallel.data import BUCKET_BYTES, Replicas, buckets_of
from howdah.parallel.flatten import FlatUnit

IN_FLIGHT = 2  # buckets of whole gradients at one time: one fills up while one is reduced


class _Started(NamedTuple):
    """A bucket that is being reduced; `last` of the step's micro-batches."""

    units: list[FlatUnit]
    flats: list[Tensor]
    future: Future[None]
    last: bool


class ShareReducer:
    """Keeps the own share of gradients alone: every micro-batch is reduced as it comes.

    1. Backward gives a parameter a fresh gradient. It is moved into the whole buffer of its unit,
       which exists from its first gradient on.
    2. When all gradients of a bucket are there, its reduce-scatter starts.
    3. When that is done, the own range is added to the unit's sum and the buffers are let go.
    4. Where others hold copies of the share, the sums of the last micro-batch are summed with them.
    """

    def __init__(
        self, units: dict[str, FlatUnit], replicas: Replicas, *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._units, self._replicas = units, replicas
        self.buckets = buckets_of(units, bucket_bytes)
        self._of = {s.name: i for i, b in enumerate(self.buckets) for u in b for s in u.segments}
        self._unit_of = {s.name: u for u, unit in units.items() for s in unit.buffer.segments}
        self._whole: dict[str, Tensor] = {}
        self._views: dict[str, dict[str, Tensor]] = {}
        self._spare: dict[int, list[Tensor]] = {}  # buffers of each length, to be used again
        self._missing = self._counts()
        self._begun = 0
        self._last = False
        self._started: list[_Started] = []
        self._across: list[Future[None]] = []
        self.exposed = 0.0  # seconds that this rank has waited, over the whole run

    def arm(self) -> None:
        """The next backward is the step's last."""
        self._last = True

    def target(self, name: str) -> Tensor:
        """Where the gradient of `name` is added: a view of zeros, until it is ready."""
        unit = self._unit_of[name]
        if unit not in self._views:
            flat = self._buffer(unit)
            self._views[unit] = self._units[unit].views(flat)
        return self._views[unit][name]

    def take(self, name: str, parameter: Tensor) -> None:
        """Backward has given the parameter a gradient: moves it."""
        assert parameter.grad is not None
        self.target(name).copy_(parameter.grad)
        parameter.grad = None
        self.ready(name)

    def ready(self, name: str) -> None:
        """The gradient of `name` is where it belongs."""
        self._missing[self._of[name]] -= 1
        self._start(whole=False)

    def finish(self) -> None:
        """The micro-batch has ended. After the last, the sums are whole when this returns; after
        another, the next forward may begin while the last reduction still runs.
        """
        self._start(whole=True)
        self._missing, self._begun = self._counts(), 0
        if not self._last:
            return
        while self._started:
            self._land()
        began = perf_counter()
        for future in self._across:
            future.result()
        self.exposed += perf_counter() - began
        self._last, self._across = False, []

    def _counts(self) -> list[int]:
        return [sum(len(buffer.segments) for buffer in bucket) for bucket in self.buckets]

    def _buffer(self, unit: str) -> Tensor:
        if unit not in self._whole:
            length = self._units[unit].buffer.length
            if spare := self._spare.get(length):
                self._whole[unit] = spare.pop().zero_()
            else:
                self._whole[unit] = self._units[unit].summed.new_zeros(length)
        return self._whole[unit]

    def _start(self, *, whole: bool) -> None:
        while self._begun < len(self.buckets):
            if not whole and self._missing[self._begun]:
                return
            while len(self._started) >= IN_FLIGHT - 1:
                self._land()
            units = [self._units[buffer.unit] for buffer in self.buckets[self._begun]]
            flats = [self._buffer(unit.buffer.unit) for unit in units]
            future = self._replicas.shard.reduce_scatter(flats, async_op=True)
            self._started.append(_Started(units, flats, future, last=self._last))
            self._begun += 1
            for unit in units:  # the next micro-batch has buffers of its own
                self._whole.pop(unit.buffer.unit)
                self._views.pop(unit.buffer.unit, None)

    def _land(self) -> None:
        """Waits for the oldest reduction, and adds what it brought."""
        done = self._started.pop(0)
        began = perf_counter()
        done.future.result()
        self.exposed += perf_counter() - began
        for unit, flat in zip(done.units, done.flats, strict=True):
            unit.summed.add_(flat[unit.start : unit.stop])
            self._spare.setdefault(len(flat), []).append(flat)
        if done.last and self._replicas.across.size > 1:
            sums = [unit.summed for unit in done.units]
            self._across.append(self._replicas.across.all_reduce(sums, async_op=True))


class Gatherer:
    """Brings every rank's updated range to all, while the next forward already begins.

    The gathers start with the forward pass that needs them, not with the update: the small
    operations between the two (the count of the next step's tokens) go first.
    """

    def __init__(
        self, units: dict[str, FlatUnit], group: Group, *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._units, self._group = units, group
        backward = buckets_of(units, bucket_bytes)
        self._buckets = [[b.unit for b in reversed(bucket)] for bucket in reversed(backward)]
        self._stale = False
        self._coming: dict[str, Future[None]] = {}
        self.exposed = 0.0  # seconds that this rank has waited, over the whole run

    def updated(self) -> None:
        """The own ranges have changed."""
        self._stale = True

    def start(self) -> None:
        """Starts the all-gathers after an update, in forward order."""
        if not self._stale:
            return
        self._stale = False
        for bucket in self._buckets:
            weights = [self._units[unit].weights for unit in bucket]
            future = self._group.all_gather(weights, async_op=True)
            self._coming.update(dict.fromkeys(bucket, future))

    def wait(self, *units: str) -> None:
        """The weights of `units` are those of the last update when this returns; of all units
        when none is named.
        """
        self.start()
        began = perf_counter()
        for unit in units or tuple(self._coming):
            if future := self._coming.pop(unit, None):
                future.result()
        self.exposed += perf_counter() - began


def gather_weights(model: nn.Module, units: dict[str, FlatUnit], group: Group) -> Gatherer:
    """Makes the forward pass of `model` wait for each unit's weights before it uses them.

    What is embedded is waited for at the start, each block's before it, the head's behind the
    last.
    """
    gatherer = Gatherer(units, group)
    blocks = {unit: model.get_submodule(unit) for unit in units if unit.startswith("layers.")}
    first = [unit for unit in units if unit in ("embedding", "tied")]
    last = [unit for unit in units if unit not in blocks and unit not in first]
    model.register_forward_pre_hook(lambda *_: gatherer.wait(*first))
    for unit, block in blocks.items():
        block.register_forward_pre_hook(_await(gatherer, unit))
    for block in list(blocks.values())[-1:]:  # a pipeline's rank may have none
        block.register_forward_hook(lambda *_: gatherer.wait(*last) if last else None)
    return gatherer


def _await(gatherer: Gatherer, unit: str) -> Callable[[nn.Module, Any], None]:
    def weights_are_needed(_: nn.Module, __: Any) -> None:
        gatherer.wait(unit)

    return weights_are_needed
