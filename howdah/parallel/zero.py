"""ZeRO 1 and 2: states that would be equal on every replica are sharded (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054).

    zero1   each rank updates its own range of every unit; it has masters and moments of that range
    zero2   of the gradients, too, only the own range is kept between micro-batches

    backward  head ── layers.5 ── …         reduce-scatter of gradients, unit by unit
    update    own range of every unit
    forward         embedding ── layers.0 ── …       all-gather of weights, unit by unit: the
              gather [emb][layers.0][layers.1] …     next forward waits for a unit when it needs it

With one reduction per step, the bytes are those of plain data parallelism: the two halves of its
all-reduce. When shares are accumulated (`accumulate=shard`), every micro-batch pays the first half.

`shardG` shards within groups of G ranks, each with a copy of everything: weights are gathered
inside a group, where the links may be faster, and shares of gradients are summed across groups.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from howdah.comm.group import Group
from howdah.parallel.data import Replicas, buckets_of
from howdah.parallel.flat_params import FlatUnit
from howdah.plan.buckets import window_of
from howdah.plan.flat_buffers import gaps
from howdah.plan.plan import Plan
from howdah.shapes.part import Part


class Window:
    """Memory for whole gradients before they are reduced to shares: slots for buckets, used in turn
    by all reducers of a rank. `plan/buckets.py` computes how many slots are enough.

    memory  one tensor with all slots
    grown   number of slots that had to be added; 0 if the plan was right
    """

    def __init__(self, plan: Plan, rank: int, like: Tensor) -> None:
        slots, self.length = window_of(plan, rank)
        self.memory = like.new_empty(slots * self.length)
        self.grown = 0
        self._free = list(self.memory.split(self.length))
        self._flying: list[_Flying] = []

    def take(self) -> Tensor:
        """A free slot. If there is none, waits for the oldest reduction, which frees its slot."""
        while not self._free and self._flying:
            self._flying[0].land()
        if self._free:
            return self._free.pop()
        self.grown += 1
        return self.memory.new_empty(self.length)

    def fly(self, flying: "_Flying") -> None:
        """Records that the bucket in this slot is being reduced."""
        self._flying.append(flying)

    def give(self, flying: "_Flying") -> None:
        """Makes the slot of a finished reduction free again."""
        self._flying.remove(flying)
        self._free.append(flying.slot)


@dataclass(eq=False)
class _Flying:
    """A bucket that is being reduced; `last` if it is of the last micro-batch of the step."""

    units: list[FlatUnit]
    slot: Tensor
    flats: list[Tensor]
    future: Future[None]
    last: bool
    landing: Callable[["_Flying"], None]

    def land(self) -> None:
        """Waits until the bucket is reduced, and adds this rank's share to the sum."""
        self.landing(self)


