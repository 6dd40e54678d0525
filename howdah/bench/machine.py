"""Measures a machine: rounds of operations for several numbers of ranks, and a profile from each.

    ranks 1   2 threads each      rounds of float32, of bf16, of the group
    ranks 2   1 thread            …
    ranks 4   1 thread            more than cores: each waits for its turn

What ranks find depends on how many of them share the cores, their caches and the memory. So each
number of ranks has files of its own (`machine_files.py`), measured while all of them work.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any, NamedTuple

from howdah.bench.fitting import (
    EMPTY,
    Fit,
    PartsOfModel,
    Sized,
    StepsOfModel,
    kernel_of,
    nonnegative,
)
from howdah.bench.machine_files import Machine, Rate, Wire
from howdah.bench.probes import PARTS, Round, Seconds, medians, name_of, take_round
from howdah.bench.small_models import model_of, shared_models, shared_steps
from howdah.comm.meeting import Kind
from howdah.machines.cluster import Cluster, Device, Efficiency, Flops, Host, Link, Tree
from howdah.model.loss import CHUNK
from howdah.sim.measured import Facts
from howdah.sim.profile import Profile

PRECISIONS = ("float32", "bf16")
PLAIN = PRECISIONS[:1]  # of a processor without bf16, which would take minutes for a round in it
COPIED = 64 << 20  # bytes: more than caches hold
# Linear layers of (rows, inner, columns): square, narrow, wide, of few rows, of a head.
PRODUCTS = (
    (1024, 256, 256),
    (1024, 256, 128),
    (1024, 256, 640),
    (1024, 640, 256),
    (256, 256, 640),
    (256, 640, 256),
    (512, 512, 1408),
    (512, 1408, 512),
    (512, 768, 2048),
    (1024, 256, 4096),
    (128, 128, 512),
    (2048, 128, 128),
)
# Attention of (rows, heads, tokens, size of a head).
PAIRS = ((4, 4, 256, 64), (1, 4, 256, 64), (1, 4, 1024, 64), (8, 4, 128, 32), (2, 4, 512, 32))
# Models of (width, heads, kv_heads, ffn, vocab), on rows of so many tokens.
MODELS = (
    (256, 4, 2, 640, 4096, 4, 256),
    (512, 8, 8, 1408, 1024, 2, 256),
    (128, 4, 4, 512, 512, 8, 128),
    (256, 4, 2, 640, 2048, 1, 256),
    (256, 8, 4, 1024, 8192, 2, 512),
)
# The same for steps, with micro-batches: what is small beside the update, or beside its passes.
STEPS = (
    (64, 2, 2, 128, 256, 1, 16, 1),
    (64, 2, 2, 128, 256, 1, 16, 8),
    (512, 8, 8, 1408, 4096, 1, 16, 1),
)
LOCAL = "local"  # the group of the ranks on one of several machines
GROUPS = ("all_reduce", "reduce_scatter", "all_gather", "exchange")
WAITS = 2.0  # sums of scalars over all ranks in a step: of tokens before it, of the loss behind
MESSAGES = (256, 16 << 10, 256 << 10, 1 << 20, 4 << 20)  # bytes


def round_of(precision: str, threads: int, seconds: float, ranks: int = 1) -> Round:
    """A round of all operations of one precision."""
    shared = shared_models(precision, ranks)
    return Round(
        threads,
        seconds,
        precision,
        products=PRODUCTS,
        pairs=PAIRS,
        copied=COPIED,
        parts=[model_of(precision, sizes) for sizes in MODELS],
        steps=[model_of(precision, sizes, layers=2, micros=m) for *sizes, m in STEPS],
        alone=list(dict.fromkeys(alone for _, alone in shared)),
        together=[plan for plan, _ in shared],
    )


def profile_of_rounds(wanted: Round, found: Seconds, bandwidth: float) -> Profile:
    """The profile of one precision, from the seconds of a round's operations.

    bandwidth  of a rank's memory, in bytes/s
    """
    products = [
        Sized((2.0 * rows * inner * columns, rows, inner, columns), found[name])
        for rows, inner, columns in wanted.products
        for name in [name_of("product", rows, inner, columns)]
    ]
    pairs = [
        Sized((2.0 * rows * heads * keys**2 * size, keys, size, keys * size), found[name])
        for rows, heads, keys, size in wanted.pairs
        for name in [name_of("pairs", rows, heads, keys, size)]
    ]
    fit = Fit(
        _cluster(wanted.precision, bandwidth),
        replace(
            EMPTY,
            products=tuple(kernel_of(products, phase) for phase in range(3)),
            pairs=tuple(kernel_of(pairs, phase) for phase in range(2)),
            chunk=CHUNK,
        ),
    )
    parts = [
        PartsOfModel(plan, *(found[name_of(part, number)] for part in PARTS))  # type: ignore[arg-type]
        for number, plan in enumerate(wanted.parts)
    ]
    fit.blocks(parts)
    fit.ends(parts)
    steps = [(plan, found[name_of("steps", number)]) for number, plan in enumerate(wanted.steps)]
    fit.steps([StepsOfModel(plan, seconds) for plan, (seconds,) in steps])
    return fit.profile


def _cluster(precision: str, bandwidth: float) -> Cluster:
    """One rank, for the simulator: of its rates only the memory's counts beside a profile's."""
    flops = Flops(**{precision: 1e12})
    link = Link("none", 1e12, 0.0)
    device = Device("rank", 1e12, bandwidth, flops)
    rates = Efficiency(1.0, 1.0, 1.0, 1.0)
    return Cluster("here", device, 1, 1, link, link, Tree(), Host(1e12, link), efficiency=rates)


# -- measuring -----------------------------------------------------------------------

# Calls a function on the first ranks of a number, with a kind of transport (None: the best), and
# returns what rank 0 has found.
Runs = Callable[[int, Kind | None, Callable[..., Any], Any], Any]


class Job(NamedTuple):
    """A round of so many ranks: of a precision, or of their group on a kind of wire."""

    ranks: int
    precision: str
    kind: str = ""


@dataclass(frozen=True)
class Wanted:
    """What is measured.

    counts   numbers of ranks, ascending; of a world of several machines one number
    cores    of a machine, that its ranks share
    nodes    machines
    kinds    of transport; the first is the one that runs take
    precisions  in which models are timed
    rounds   of each
    seconds  for an operation in a round
    """

    counts: tuple[int, ...]
    cores: int
    nodes: int = 1
    kinds: tuple[Kind, ...] = ("torch",)
    precisions: tuple[str, ...] = PRECISIONS
    rounds: int = 5
    seconds: float = 0.03

    def threads(self, ranks: int) -> int:
        """Threads of torch in each rank, as a run would have."""
        return max(self.cores // (ranks // self.nodes), 1)

    def jobs(self) -> "list[Job]":
        """All rounds, in their order."""
        return [
            job
            for _ in range(self.rounds)
            for ranks in self.counts
            for job in (
                *(Job(ranks, precision) for precision in self.precisions),
                *(Job(ranks, "", kind) for kind in self.wires(ranks)),
            )
        ]

    def wires(self, ranks: int) -> tuple[str, ...]:
        """The groups that are timed: of all ranks by transport, and of those of one machine."""
        local = (LOCAL,) if self.nodes > 1 and ranks > self.nodes else ()
        return (*self.kinds, *local) if ranks > 1 else ()


@dataclass
class Found:
    """What was found with one number of ranks: the rounds by precision, and of the ranks' group by
    transport.
    """

    rounds: dict[str, list[Seconds]] = field(default_factory=dict)
    groups: dict[str, list[Seconds]] = field(default_factory=dict)


Measured = dict[int, Found]  # by number of ranks


def counts_of(cores: int, ranks: int) -> tuple[int, ...]:
    """Numbers of ranks to measure, so that none up to `ranks` is far from one of them.

    >>> counts_of(2, 4), counts_of(6, 6), counts_of(2, 3)
    ((1, 2, 4), (1, 2, 4, 6), (1, 2, 3))
    """
    doubled = (1 << power for power in range(ranks.bit_length()))
    return tuple(sorted({*doubled, ranks, *([cores] if cores <= ranks else [])}))


def measure(run: Runs, wanted: Wanted, watch: Callable[[list[Job]], Iterable[Job]]) -> Measured:
    """Takes all rounds. Numbers of ranks take turns, so that all of them meet the same machine.

    watch  yields the jobs, and may show how many are done
    """
    found = {ranks: Found() for ranks in wanted.counts}
    for ranks, precision, kind in watch(wanted.jobs()):
        threads = wanted.threads(ranks)
        if precision:
            one = round_of(precision, threads, wanted.seconds, ranks)
            rounds = found[ranks].rounds.setdefault(precision, [])
            rounds.append(run(ranks, None, take_round, one))
            continue
        one = group_round(threads, wanted.seconds, local=kind == LOCAL)
        way: Any = wanted.kinds[0] if kind == LOCAL else kind
        found[ranks].groups.setdefault(kind, []).append(run(ranks, way, take_round, one))
    return found


def group_round(threads: int, seconds: float, *, local: bool = False) -> Round:
    """A round of the operations of the ranks' group; `local`: of those of each machine."""
    groups = [(name, size) for name in GROUPS for size in MESSAGES]
    return Round(threads, seconds, groups=groups, local=local)


