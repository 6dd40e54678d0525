"""PipeDream's planner: cut a model into replicated stages so that the slowest is fastest.

(https://arxiv.org/abs/1806.03377)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Profile:
    """The costs of one part of the model.

    compute  seconds of its forward and backward pass for one micro-batch on one worker
    output   bytes of the activations that it sends to the next part, for one micro-batch
    weights  bytes of its weights
    """

    compute: float
    output: float
    weights: float


@dataclass(frozen=True)
class Replicated:
    """A stage that `replicas` workers run; each worker runs every replicas-th micro-batch."""

    parts: tuple[str, ...]
    replicas: int


def pipedream(
    profiles: Mapping[str, Profile], workers: int, *, bandwidth: float
) -> tuple[tuple[Replicated, ...], float]:
    """The stages on all `workers` whose slowest step is shortest, and that step's seconds.

    profiles   the costs of each part by name, in forward order
    bandwidth  bytes per second between any two workers

    PipeDream's dynamic programme (https://arxiv.org/abs/1806.03377) over A(j, m), the time of the
    slowest step in the best pipeline of the first j parts on m workers:

        A(j, m)    = min over i < j, m' of max(A(i, m - m'), 2·C(i), T(i+1→j, m'))
        T(i→j, m)  = max(Σ compute, Σ 4·(m - 1)/m · weights/bandwidth) / m
        C(i)       = output of part i / bandwidth

    The factor 2 of C counts the activation and its gradient. To synchronise, each of m replicas
    sends and receives 4·(m - 1)/m of its weights' bytes while it computes. A step of the pipeline
    is one micro-batch, and m replicas finish m micro-batches at a time. Transfers between stages
    are not divided by the replicas. Fewer workers can be faster, because one replica has nothing
    to synchronise. n parts on M workers take n²·M² operations.
    """
    names, rows = tuple(profiles), profiles.values()
    compute = np.cumsum([0.0, *(row.compute for row in rows)])
    weights = np.cumsum([0.0, *(row.weights / bandwidth for row in rows)])
    transfer = np.array([0.0, *(2 * row.output / bandwidth for row in rows)])
    replicas = np.arange(1, workers + 1)
    synchronise = 4 * (replicas - 1) / replicas
    # Zero parts on zero workers take no time; a stage needs at least one of both.
    best = np.full((len(names) + 1, workers + 1), np.inf)
    best[0, 0] = 0.0
    last: dict[tuple[int, int], tuple[int, int]] = {}  # last stage: its start, its replicas
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
    """The stages of all `names` on `workers`; `last` has the last stage of each best pipeline."""
    if names:
        start, replicas = last[len(names), workers]
        yield from _walk(names[:start], workers - replicas, last)
        yield Replicated(names[start:], replicas)
