"""How far prices of algorithms are off between these hosts: the correction table of the selector.

For each operation and size the likeliest algorithms, by price, are timed on all ranks together, and
the measured time over the price is kept with the topology (`machines/topology.py`, `Kept`). Of
short messages, whose prices are the least sure, more algorithms are timed, and more calls. Very
long vectors are left to their prices: what links decide needs no correction.
"""

from dataclasses import replace
from statistics import median

import torch

from howdah.base.errors import UserError
from howdah.bench.collectives import loop, slowest
from howdah.bench.trials import allocate, make_trial, views
from howdah.comm.chosen import Choosing, algorithms_of, choosing
from howdah.comm.transport import Transport
from howdah.machines.topology import Kept, cluster_of
from howdah.sim.selector import SIZED, SIZES, Correction, Line, Shape, lines

LIKELY, CALLS = 4, 5  # algorithms of each operation and size, and the direct way; calls of each
LIKELY_SHORT, CALLS_SHORT = 8, 15  # where the least price is short
SHORT, LONGEST = 0.005, 0.3  # seconds of a price
DEFAULT = "default"


def tuned(transport: Transport, kept: Kept) -> Kept:
    """The topology with corrections for groups of all ranks. All ranks call together."""
    chosen = choosing(transport, algorithms_of("ring"))
    if not isinstance(chosen, Choosing):
        raise UserError("one rank has nothing to choose: start several")
    cluster = cluster_of(kept.topology)
    shape = Shape(len(kept.topology.hosts), kept.topology.ranks)
    try:
        found: list[Correction] = []
        for op in SIZED:
            for size in SIZES:
                for line in likely(lines(cluster, op, shape), size):
                    factor = _seconds(chosen, op, line.text, size) / (line.fixed + line.byte * size)
                    found.append((op, line.text, str(shape), size, factor))
    finally:
        if chosen.near:
            chosen.near.close()
    return replace(kept, corrections=tuple(found))


def likely(prices: tuple[Line, ...], size: int) -> list[Line]:
    """The lines that are timed for a vector of `size` bytes: none where the least is long."""
    ordered = sorted(prices, key=lambda line: line.fixed + line.byte * size)
    least = ordered[0].fixed + ordered[0].byte * size
    if least > LONGEST:
        return []
    most = LIKELY_SHORT if least < SHORT else LIKELY
    return [line for n, line in enumerate(ordered) if n < most or line.text == DEFAULT]


def _seconds(chosen: Choosing, op: str, text: str, size: int) -> float:
    """Median seconds of a call on the slowest rank."""
    carrier: Transport = chosen.wire
    if text != DEFAULT:
        chosen.algorithms = algorithms_of({op: text})
        carrier = chosen
    memory = views(allocate(size + 8 * chosen.size), size, torch.float32, apart=True)
    trial = make_trial(carrier, op, memory)
    run = loop(chosen.wire, trial.call, trial.given)
    first = slowest(chosen.wire, [run(1)])[0]
    calls = CALLS_SHORT if first < SHORT else CALLS
    return median(slowest(chosen.wire, [run(1) for _ in range(calls)]))
