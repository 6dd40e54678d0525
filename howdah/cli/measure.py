"""`howdah measure`: times this machine, or the world that torchrun has started, for plans.

All options are checked before any process is started. Ranks other than 0 of a launcher's world
measure, and say nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from howdah.base.errors import UserError, named
from howdah.bench.table import RANKS
from howdah.cli.environment import launched, number_in, ready_torch
from howdah.cli.errors import in_words
from howdah.comm.settings import cache_folder
from howdah.host.disk import disk_seconds
from howdah.host.facts import (
    bf16_instructions,
    busy_share,
    cpu_model,
    disk,
    free_memory,
    total_memory,
    usable_cores,
)
from howdah.machines.cluster_file import CLUSTERS, HERE

if TYPE_CHECKING:
    from howdah.bench.machine import Job, Measured, Wanted

RANK_BYTES = 400 << 20  # of a rank while it measures
WRITTEN = 64 << 20  # bytes of the file by which a disk is timed
NOISY, BUSY = 0.1, 0.05  # of rounds that differ, and of the processors' time that others take


def measure(
    out: Annotated[Path | None, typer.Option(help="folder of the files; else the cache")] = None,
    quick: Annotated[bool, typer.Option(help="a minute or two, less exactly")] = False,
    ranks: Annotated[
        int, typer.Option(help="the most at once; 0: as many as cores, at least 4")
    ] = 0,
) -> None:
    """Time this machine, so that `--cluster here` and every run predict its step times."""
    cores = usable_cores()
    world = number_in("WORLD_SIZE") if launched() else 0
    if world and ranks not in (0, world):
        raise UserError(f"--ranks {ranks}: torchrun has started {world}; leave --ranks out")
    most = world or ranks or max(cores, 4)
    folder = out or cache_folder() / CLUSTERS
    _check(most, folder, ours=not world)
    ready_torch()
    from howdah.bench.machine import PLAIN, PRECISIONS, Wanted, counts_of

    precisions = PLAIN if bf16_instructions() == [] else PRECISIONS
    wanted = Wanted(counts_of(cores, most), cores, precisions=precisions)
    if quick:
        wanted = replace(wanted, rounds=2, seconds=0.01)
    with in_words():
        _joined(wanted, most, folder) if world else _started(wanted, most, folder)


def _check(ranks: int, folder: Path, *, ours: bool) -> None:
    """Raises UserError for what cannot be measured or written.

    ours  whether the ranks are started here
    """
    if not 1 <= ranks <= RANKS:
        raise UserError(f"--ranks {ranks}: a machine is measured with 1 to {RANKS} ranks")
    free = free_memory()
    if ours and free is not None and ranks * RANK_BYTES > free:
        raise UserError(
            f"--ranks {ranks}: {ranks} ranks take {ranks * RANK_BYTES >> 20:,} MiB while they "
            f"measure, and {free >> 20:,} are free; use at most {max(free // RANK_BYTES, 1)}"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk_seconds(folder, 1)
    except OSError as error:
        raise UserError(
            f"{named(folder)} cannot be written: {error.strerror}; give --out another folder"
        ) from None


def _started(wanted: "Wanted", ranks: int, folder: Path) -> None:
    """Measures with ranks that are started here."""
    from howdah.comm.build import NoCompiler, engine_library
    from howdah.comm.settings import read_settings
    from howdah.comm.spawn import Workers

    try:
        engine_library(read_settings())
        wanted = replace(wanted, kinds=("engine", "torch"))
    except NoCompiler:
        pass
    with Workers(ranks) as workers:

        def run(some: int, kind: Any, function: Callable[..., Any], *given: Any) -> Any:
            return workers.run(function, *given, ranks=some, transport=kind)[0]

        _measured(wanted, run, folder)


def _joined(wanted: "Wanted", ranks: int, folder: Path) -> None:
    """Measures with the ranks that torchrun has started, of which rank 0 writes: in the precisions
    that all of their processors have.
    """
    import torch

    from howdah.bench.machine import PLAIN
    from howdah.comm.engine import Engine
    from howdah.comm.rendezvous import join

    with closing(join()) as transport:
        nodes = max(len(set(transport.among.wires.nodes)), 1)
        kind: Any = "engine" if isinstance(transport, Engine) else "torch"
        wanted = replace(wanted, counts=(ranks,), nodes=nodes, kinds=(kind,))
        plain = torch.tensor([float(wanted.precisions == PLAIN)])
        transport.all_reduce(plain)
        if plain.item():
            wanted = replace(wanted, precisions=PLAIN)

        def run(_some: int, _kind: Any, function: Callable[..., Any], *given: Any) -> Any:
            return function(transport, *given)

        _measured(wanted, run, folder, writes=transport.rank == 0)


def _measured(
    wanted: "Wanted", run: Callable[..., Any], folder: Path, *, writes: bool = True
) -> None:
    from howdah.bench.machine import measure as take_rounds

    began, others = perf_counter(), busy_share(0.5)
    found = take_rounds(run, wanted, _watched if writes else list)
    if writes:
        _write(wanted, found, folder)
        _tell(wanted, found, seconds=perf_counter() - began, others=others)
        at = HERE if folder == cache_folder() / CLUSTERS else folder / f"{HERE}.toml"
        print(f"written     {folder}: howdah plan MODEL --cluster {at}")


def _watched(jobs: "list[Job]") -> "Iterator[Job]":
    """The jobs; a terminal sees a bar."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    hidden = not console.is_terminal
    yield from track(jobs, "measuring", console=console, disable=hidden, transient=True)


