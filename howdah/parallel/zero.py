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
"""

from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from howdah.comm.group import Group
from howdah.parallel.data import BUCKET_BYTES, buckets_of
from howdah.parallel.flatten import FlatUnit

IN_FLIGHT = 2  # buckets of whole gradients at one time: one fills up while one is reduced


class ShareReducer:
    """Keeps the own share of gradients alone: every micro-batch is reduced as it comes.

    1. Backward gives a parameter a fresh gradient. It is moved into the whole buffer of its unit,
       which exists from its first gradient on.
    2. When all gradients of a bucket are there, its reduce-scatter starts.
    3. When that is done, the own range is added to the unit's sum and the buffers are let go.
    """

    def __init__(
        self, units: dict[str, FlatUnit], group: Group, *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._units, self._group = units, group
        self.buckets = buckets_of(units, bucket_bytes)
        self._of = {s.name: i for i, b in enumerate(self.buckets) for u in b for s in u.segments}
        self._unit_of = {s.name: u for u, unit in units.items() for s in unit.buffer.segments}
        self._whole: dict[str, Tensor] = {}
        self._missing = self._counts()
        self._begun = 0
        self._started: list[tuple[int, Future[None]]] = []
        self.exposed = 0.0  # seconds that this rank has waited, over the whole run

    def arm(self) -> None:
        """Nothing: every backward is reduced."""

    def ready(self, name: str, parameter: Tensor) -> None:
        """The gradient of `name` has come: takes it."""
        assert parameter.grad is not None
        unit = self._unit_of[name]
        segment = next(s for s in self._units[unit].buffer.segments if s.name == name)
        self._buffer(unit)[segment.start : segment.stop].copy_(parameter.grad.reshape(-1))
        parameter.grad = None
        self._missing[self._of[name]] -= 1
        self._start(whole=False)

    def finish(self) -> None:
        """Waits until the micro-batch's gradients are in the sums."""
        self._start(whole=True)
        while self._started:
            self._land()
        self._missing, self._begun = self._counts(), 0

    def _counts(self) -> list[int]:
        return [sum(len(buffer.segments) for buffer in bucket) for bucket in self.buckets]

    def _buffer(self, unit: str) -> Tensor:
        if unit not in self._whole:
            length = self._units[unit].buffer.length
            self._whole[unit] = self._units[unit].summed.new_zeros(length)
        return self._whole[unit]

    def _start(self, *, whole: bool) -> None:
        while self._begun < len(self.buckets):
            if not whole and self._missing[self._begun]:
                return
            while len(self._started) >= IN_FLIGHT - 1:
                self._land()
            flats = [self._buffer(buffer.unit) for buffer in self.buckets[self._begun]]
            self._started.append((self._begun, self._group.reduce_scatter_async(flats)))
            self._begun += 1

    def _land(self) -> None:
        """Waits for the oldest reduction, and adds what it brought."""
        bucket, future = self._started.pop(0)
        began = perf_counter()
        future.result()
        self.exposed += perf_counter() - began
        for buffer in self.buckets[bucket]:
            unit = self._units[buffer.unit]
            unit.summed.add_(self._whole.pop(buffer.unit)[unit.start : unit.stop])


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
            future = self._group.all_gather_async([self._units[unit].weights for unit in bucket])
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


def reduce_shares(model: nn.Module, units: dict[str, FlatUnit], group: Group) -> ShareReducer:
    """Makes backward hand its gradients over, parameter by parameter."""
    reducer = ShareReducer(units, group)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(_hand_over(reducer, name))
    return reducer


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
    block.register_forward_hook(lambda *_: gatherer.wait(*last) if last else None)
    return gatherer


def _hand_over(reducer: ShareReducer, name: str) -> Callable[[Tensor], None]:
    def gradient_is_ready(parameter: Tensor) -> None:
        reducer.ready(name, parameter)

    return gradient_is_ready


def _await(gatherer: Gatherer, unit: str) -> Callable[[nn.Module, Any], None]:
    def weights_are_needed(_: nn.Module, __: Any) -> None:
        gatherer.wait(unit)

    return weights_are_needed
