"""Seconds of single operators: matrix products by shape, attention, passes over memory.

A product of m rows, inner size k and n columns takes 2·m·n·k operations. A device computes it in
tiles, a *wave* of them at a time, so with w = (tiles / processors):

    speed = best · (w / ⌈w⌉)^wave / (1 + m0/m + n0/n + k0/k)

Small sizes and a last wave that is not full lose speed. Widths that are no multiple of 64, 16 or 8
lose more. Products of experts have few rows for each weight: a part of what they read and write
adds to their time, with the weights' gradients, which are added to in 4 bytes. Flash attention runs
at its own speed, which is for heads of 128, times (1 + head/128) / (1 + head/d) for heads of d, and
computes 2.5 times as much backward (https://arxiv.org/abs/2307.08691). All else passes over memory.

The sizes m0, n0, k0 and the speeds are those of the kind of device (`sim/profile.py`), or of the
machine, if it was measured: then each of a product's three passes has its own.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from howdah.machines.cluster import Cluster, Device, peak
from howdah.plan.method import LOW, Method
from howdah.plan.plan import BYTES
from howdah.shapes.dims import RankSizes
from howdah.shapes.products import Operator, Pairs, Product, flops
from howdah.sim.profile import Curve, Profile, curve_of

BACKWARD = 2.5  # operations of flash attention's backward pass, for each of its forward pass
NAMES = {"mxfp8": "fp8", "nvfp4": "fp4"}  # whose rate a data sheet gives
USUAL = 128  # numbers of a head for which the speeds of attention are
ADDED = 8  # bytes that adding to an element of a gradient in float32 reads and writes


class Triple(NamedTuple):
    """Seconds of the forward pass, of the gradient of an input, and of a weight's."""

    forward: float
    input: float
    weight: float


