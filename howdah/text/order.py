"""The order of samples: which sample of which source is sample number g of the run.

The order is a pure function of (seed, g). It does not depend on the layout, the batch size or the
samples read before. A run that stops at sample g resumes at sample g on any number of devices.

There are two shuffles; neither is stored:

    number g   0 1 2 3 4 5 6 7 8 9 | 10 11 ...     blocks of 10, weights 5 : 3 : 2
    source     a b a c a a b c b a |  b  a ...     each block has the exact shares, in an order
                                                   that the block's key permutes
    turn       0 0 1 0 2 3 1 1 2 4 |  3  5 ...     the source's own counter
    sample     permute(key of the source's epoch, n, turn mod n)

A source of n samples uses turns [e·n, (e+1)·n) in its epoch e, and the permutation is a
bijection: within an epoch no sample is skipped or read twice. Each source has its own epochs; those
of a small source are short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import numpy as np
import numpy.typing as npt

from howdah.base.errors import UserError
from howdah.base.seeds import key, permute

Numbers = npt.NDArray[np.int64]

BLOCK = 1000  # samples in a block of the mix: proportions are exact to a thousandth


@dataclass(frozen=True)
class Order:
    """Everything that the order of a run depends on.

    seed      the run's seed
    sequence  tokens of one sample
    samples   number of samples of each source
    shares    samples of each source in one block of the mix; they add up to BLOCK
    how       random: each epoch of a source is permuted; sequential: it is read as it stands
    """

    seed: int
    sequence: int
    samples: tuple[int, ...]
    shares: tuple[int, ...]
    how: Literal["random", "sequential"] = "random"


def shares(weights: Sequence[float], block: int = BLOCK) -> tuple[int, ...]:
    """Divides the `block` samples of a block among the sources in proportion to their weights.

    Each source gets the integer part; the samples left go one each to the largest remainders.

    >>> shares((5, 3, 2), 10)
    (5, 3, 2)
    >>> shares((1, 1, 1), 10)
    (4, 3, 3)

    Raises UserError when a weight is not above 0, or is too small for one sample in a block.
    """
    total = sum(weights)
    if not all(isfinite(weight) and weight > 0 for weight in weights) or not isfinite(total):
        raise UserError(f"data.sources: the weights {list(weights)} must all be greater than 0")
    exact = [weight / total * block for weight in weights]
    places = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: places[i] - exact[i])  # stable for ties
    for index in by_remainder[: block - sum(places)]:
        places[index] += 1
    for weight, place in zip(weights, places, strict=True):
        if place == 0:
            raise UserError(
                f"data.sources: the weight {weight} is less than 1/{block} of all weights "
                f"({total:g}); make it larger, or remove the source"
            )
    return tuple(places)


def locate(order: Order, numbers: npt.ArrayLike) -> tuple[Numbers, Numbers]:
    """Maps sample numbers of the run [n] to (source [n], sample within that source [n])."""
    asked = np.asarray(numbers, dtype=np.int64)
    source, turn = _turns(order, asked)
    sample = np.empty_like(asked)
    for one, size in enumerate(order.samples):
        here = np.flatnonzero(source == one)
        if order.how == "sequential":
            sample[here] = turn[here] % size
            continue
        epochs, places = np.divmod(turn[here], size)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            name = key(order.seed, "order", one, epoch)
            sample[here[now]] = permute(name, size, places[now])
    return source, sample


def _turns(order: Order, asked: Numbers) -> tuple[Numbers, Numbers]:
    """Maps sample numbers to (source, number of samples of that source earlier in the run)."""
    if len(order.samples) == 1:
        return np.zeros_like(asked), asked
    source, turn = np.empty_like(asked), np.empty_like(asked)
    blocks, places = np.divmod(asked, sum(order.shares))
    for block in np.unique(blocks).tolist():
        here = blocks == block
        sources, before = _block(order, block)
        source[here] = sources[places[here]]
        turn[here] = block * np.array(order.shares)[source[here]] + before[places[here]]
    return source, turn


def _block(order: Order, block: int) -> tuple[Numbers, Numbers]:
    """One block of the mix: the source of each sample, and how many samples of that source are
    before it in the block.
    """
    size = sum(order.shares)
    laid = np.repeat(np.arange(len(order.shares)), order.shares)
    sources = laid[permute(key(order.seed, "mix", block), size, np.arange(size))]
    before = np.empty_like(sources)
    for one in range(len(order.shares)):
        here = sources == one
        before[here] = np.arange(order.shares[one])
    return sources, before
