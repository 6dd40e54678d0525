"""Algorithms between these hosts, timed beside their prices: `howdah bench collectives --hosts`,
started by torchrun.

For each operation and size: the transport's own way (default), the algorithms that have the least
prices on the measured links, what `auto` takes, and the own way over gloo if asked for, a block of
each in turn.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.bench.collectives import take_turns
from howdah.bench.table import Request
from howdah.bench.trials import Trial, allocate, make_trial, views
from howdah.bench.tuning import DEFAULT, LIKELY
from howdah.comm.chosen import Choosing, algorithms_of, choosing
from howdah.comm.rendezvous import join_through
from howdah.comm.selection import topology_of
from howdah.comm.transport import Transport
from howdah.machines.topology import Kept, cluster_of
from howdah.plan.comm import Hosts
from howdah.sim.selector import MOST_RANKS, SIZED, SIZES, Line, Shape, best, lines

GLOO = "default over gloo"


class Timed(NamedTuple):
    """One algorithm of an operation at a size.

    seconds  of each block, a call, on its slowest rank
    priced   seconds that its price says; 0: it has none
    taken    `auto` takes it
    wrong    wrong elements in the results
    """

    op: str
    bytes: int
    text: str
    seconds: Sequence[float]
    priced: float
    taken: bool
    wrong: int


def timed(transport: Transport, request: Request, *, gloo: bool) -> Iterator[list[Timed]]:
    """Measures, and yields the rows of each operation and size. They are equal on all ranks, and
    all ranks must consume all of them. Raises UserError unless there are several hosts with as many
    ranks each.

    gloo  also over gloo, which opens ports
    """
    kept = topology_of(transport)
    chosen = choosing(transport, algorithms_of("ring"))
    if not isinstance(chosen, Choosing):
        raise UserError("one rank has nothing to measure: start several")
    with ExitStack() as stack:
        if chosen.near:
            stack.enter_context(closing(chosen.near))
        other = None
        if gloo:
            aside = transport.among.aside
            assert aside is not None, "ranks of several hosts have met in a store"
            store = dist.PrefixStore("gloo", aside)
            trusted = Hosts(trust="network")
            other = join_through(store, chosen.rank, chosen.size, "torch", hosts=trusted)
            stack.enter_context(closing(other))
        for op, size in product(request.ops, request.sizes):
            yield _each(chosen, other, kept, (op, size), request)


def _each(
    chosen: Choosing, gloo: Transport | None, kept: Kept, what: tuple[str, int], request: Request
) -> list[Timed]:
    op, size = what
    prices, taken = _likely(kept, op, size)
    memory = views(
        allocate(size + request.width * chosen.size), size, getattr(torch, request.dtype)
    )
    trials = {
        text: _with(chosen, text, make_trial(chosen, op, memory), op) for text in (DEFAULT, *prices)
    }
    if gloo:
        trials[GLOO] = make_trial(gloo, op, memory)
    found = take_turns(chosen.wire, trials, None, repeats=request.repeats, block=request.block)
    return [
        Timed(op, size, text, one.seconds, prices.get(text, 0.0), text == taken, one.wrong)
        for text, one in found.items()
    ]


def _with(chosen: Choosing, text: str, trial: Trial, op: str) -> Trial:
    """The trial with an algorithm; equal on all ranks, so that all change together."""
    algorithms = algorithms_of({op: text})

    def call(run: Callable[[], object]) -> object:
        chosen.algorithms = algorithms
        return run()

    return replace(trial, call=partial(call, trial.call))


def _likely(kept: Kept, op: str, size: int) -> tuple[dict[str, float], str]:
    """Prices in seconds of the algorithms with the least ones and of the transport's own way, by
    their texts; and the text of that which `auto` takes.
    """
    shape = Shape(len(kept.topology.hosts), kept.topology.ranks)
    if op not in SIZED or shape.hosts * shape.each > MOST_RANKS:
        return {}, DEFAULT
    cluster = cluster_of(kept.topology)

    def price(line: Line) -> float:
        return line.fixed + line.byte * size

    ordered = sorted(lines(cluster, op, shape), key=price)
    bucket = min(SIZES, key=lambda one: max(one / size, size / one))
    taken = best(cluster, op, shape, bucket, kept.corrections)
    mine = [line for n, line in enumerate(ordered) if n < LIKELY or line.text in (DEFAULT, taken)]
    return {line.text: price(line) for line in mine}, taken


# -- the table ------------------------------------------------------------------------

FORM = "{:<14} {:>11}  {:<26} {:>10} {:>19} {:>10} {:>7} {:>5}"
COLUMNS = ("op", "bytes", "algorithm", "median ms", "least to most", "priced ms", "speed", "wrong")


HEADING = FORM.format(*COLUMNS)


def table(rows: Sequence[Timed]) -> Iterator[str]:
    """The lines of one operation and size; a star is behind what `auto` takes."""
    own = median(rows[0].seconds)
    for row in rows:
        middle = median(row.seconds)
        spread = f"{1e3 * min(row.seconds):.3f} to {1e3 * max(row.seconds):.3f}"
        priced = f"{1e3 * row.priced:.3f}" if row.priced else "-"
        times = f"{1e3 * middle:.3f}", spread, priced, f"{own / middle:.2f}"
        yield FORM.format(row.op, row.bytes, row.text + " *" * row.taken, *times, row.wrong)