class ShareReducer:
    """Keeps only this rank's share of gradients: every micro-batch is reduced on its own.

    1. Backward gives a parameter a new gradient. It is moved into the window, in which its bucket
       has a slot from its first gradient on.
    2. When all gradients of a bucket are there, its reduce-scatter starts.
    3. When that is done, the own range is added to the unit's sum, and the slot is free again.
    4. Where other ranks hold copies of the share, the sums after the last micro-batch are
       all-reduced with them.
    """

    def __init__(
        self,
        units: dict[str, FlatUnit],
        replicas: Replicas,
        window: Window,
    ) -> None:
        self._units, self._replicas, self._window = units, replicas, window
        self.buckets = buckets_of(units)
        self._of = {s.name: i for i, b in enumerate(self.buckets) for u in b for s in u.segments}
        self._open: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by bucket: slot, its units
        self._views: dict[int, dict[str, Tensor]] = {}
        self._left: dict[int, set[str]] = {}  # by bucket: names without a gradient yet
        self._missing = self._counts()
        self._begun = 0
        self._last = False
        self._flying: list[_Flying] = []
        self._across: list[Future[None]] = []
        self.exposed = 0.0  # seconds that this rank has waited, over the whole run

    def arm(self) -> None:
        """Announces the last backward of the step."""
        self._last = True

    def target(self, name: str) -> Tensor:
        """The tensor to which the gradient of `name` is added, zeros at first; valid until
        `ready`.
        """
        bucket = self._of[name]
        if bucket not in self._open:
            self._fill(bucket, zeros=True)
        return self._views[bucket][name]

    def take(self, name: str, parameter: Tensor) -> None:
        """Moves the gradient that backward has given the parameter into the window."""
        assert parameter.grad is not None
        bucket = self._of[name]
        if bucket not in self._open:
            self._fill(bucket, zeros=False)
        self._views[bucket][name].copy_(parameter.grad)
        self._left[bucket].discard(name)
        parameter.grad = None
        self.ready(name)

    def ready(self, name: str) -> None:
        """Called when the gradient of `name` is in the window."""
        self._missing[self._of[name]] -= 1
        self._start(whole=False)

    def finish(self) -> None:
        """Ends a micro-batch. After the last one, the sums are complete when this returns; after
        others, the next forward may begin while the last reduction still runs.
        """
        self._start(whole=True)
        self._missing, self._begun = self._counts(), 0
        if not self._last:
            return
        while self._flying:
            self._flying[0].land()
        began = perf_counter()
        for future in self._across:
            future.result()
        self.exposed += perf_counter() - began
        self._last, self._across = False, []

    def _counts(self) -> list[int]:
        return [sum(len(buffer.segments) for buffer in bucket) for bucket in self.buckets]

    def _fill(self, bucket: int, *, zeros: bool) -> None:
        """Opens a slot for a bucket, and fills it with zeros: all of it, or only where no gradient
        will be written.
        """
        units = [self._units[buffer.unit] for buffer in self.buckets[bucket]]
        lengths = [unit.buffer.length for unit in units]
        slot = self._window.take()
        flats = list(slot[: sum(lengths)].split(lengths))
        self._open[bucket] = slot, flats
        self._views[bucket] = {}
        for unit, flat in zip(units, flats, strict=True):
            self._views[bucket] |= unit.views(flat)
            for start, stop in [(0, len(flat))] if zeros else gaps(unit.buffer):
                flat[start:stop].zero_()
        self._left[bucket] = set() if zeros else set(self._views[bucket])

    def _start(self, *, whole: bool) -> None:
        while self._begun < len(self.buckets):
            if not whole and self._missing[self._begun]:
                return
            if self._begun not in self._open:  # backward did not reach this bucket
                self._fill(self._begun, zeros=True)
            for name in self._left.pop(self._begun):
                self._views[self._begun][name].zero_()
            units = [self._units[buffer.unit] for buffer in self.buckets[self._begun]]
            slot, flats = self._open.pop(self._begun)  # the next micro-batch takes another slot
            self._views.pop(self._begun)
            future = self._replicas.shard.reduce_scatter(flats, async_op=True)
            flying = _Flying(units, slot, flats, future, self._last, self._land)
            self._flying.append(flying)
            self._window.fly(flying)
            self._begun += 1

    def _land(self, done: _Flying) -> None:
        """Waits for a reduction, and adds its result to the units' sums."""
        began = perf_counter()
        done.future.result()
        self.exposed += perf_counter() - began
        for unit, flat in zip(done.units, done.flats, strict=True):
            unit.summed.add_(flat[unit.start : unit.stop])
        self._flying.remove(done)
        self._window.give(done)
        if done.last and self._replicas.across.size > 1:
            sums = [unit.summed for unit in done.units]
            self._across.append(self._replicas.across.all_reduce(sums, async_op=True))


class UpdatedWeights:
    """Brings every rank's updated range to all ranks, while the next forward already runs.

    The all-gathers start with the forward pass that needs them, not with the update. So the small
    operations between the two (the count of the next step's tokens) go first.
    """

    def __init__(self, units: dict[str, FlatUnit], group: Group) -> None:
        self._units, self._group = units, group
        backward = buckets_of(units)
        self._buckets = [[b.unit for b in reversed(bucket)] for bucket in reversed(backward)]
        self._stale = False
        self._coming: dict[str, Future[None]] = {}
        self.exposed = 0.0  # seconds that this rank has waited, over the whole run

    def updated(self) -> None:
        """Records that the ranks' own ranges have changed."""
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
        """Waits until the weights of `units` are those of the last update; of all units when none
        is named.
        """
        self.start()
        began = perf_counter()
        for unit in units or tuple(self._coming):
            if future := self._coming.pop(unit, None):
                future.result()
        self.exposed += perf_counter() - began


def gather_weights(model: nn.Module, units: dict[str, FlatUnit], group: Group) -> UpdatedWeights:
    """Makes the forward pass of `model` wait for each unit's weights before it uses them.

    It waits for the weights of the embedding at its start, for those of each block before the
    block, and for those of the head after the last block.
    """
    gatherer = UpdatedWeights(units, group)
    blocks = {unit: model.get_submodule(unit) for unit in units if Part(unit).is_block}
    first = [unit for unit in units if unit in ("embedding", "tied")]
    last = [unit for unit in units if unit not in blocks and unit not in first]
    model.register_forward_pre_hook(lambda *_: gatherer.wait(*first))
    for unit, block in blocks.items():
        block.register_forward_pre_hook(_await(gatherer, unit))
    for block in list(blocks.values())[-1:]:  # a pipeline rank may have no block
        block.register_forward_hook(lambda *_: gatherer.wait(*last) if last else None)
    return gatherer


def _await(gatherer: UpdatedWeights, unit: str) -> Callable[[nn.Module, Any], None]:
    def weights_are_needed(_: nn.Module, __: Any) -> None:
        gatherer.wait(unit)

    return weights_are_needed