# -- what it means -------------------------------------------------------------------


def rates_of(found: Seconds, ranks: int) -> tuple[float, float]:
    """Bandwidth in bytes/s and latency in seconds of the ranks' group, as the simulator counts them
    (`sim/message_times.py`): an all-reduce is a reduce-scatter and an all-gather, each of ranks - 1
    messages.
    """
    shared = (ranks - 1) / ranks
    weights = dict.fromkeys(GROUPS, (ranks - 1.0, shared))
    weights |= {"all_reduce": (2 * (ranks - 1.0), 2 * shared), "exchange": (1.0, 1.0)}
    names = [(name, size) for name in GROUPS for size in MESSAGES]
    messages = [weights[name][0] for name, _ in names]
    sent = [weights[name][1] * size for name, size in names]
    seconds = [found[name_of(*one)][0] for one in names]
    latency, byte = nonnegative([messages, sent], seconds)
    return 1 / max(byte, 1e-15), latency


def best(rounds: Sequence[Seconds]) -> Seconds:
    """The least seconds of each operation."""
    return {
        name: tuple(map(min, zip(*(one[name] for one in rounds), strict=True)))
        for name in rounds[0]
    }


def spread_of(rounds: Sequence[Seconds], kind: str = "") -> float:
    """The median, over operations of a kind, of how much their rounds differ."""
    _, spread = medians(rounds)
    return median(each for name, each in spread.items() if name.startswith(kind))


