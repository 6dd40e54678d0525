"""PipeDream's planner: stages that several workers run, cut so that the slowest is fastest.

(https://arxiv.org/abs/1806.03377)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Profile:
    """What one part costs.

    compute  seconds of its forward and backward pass for one micro-batch on one worker
    output   bytes of the activations it hands on, for one micro-batch
    weights  bytes of its weights
    """

    compute: float
    output: float
    weights: float


@dataclass(frozen=True)
class Replicated:
    """A stage that `replicas` workers run, each on every replicas-th micro-batch."""

    parts: tuple[str, ...]
    replicas: int


def pipedream(
    profiles: Mapping[str, Profile], workers: int, *, bandwidth: float
) -> tuple[tuple[Replicated, ...], float]:
    """The stages with the shortest bottleneck that use all workers, and that time in seconds.

    PipeDream's dynamic programme (https://arxiv.org/abs/1806.03377) over A(j, m), the slowest
    step of the best pipeline of the first j parts on m workers:

        A(j, m)    = min over i < j, m' of max(A(i, m - m'), 2·C(i), T(i+1→j, m'))
        T(i→j, m)  = max(Σ compute, Σ 4·(m - 1)/m · weights/bandwidth) / m
        C(i)       = output of part i / bandwidth, there and its gradient back

    `bandwidth` is bytes per second between any two workers. Each of m replicas sends and
    receives 4·(m - 1)/m of its weights' bytes to synchronise, while it computes; a step of the
    pipeline is a micro-batch, and m replicas finish m at a time. Transfers are not shared out
    over replicas. Fewer workers can be faster, for one replica has nothing to synchronise.
    `profiles` are in forward order. n parts on M workers take n²·M² steps.
    """
    names, rows = tuple(profiles), profiles.values()
    compute = np.cumsum([0.0, *(row.compute for row in rows)])
    weights = np.cumsum([0.0, *(row.weights / bandwidth for row in rows)])
    transfer = np.array([0.0, *(2 * row.output / bandwidth for row in rows)])
    replicas = np.arange(1, workers + 1)
    synchronise = 4 * (replicas - 1) / replicas
    # No parts on no workers take no time; no other stage does without either.
    best = np.full((len(names) + 1, workers + 1), np.inf)
    best[0, 0] = 0.0
    last: dict[tuple[int, int], tuple[int, int]] = {}  # where the last stage starts, its replicas
    for j in range(1, len(names) + 1):
        busy = compute[j] - compute[:j, None]
        wire = synchronise * (weights[j] - weights[:j, None])
        stage = np.maximum(busy, wire) / replicas
        before = np.maximum(best[:j], transfer[:j, None])
        for m in range(1, workers + 1):
            times = np.maximum(before[:, m - 1 :: -1], stage[:, :m])
            start, index = divmod(int(times.argmin()), m)
            best[j, m], last[j, m] = times[start, index], (start, index + 1)
    return tuple(_walk(names, workers, last)), float(best[-1, -1])


def _walk(
    names: tuple[str, ...], workers: int, last: dict[tuple[int, int], tuple[int, int]]
) -> Iterator[Replicated]:
    """The stages of all `names` on `workers`, from what the last stage of each pipeline is."""
    if names:
        start, replicas = last[len(names), workers]
        yield from _walk(names[:start], workers - replicas, last)
        yield Replicated(names[start:], replicas)
