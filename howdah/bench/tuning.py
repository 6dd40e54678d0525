"""How far prices of algorithms are off between these hosts: the correction table of the selector.

For each operation and size the likeliest algorithms, by price, are timed on all ranks together, and
on all groups of those with one place on each host at the same time. The measured time over the
price is kept with the topology (`machines/topology.py`, `Kept`). Of
short messages, whose prices are the least sure, more algorithms are timed, and more calls. Very
long vectors are left to their prices: what links decide needs no correction.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from howdah.base.errors import UserError
from howdah.bench.collectives import loop, slowest
from howdah.bench.trials import allocate, make_trial, views
from howdah.comm.chosen import Choosing, algorithms_of, choosing
from howdah.comm.transport import Transport
from howdah.machines.topology import Kept, cluster_of
from howdah.sim.selector import SIZED, SIZES, Correction, Line, Shape, lines, shapes_of

TURNS, WARM = 3, 200  # of all algorithms of an operation and size; barriers before the first
LIKELY, CALLS = 4, 1  # algorithms of each operation and size, and the direct way; calls in a turn
LIKELY_SHORT, CALLS_SHORT = 8, 9  # where the least price is short
SHORT, LONGEST = 0.005, 0.3  # seconds of a price
DEFAULT = "default"


def tuned(transport: Transport, kept: Kept) -> Kept:
    """The topology with corrections for all ranks, and for groups of one rank of each host. All
    ranks call together.
    """
    found: list[Correction] = []
    for shape in shapes_of(len(kept.topology.hosts), kept.topology.ranks):
        found += _of_shape(transport, kept, shape)
    return replace(kept, corrections=tuple(found))


def group_of(transport: Transport, shape: Shape) -> Transport:
    """The group of a shape that has this rank: all ranks, or those with its place on each host."""
    if shape.hosts * shape.each == transport.size:
        return transport
    places: dict[object, list[int]] = {}
    for rank, node in enumerate(transport.among.wires.nodes):
        places.setdefault(node, []).append(rank)
    mine = places[transport.among.wires.nodes[transport.rank]].index(transport.rank)
    return transport.among([ranks[mine] for ranks in places.values()])


def _of_shape(transport: Transport, kept: Kept, shape: Shape) -> list[Correction]:
    """The corrections for groups of a shape, all of which work at the same time."""
    group = group_of(transport, shape)
    chosen = choosing(group, algorithms_of("ring"))
    if not isinstance(chosen, Choosing):
        raise UserError("one rank has nothing to choose: start several")
    cluster, found = cluster_of(kept.topology), list[Correction]()
    try:
        for _ in range(WARM):
            transport.barrier()
        for op in SIZED:
            for size in SIZES:
                prices = {
                    line.text: line.fixed + line.byte * size
                    for line in likely(lines(cluster, op, shape), size)
                }
                texts = [*prices]
                times = _timed(transport, chosen, op, texts, size) if prices else {}
                for text, seconds in times.items():
                    found.append((op, text, str(shape), size, seconds / prices[text]))
    finally:
        if chosen.near:
            chosen.near.close()
        if group is not transport:
            group.close()
    return found


def likely(prices: tuple[Line, ...], size: int) -> list[Line]:
    """The lines that are timed for a vector of `size` bytes: none where the least is long."""
    ordered = sorted(prices, key=lambda line: line.fixed + line.byte * size)
    least = ordered[0].fixed + ordered[0].byte * size
    if least > LONGEST:
        return []
    most = LIKELY_SHORT if least < SHORT else LIKELY
    return [line for n, line in enumerate(ordered) if n < most or line.text == DEFAULT]


def _timed(
    every: Transport, chosen: Choosing, op: str, texts: Sequence[str], size: int
) -> dict[str, float]:
    """Median seconds of a call on the slowest of all ranks, of each algorithm; they take turns."""
    memory = views(allocate(size + 8 * chosen.size), size, torch.float32, apart=True)
    trials = {
        text: make_trial(chosen.wire if text == DEFAULT else chosen, op, memory) for text in texts
    }
    found: dict[str, list[float]] = {text: [] for text in texts}
    for _ in range(TURNS):
        for text, trial in trials.items():
            if text != DEFAULT:
                chosen.algorithms = algorithms_of({op: text})
            run = loop(every, trial.call, trial.given)
            first = slowest(every, [run(1)])[0]
            calls = CALLS_SHORT if first < SHORT else CALLS
            found[text] += slowest(every, [run(1) for _ in range(calls)])
    return {text: median(some) for text, some in found.items()}
