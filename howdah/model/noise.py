"""Random numbers without state: a counter hash in torch operations.

Fresh weights and dropout masks are functions of a key and a counter, so any slice can be drawn
alone, on any rank, after any resume, with equal bits. Nothing stores a generator. The hash is
`plan.seeds.mix`, operation for operation, on int64 instead of uint64: additions and products
wrap alike, and the shift is made logical by a mask.

Normal numbers are sums of four 16-bit fields of one hash (Irwin-Hall): exact integers up to a
last product, so that no logarithm can round differently on another machine. The tails end at
3.46 deviations, as with the truncated normal that is usual for weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from howdah.base.seeds import GOLDEN, MULTIPLIERS, SHIFTS, key

CHUNK = 1 << 22  # elements drawn at a time, so that a large tensor needs little scratch


def _signed(word: int) -> int:
    """The int64 with the bits of a uint64."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def mix(key: int, counters: Tensor) -> Tensor:
    """64 random bits (int64, any shape) for each counter (int64)."""
    z = counters * _signed(GOLDEN) + _signed(key)
    for multiplier, shift in zip(MULTIPLIERS, SHIFTS, strict=False):
        z = (z ^ _shift(z, shift)) * _signed(multiplier)
    return z ^ _shift(z, SHIFTS[2])


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def normal(key: int, places: Tensor) -> Tensor:
    """Elements at `places` (int64) of the endless row of normal numbers named `key`: float32."""
    bits = mix(key, places)
    total = sum((bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    assert isinstance(total, Tensor)
    # Four uniform integers below 2^16: mean 2·(2^16 - 1), variance (2^32 - 1)/3.
    centred = (total - 2 * 0xFFFF).to(torch.float32)
    return centred * (1 / sqrt((2**32 - 1) / 3))


def fill_normal(
    out: Tensor,
    *,
    key: int,
    mean: float,
    spread: float,
    places: Callable[[Tensor], Tensor] = lambda index: index,
) -> None:
    """Fill a 1-D `out` with mean + spread · normal, cast at the end.

    places  the place in the row of normal numbers of each index of `out`
    """
    for first in range(0, out.numel(), CHUNK):
        part = out[first : first + CHUNK]
        if spread:
            index = torch.arange(first, first + part.numel(), device=out.device)
            part.copy_(mean + spread * normal(key, places(index)))
        else:
            part.fill_(mean)


@dataclass(frozen=True)
class Noise:
    """What the noise of one micro-batch depends on, beside the name of the place.

    samples  [b] global sample number of each row
    first    the position at which what is noised begins, where that is a slice of positions
    length   of all positions; None: nothing is cut
    """

    seed: int
    step: int
    samples: Tensor
    first: int = 0
    length: int | None = None


def dropout(x: Tensor, name: str, *, share: float, noise: Noise | None) -> Tensor:
    """Set `share` of the elements of x [b, s, h] to zero and scale the rest up.

    The mask depends on (seed, step, name, sample, position, feature): not on the layout, nor on
    what else is in the micro-batch. Without noise (evaluation) or share, x itself.
    """
    if noise is None or share == 0:
        return x
    _, s, h = x.shape
    positions = torch.arange(noise.first, noise.first + s, device=x.device)
    rows = noise.samples.to(x.device)[:, None] * (noise.length or s) + positions
    counters = rows[:, :, None] * h + torch.arange(h, device=x.device)
    bits = _shift(mix(key(noise.seed, "dropout", noise.step, name), counters), 32)
    kept = bits >= int(share * 2**32)
    return x * kept * (1 / (1 - share))