def fastest(found: Seconds) -> float:
    """Operations per second of the fastest linear layer."""
    return max(
        2.0 * rows * inner * columns / found[name_of("product", rows, inner, columns)][0]
        for rows, inner, columns in PRODUCTS
    )


def bandwidth_of(found: Found) -> Rate:
    """Bytes per second, read and written, of copies in all rounds."""
    seconds = [one["copy"][0] for rounds in found.rounds.values() for one in rounds]
    return rate_of([2 * COPIED / each for each in seconds])


def rate_of(rates: Sequence[float]) -> Rate:
    """Of the same rate in several rounds."""
    low, middle, high = quantiles(rates, n=4) if len(rates) > 1 else [*rates] * 3
    return Rate(max(rates), middle, (high - low) / 2 / middle)


def profiles(wanted: Wanted, ranks: int, found: Found) -> Mapping[str, Profile]:
    """The profile of each precision with so many ranks."""
    made, bandwidth = {}, bandwidth_of(found).median
    crowd = max(ranks / wanted.nodes / wanted.cores, 1.0)
    links = _links(wanted, ranks, found)
    for precision, rounds in found.rounds.items():
        one, seconds = (
            round_of(precision, wanted.threads(ranks), wanted.seconds),
            medians(rounds)[0],
        )
        profile = profile_of_rounds(one, seconds, bandwidth)
        profile = replace(profile, waits=WAITS, crowd=crowd)
        if links:
            cluster = replace(
                _cluster(precision, bandwidth),
                devices_per_node=ranks // wanted.nodes,
                nodes=wanted.nodes,
                inside=links.inside,
                between=links.between,
            )
            fit = Fit(cluster, profile)
            fit.together(shared_steps(precision, ranks, seconds))
            profile = fit.profile
        made[precision] = profile
    return made


class _Links(NamedTuple):
    """The links inside and between nodes, as the simulator counts them."""

    inside: Link
    between: Link


def _links(wanted: Wanted, ranks: int, found: Found) -> _Links | None:
    """The links between several ranks; None for one rank."""
    if ranks == 1:
        return None
    local = ranks // wanted.nodes
    rates = {
        kind: rates_of(medians(rounds)[0], local if kind == LOCAL else ranks)
        for kind, rounds in found.groups.items()
    }
    first = rates[wanted.kinds[0]]
    return _Links(Link("measured", *rates.get(LOCAL, first)), Link("measured", *first))


def machine_of(
    wanted: Wanted, ranks: int, found: Found, *, facts: Facts, memory: int, disk: tuple[int, Rate]
) -> Machine:
    """What a cluster file says of the machine with so many ranks.

    memory  bytes of a machine
    disk    its bytes, and the rate of its slower way
    """
    local = ranks // wanted.nodes
    wires = {
        kind: _wire(kind, [rates_of(one, local if kind == LOCAL else ranks) for one in rounds])
        for kind, rounds in found.groups.items()
    }
    return Machine(
        facts,
        cores=wanted.cores,
        memory=memory,
        nodes=wanted.nodes,
        flops={name: rate_of([*map(fastest, rounds)]) for name, rounds in found.rounds.items()},
        bandwidth=bandwidth_of(found),
        wires=wires,
        disk=disk,
    )


def _wire(kind: str, rates: Sequence[tuple[float, float]]) -> Wire:
    latencies = [latency for _, latency in rates]
    bandwidth, latency = rate_of([rate for rate, _ in rates]), rate_of(latencies)
    return Wire(kind, bandwidth, replace(latency, best=min(latencies)))
