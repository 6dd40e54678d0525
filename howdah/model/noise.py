"""Random numbers without state: a hash of counters, in torch operations.

Initial weights and dropout masks are functions of a key and a counter, so any rank can draw any
slice of them alone, also after a resume, with equal bits. No generator is stored. The hash is in
`model/islands.py`: the same bits as those of `base.seeds.mix`.

Normal numbers are sums of four 16-bit fields of one hash (Irwin-Hall): exact integers up to the
final product, so there is no logarithm that could round differently on another machine. The tails
end at 3.46 standard deviations, similar to the truncated normal that is usual for weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from howdah.base.seeds import key
from howdah.model.islands import Drop, dropped_backward, factor_of, kept_of, mix, signed

CHUNK = 1 << 22  # elements drawn at a time, to limit temporary memory


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


def fill_even(
    out: Tensor,
    *,
    key: int,
    reach: float,
    index_of: Callable[[Tensor], Tensor] = lambda index: index,
) -> None:
    """Fill a 1-D `out` with numbers spread evenly over ±reach, computed in float32 and then cast;
    `index_of` as for `fill_normal`.
    """
    for first in range(0, out.numel(), CHUNK):
        part = out[first : first + CHUNK]
        index = torch.arange(first, first + part.numel(), device=out.device)
        bits = mix(key, index_of(index)) & 0xFFFFFF  # as many as float32 holds
        part.copy_((bits.to(torch.float32) + 0.5) * (reach / (1 << 23)) - reach)


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


def drop_of(noise: Noise | None, name: str, *, share: float, like: Tensor) -> Drop | None:
    """The dropout called `name` of hidden states such as `like` [b, s, h]. None without noise
    (evaluation), or with share 0.
    """
    if noise is None or share == 0:
        return None
    positions = noise.positions
    if positions is None:
        positions = torch.arange(like.shape[1], device=like.device)
    rows = noise.samples[:, None] * (noise.length or like.shape[1]) + positions
    hashed = signed(key(noise.seed, "dropout", noise.step, name))
    return Drop(rows, torch.full((), hashed, dtype=torch.int64, device=like.device), share)


def drop_within(noise: Noise, name: str, *, share: float, length: int) -> Drop:
    """The dropout of what `length` positions of each sample know of each other; none of them is on
    another rank.
    """
    rows = noise.samples[:, None] * length + torch.arange(length, device=noise.samples.device)
    hashed = signed(key(noise.seed, "dropout", noise.step, name))
    return Drop(rows, torch.full((), hashed, dtype=torch.int64, device=rows.device), share)


def dropout(x: Tensor, name: str, *, share: float, noise: Noise | None) -> Tensor:
    """Dropout: set the fraction `share` of x [b, s, h] to zero and scale the rest by 1/(1 - share).

    The mask depends on (seed, step, name, sample, position, feature), not on the layout or on the
    other samples of the micro-batch. Without noise (evaluation), or with share 0, returns x.
    """
    drop = drop_of(noise, name, share=share, like=x)
    return x if drop is None else dropped_backward(x, kept_of(drop, x.shape[-1]), factor_of(drop))