class Speeds:
    """The speeds of one device under a profile.

    nominal   the cluster by its data sheets, `counted` with attained rates
    method    its precision
    """

    def __init__(
        self, nominal: Cluster, counted: Cluster, method: Method, profile: Profile
    ) -> None:
        device, curve = nominal.device, curve_of(nominal.device)
        self._curve, self._profile = curve, profile
        best = peak(counted.device, method.compute)
        nominal_peak = peak(device, method.compute)
        power = _power(curve, device.watts, nominal_peak)
        self._dense = min(best * curve.sustained * power, nominal_peak) * profile.matmul
        self._width = BYTES[method.compute] * nominal_peak / _sheet(device, method.precision)
        self._made = BYTES[method.compute]
        self._linear = self._dense
        self.low = method.precision in LOW
        if self.low:  # the sheet's rate; `counted` holds no measured one as a rule
            share = min((curve.low or best / nominal_peak) * power, 1.0)
            self._linear = _sheet(device, method.precision) * share * profile.matmul
        speed = nominal_peak * power * profile.attention
        speed *= curve.first if profile.flash == 1 else 1.0
        speed *= curve.older if profile.flash < 3 else 1.0
        self._attention = {
            back: speed * share or self._dense
            for back, share in ((False, curve.attention), (True, curve.backward))
        }
        self.cluster, self.bandwidth = counted, counted.device.bandwidth

    def product(
        self, m: int, k: int, n: int, *, count: int = 1, low: bool = False, odd: float = 1.0
    ) -> float:
        """Seconds of `count` products of m rows, inner size k and n columns.

        odd  what widths that are no multiples of 64 leave of the speed
        """
        if not m * k * n * count:
            return 0.0
        curve = self._curve
        lost = 1 + curve.m0 / m + curve.n0 / n + curve.k0 / k
        if curve.tile:
            waves = ceil(m / curve.rows) * ceil(n / curve.columns) * count / curve.tile
            lost /= (waves / ceil(waves)) ** curve.wave
        return 2.0 * m * k * n * count * lost / odd / (self._linear if low else self._dense)

    def attention(self, operations: float, head: int, *, back: bool) -> float:
        """Seconds of flash attention of heads of `head` numbers."""
        share = 1 + self._curve.head / head if head else 1.0
        return operations * share / (1 + self._curve.head / USUAL) / self._attention[back]

    def moved(self, m: int, k: int, n: int, *, weight: bool = False) -> float:
        """Seconds in which a product of an expert waits for memory.

        weight  whether it is added to a weight's gradient
        """
        size = self._width * (m * k + k * n) + (ADDED if weight else self._made) * m * n
        return self._curve.traffic * size / self.bandwidth

    def operator(self, one: Operator, of: RankSizes, *, spread: int = 1) -> Triple:
        """An operator of a micro-batch on the rank `of`.

        spread  ranks over which experts are spread
        """
        if isinstance(one, Pairs):
            return self._pairs(one, of)
        rows, inner = of.counts[one.per] * one.copies, of.size(one.inner)
        columns, count = of.size(one.columns), 1
        low = one.name != "head"
        if one.groups > 1:
            count = max(one.groups // spread, 1)
            rows = ceil(rows / count)
        if self._profile.products:
            work = 2.0 * rows * inner * columns * count
            of_each = (one.seconds(work, rows, inner, columns) for one in self._profile.products)
            return Triple(*of_each)
        # tokens lie one behind the other only in weight gradients, whose rows are padded if need be
        odd = self._aligned(inner) * self._aligned(columns)
        sizes = (rows, inner, columns), (rows, columns, inner), (columns, rows, inner)
        times = [self.product(*one, count=count, low=low, odd=odd) for one in sizes]
        if one.groups > 1:
            moved = (self.moved(*size, weight=size is sizes[-1]) for size in sizes)
            times = [time + count * more for time, more in zip(times, moved, strict=True)]
        return Triple(*times)

    def _aligned(self, size: int) -> float:
        """What is left of the speed where a size is no multiple of 64, 16 or 8."""
        steps = zip((64, 16, 8, 1), (1.0, *self._curve.odd), strict=True)
        return next(left for step, left in steps if not size % step)

    def quantised(self, listed: Sequence[Operator], of: RankSizes, width: int) -> float:
        """Seconds in which the inputs of linear layers are rounded to 8 bits and fewer."""
        if not self.low:
            return 0.0
        read = sum(
            of.counts[one.per] * one.copies * of.size(one.inner)
            for one in listed
            if isinstance(one, Product) and one.name != "head"
        )
        return self._profile.quantise * read * width / self.bandwidth

    def _pairs(self, one: Pairs, of: RankSizes) -> Triple:
        flash = self._profile.flash > 0
        work, head = flops(one, of, causal=flash), (one.key + one.value) // 2
        if self._profile.pairs:
            keys = of.counts[one.per] / max(of.counts["token"], 1)
            ahead, back = (
                one.seconds(work, keys, head, keys * head) for one in self._profile.pairs
            )
            return Triple(ahead, back, 0.0)
        if flash and self._curve.attention:
            forward = self.attention(work, head, back=False)
            return Triple(forward, self.attention(BACKWARD * work, head, back=True), 0.0)
        forward = work / self._dense
        if self._curve.m0:  # batched products of s × d × s
            forward *= 1 + self._curve.k0 / max(head, 1)
        return Triple(forward, 2 * forward, 0.0)


def _sheet(device: Device, precision: str) -> float:
    """The peak of a data sheet for the linear layers."""
    return peak(device, NAMES.get(precision, precision))


def _power(curve: Curve, watts: float | None, peak: float) -> float:
    """The factor on the share of the peak that a long run attains. Power limits the speed, so a
    board of more watts is faster than the one that was measured, and one of a higher peak is not.
    """
    if not curve.watts or not watts:
        return 1.0
    return float((watts / curve.watts) ** 0.5) * (curve.peak / peak if curve.peak else 1.0)
