"""Random numbers without state: a hash of counters, in torch operations.

Initial weights and dropout masks are functions of a key and a counter, so any rank can draw any
slice of them alone, also after a resume, with equal bits. No generator is stored. The hash is
`base.seeds.mix`, operation for operation, on int64 instead of uint64: sums and products wrap
around in the same way, and a mask makes the right shift logical.

Normal numbers are sums of four 16-bit fields of one hash (Irwin-Hall): exact integers up to the
final product, so there is no logarithm that could round differently on another machine. The tails
end at 3.46 standard deviations, similar to the truncated normal that is usual for weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from howdah.base.seeds import GOLDEN, MULTIPLIERS, SHIFTS, key

CHUNK = 1 << 22  # elements drawn at a time, to limit temporary memory


def _signed(word: int) -> int:
    """The int64 with the same bits as a uint64."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def mix(key: int, counters: Tensor) -> Tensor:
    """Returns 64 random bits for each counter (int64, any shape), as int64."""
    z = counters * _signed(GOLDEN) + _signed(key)
    for multiplier, shift in zip(MULTIPLIERS, SHIFTS, strict=False):
        z = (z ^ _shift(z, shift)) * _signed(multiplier)
    return z ^ _shift(z, SHIFTS[2])


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def normal(key: int, indices: Tensor) -> Tensor:
    """Standard normal numbers, float32: the elements at `indices` (int64) of the infinite
    sequence that `key` defines.
    """
    bits = mix(key, indices)
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
    index_of: Callable[[Tensor], Tensor] = lambda index: index,
) -> None:
    """Fill a 1-D `out` with mean + spread · normal, computed in float32 and then cast.

    index_of  maps indices of `out` to indices in the sequence of normal numbers
    """
    for first in range(0, out.numel(), CHUNK):
        part = out[first : first + CHUNK]
        if spread:
            index = torch.arange(first, first + part.numel(), device=out.device)
            part.copy_(mean + spread * normal(key, index_of(index)))
        else:
            part.fill_(mean)


@dataclass(frozen=True)
class Noise:
    """What the dropout of one micro-batch depends on, besides the name of the dropout layer. The
    tensors are on the device of what is dropped: each use of one from elsewhere would wait for it.

    seed       the run's seed
    step       the training step
    samples    [b] global sample number of each row
    positions  [s] those of the sequence that the rank computes on; None: all of them
    length     positions of the full sequence; None: as many as x has
    """

    seed: int
    step: int
    samples: Tensor
    positions: Tensor | None = None
    length: int | None = None


def dropout(x: Tensor, name: str, *, share: float, noise: Noise | None) -> Tensor:
    """Dropout: set the fraction `share` of x [b, s, h] to zero and scale the rest by 1/(1 - share).

    The mask depends on (seed, step, name, sample, position, feature), not on the layout or on the
    other samples of the micro-batch. Without noise (evaluation), or with share 0, returns x.
    """
    if noise is None or share == 0:
        return x
    _, s, h = x.shape
    positions = torch.arange(s, device=x.device) if noise.positions is None else noise.positions
    rows = noise.samples[:, None] * (noise.length or s) + positions
    counters = rows[:, :, None] * h + torch.arange(h, device=x.device)
    bits = _shift(mix(key(noise.seed, "dropout", noise.step, name), counters), 32)
    kept = bits >= int(share * 2**32)
    return x * kept * (1 / (1 - share))
