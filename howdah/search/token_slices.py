"""Token slices: one sequence cut into slices that follow each other through the pipeline.

In a causal model, stage 1 can start with the first tokens while stage 0 runs the next ones
(TeraPipe, https://arxiv.org/abs/2102.07988). With K stages and slices that take t_1 … t_M on
each stage, every stage after the first waits for the longest slice:

    stage 0   |t1 | t2  |t3 |t4 |                       latency = Σ t_i + (K - 1)·max t_i
    stage 1       |t1 | t2  |t3 |t4 |
    stage 2             |t1 | t2  |t3 |t4 |             drawn: K = 3, t2 the longest
              <---- Σ t ----><- 2·max t ->

A token attends to all tokens before it, so later tokens cost more, and slices of equal length do
not take equal time. Short slices use a device badly, long slices make a bubble. The best cut is in
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
    """Time in which slices of these lengths pass through all stages, in the unit of `time`."""
    prefixes = accumulate(lengths, initial=0)
    times = [time(length, prefix) for length, prefix in zip(lengths, prefixes, strict=False)]
    return sum(times) + (stages - 1) * max(times)


def even_slices(sequence: int, slices: int) -> tuple[int, ...]:
    """The lengths of `slices` slices of a sequence; they differ by at most one.

    The longer slices are first, where a token attends to fewer tokens. Raises UserError for more
    slices than tokens.
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

    TeraPipe's dynamic programme finds, for an upper bound on t, the slices with the least Σ t, and
    tries every bound. Here the bound of a round is the longest slice of the previous round: cuts
    between the two bounds have no smaller sum, so the best cut is not missed. The search ends when
    the sum alone is not below the best latency, or when no cut is left. With n positions at which
    to cut, a round takes n² operations, and there are at most n²/2 rounds; about 5·n if `time` is
    smooth.
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
    """The least total time of slices from position 0 to the last, and the positions of the cuts.

    times  times[a, b] is the time of the slice from position a to b; inf if it is not allowed

    The total time is inf if no cuts are allowed.
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