def _write(wanted: "Wanted", found: "Measured", folder: Path) -> None:
    """Writes the files of each number of ranks; `here.toml` is that of one rank for each core."""
    import torch

    from howdah.bench.machine import machine_of, profiles, rate_of
    from howdah.bench.machine_files import cluster_text, profile_text, write_files
    from howdah.sim.measured import Facts

    sides = [max(disk_seconds(folder, WRITTEN)) for _ in range(3)]
    there = disk(folder) or (WRITTEN, 0)
    drive = there[0], rate_of([WRITTEN / one for one in sides])
    usual = min(wanted.counts, key=lambda ranks: abs(ranks - wanted.cores * wanted.nodes))
    for ranks, of in found.items():
        facts = Facts(
            name=HERE,
            date=str(date.today()),
            ranks=ranks,
            threads=wanted.threads(ranks),
            cpu=cpu_model(),
            torch=str(torch.__version__),
        )
        machine = machine_of(
            wanted, ranks, of, facts=facts, memory=total_memory() or 1 << 33, disk=drive
        )
        texts = cluster_text(machine), profile_text(facts, profiles(wanted, ranks, of))
        write_files(folder, ranks, texts, usual=ranks == usual)


def _tell(wanted: "Wanted", found: "Measured", *, seconds: float, others: float) -> None:
    """Prints what was found."""
    from howdah.bench.machine import PLAIN, bandwidth_of, fastest, rates_of, spread_of
    from howdah.bench.probes import medians

    told = " ".join(map(str, wanted.counts))
    print(
        f"measured    {cpu_model()}, {wanted.cores} cores; ranks at once: {told}; {seconds:.0f} s"
    )
    if wanted.precisions == PLAIN:
        print("bf16        left out: a processor has no instructions for it, and takes minutes")
    spreads = []
    for ranks, of in found.items():
        threads = wanted.threads(ranks)
        rates = ", ".join(
            f"{name} {fastest(medians(rounds)[0]) / 1e9:,.0f} Gflop/s"
            for name, rounds in of.rounds.items()
        )
        spreads += [spread_of(rounds) for rounds in of.rounds.values()]
        memory_rate = bandwidth_of(of).median / 1e9
        print(f"ranks {ranks:<5d} {threads} threads each: {rates}, memory {memory_rate:.1f} GB/s")
        for kind, rounds in of.groups.items():
            rate, latency = rates_of(medians(rounds)[0], ranks)
            print(f"            {kind}: {latency * 1e6:,.0f} us, {rate / 1e9:.2f} GB/s")
    noise = median(spreads)
    loud = noise > NOISY or others > BUSY
    state = "the machine was not quiet; measure again when it is" if loud else "quiet"
    print(f"noise       rounds differ by {noise:.0%}, others took {others:.0%}: {state}")
