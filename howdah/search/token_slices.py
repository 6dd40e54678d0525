"""Token slices: one sequence cut into parts that follow each other through the pipeline.

A causal model lets stage 1 begin with the first tokens while stage 0 takes the next ones
(TeraPipe, https://arxiv.org/abs/2102.07988). With K stages and slices that take t_1 … t_M on
each, the longest slice is waited for on every further stage:

    stage 0   |t1 | t2  |t3 |t4 |                       latency = Σ t_i + (K - 1)·max t_i
    stage 1       |t1 | t2  |t3 |t4 |
    stage 2             |t1 | t2  |t3 |t4 |             drawn: K = 3, t2 the longest
              <---- Σ t ----><- 2·max t ->

A token attends to all before it, so later tokens cost more and equal slices are not equal
work; short slices leave a device idle, long ones make a bubble. The best cut is somewhere
between, and depends on t(length, prefix): the time of `length` tokens after `prefix` others.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from howdah.base.errors import UserError

Time = Callable[[int, int], float]  # (length, prefix) → time on one stage, in any unit


def latency(lengths: tuple[int, ...], time: Time, *, stages: int) -> float:
    """How long the slices take through all stages, in the unit of `time`."""
    prefixes = accumulate(lengths, initial=0)
    times = [time(length, prefix) for length, prefix in zip(lengths, prefixes, strict=False)]
    return sum(times) + (stages - 1) * max(times)


def even_slices(sequence: int, slices: int) -> tuple[int, ...]:
    """Lengths that differ by at most one; the longer ones come first, where attention is short.

    Raises UserError for more slices than tokens.
    """
    if slices > sequence:
        raise UserError(
            f"layout: slices{slices} is more than the sequence's {sequence} tokens; "
            f"use at most slices{sequence}"
        )
    size, more = divmod(sequence, slices)
    return (size + 1,) * more + (size,) * (slices - more)


def best_slices(sequence: int, time: Time, *, stages: int, granularity: int = 1) -> tuple[int, ...]:
    """The lengths with the least latency, cut at multiples of `granularity` tokens.

    TeraPipe's dynamic programme finds, for a bound on t, the slices with the least Σ t, and
    tries every bound. Here each round's bound is the longest slice of the round before: no cut
    between the two bounds has a smaller sum, so none is passed over. It ends when the sum alone
    is worse than the best latency, or when no cut is left. With n places to cut, a round takes
    n² steps, and there are at most n²/2 rounds; about 5·n where `time` is smooth.
    """
    places = [*range(0, sequence, granularity), sequence]
    times = np.full((len(places), len(places)), inf)
    for stop, end in enumerate(places):
        for start, prefix in enumerate(places[:stop]):
            times[start, stop] = time(end - prefix, prefix)
    best, chosen, bound = inf, [0], inf
    while True:
        total, cuts = _least_sum(np.where(times < bound, times, inf))
        if total >= best:
            break
        bound = max(float(times[cut]) for cut in pairwise(cuts))
        if total + (stages - 1) * bound < best:
            best, chosen = total + (stages - 1) * bound, cuts
    return tuple(places[stop] - places[start] for start, stop in pairwise(chosen))


def _least_sum(times: npt.NDArray[np.float64]) -> tuple[float, list[int]]:
    """The cheapest way from place 0 to the last and the places on it; inf when there is none.

    times[a, b] is what the slice from place a to place b takes, inf where it is not allowed.
    """
    last = len(times) - 1
    sums, origin = np.zeros(last + 1), [0] * (last + 1)
    for stop in range(1, last + 1):
        through = sums[:stop] + times[:stop, stop]
        origin[stop] = int(through.argmin())
        sums[stop] = through[origin[stop]]
    cuts = [last]
    while cuts[-1] > 0:
        cuts.append(origin[cuts[-1]])
    return float(sums[-1]), cuts[::-1]
