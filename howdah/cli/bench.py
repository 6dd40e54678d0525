"""The commands that measure this machine: `howdah bench collectives`.

All options are checked before any process is started. Then the command starts the ranks itself;
under torchrun, the ranks are those that torchrun has started. Rank 0 prints.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from howdah.base.errors import UserError, shown
from howdah.bench.table import Request, Row, check_memory, heading, line, read_request, verdict
from howdah.cli.environment import launched, number_in, ready_torch
from howdah.cli.errors import in_words
from howdah.host.facts import memory

if TYPE_CHECKING:
    from howdah.comm.meeting import Kind

bench_app = typer.Typer(no_args_is_help=True, help="Measure collectives.")


@bench_app.callback()
def _bench() -> None:
    """Measure what this machine does."""


@bench_app.command("collectives")
def _collectives(  # noqa: PLR0913, PLR0917  each is an option of the command
    words: Annotated[
        list[str] | None, typer.Argument(help="with --hosts, such as comm.trust=network")
    ] = None,
    op: Annotated[str, typer.Option(help="such as all_reduce,broadcast; or all")] = "all_reduce",
    sizes: Annotated[
        str, typer.Option(help="bytes: 8,64K,1M or 8:64M or 8:64M:4")
    ] = "8,64K,1M,16M",
    ranks: Annotated[int, typer.Option(help="processes; 0: 2, or those of torchrun")] = 0,
    transport: Annotated[str, typer.Option(help="engine or torch; else the best")] = "",
    dtype: Annotated[str, typer.Option(help="of the elements")] = "float32",
    repeats: Annotated[int, typer.Option(help="blocks of calls, of which the best counts")] = 5,
    algorithm: Annotated[str, typer.Option(help="such as ring, or auto; else direct")] = "",
    arena: Annotated[bool, typer.Option(help="also in memory that the engine allocates")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw bus bandwidth to this SVG file")] = None,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="algorithms between the hosts of torchrun")
    ] = False,
    gloo: Annotated[
        bool,
        typer.Option("--gloo", help="with --hosts: over gloo, too, whose ports are open to all"),
    ] = False,
) -> None:
    """Time collectives between processes, and check every result; exit code 1 if one is wrong."""
    ready_torch()
    world = _launched()
    if world and ranks not in (0, world):
        raise UserError(f"--ranks {ranks}: torchrun has started {world}; leave --ranks out")
    request = read_request(
        op,
        sizes,
        dtype=dtype,
        ranks=world or ranks or 2,
        repeats=repeats,
        transport=transport or None,
    )
    if arena and transport == "torch":
        raise UserError("--arena: torch allocates no memory; take --transport engine")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UserError(f"--plot: there is no folder {plot.parent}; make it first")
    if algorithm:
        from howdah.comm.chosen import algorithms_of, require_usable

        require_usable(algorithms_of(algorithm), request.ranks)
    request = replace(request, arena=arena, algorithm=algorithm)
    if hosts:
        if algorithm or arena or plot or transport:
            raise UserError(
                "--hosts compares algorithms on the wire between hosts: leave --algorithm, "
                "--transport, --arena and --plot out"
            )
        sys.exit(_between_hosts(request, words or (), gloo=gloo))
    if gloo:
        raise UserError("--gloo is measured between hosts: give --hosts too, or --transport torch")
    if words:
        raise UserError(f"{shown(words[0])} is for bench collectives --hosts: give that too")
    if not world:
        check_memory(request, memory().get("MemAvailable"))
    with in_words():
        rows = _show(_joined(request) if world else _started(request))
    if plot is not None and rows:
        from howdah.bench.plot import draw_bandwidth
        from howdah.draw.pictures import put

        put(draw_bandwidth(rows), plot)
    sys.exit(1 if any(row.wrong for row in rows) else 0)


def _launched() -> int:
    """The world size of the launcher that has started this process; 0 if none has."""
    return number_in("WORLD_SIZE") if launched() else 0


def _show(rows: Iterator[Row]) -> list[Row]:
    """Prints each row as soon as it is measured, then the verdict; returns the rows."""
    shown: list[Row] = []
    for row in rows:
        if not shown:
            print("\n".join(heading(row)))
        print(line(row), flush=True)
        shown.append(row)
    if shown:
        print(verdict(shown))
    return shown


def _started(request: Request) -> Iterator[Row]:
    """The rows measured by ranks that are started here, one operation after the other."""
    from howdah.bench.collectives import measure
    from howdah.comm.build import NoCompiler, engine_library
    from howdah.comm.settings import read_settings
    from howdah.comm.spawn import Workers

    if request.transport == "engine":
        try:
            engine_library(read_settings())
        except NoCompiler as lack:
            raise UserError(f"{' '.join(str(lack).split())}; or take --transport torch") from None
    with Workers(request.ranks) as workers:
        for op in request.ops:
            one = replace(request, ops=(op,))
            yield from workers.run(measure, one, transport=_kind(request))[0]


def _joined(request: Request) -> Iterator[Row]:
    """The rows measured by the ranks that torchrun has started; empty on all ranks but rank 0."""
    from howdah.bench.collectives import rows
    from howdah.comm.rendezvous import join

    with closing(join(_kind(request))) as transport:
        for row in rows(transport, request):
            if transport.rank == 0:
                yield row


def _between_hosts(request: Request, words: Sequence[str], *, gloo: bool) -> int:
    """Measures between the hosts that torchrun has started; returns the exit code."""
    from howdah.cli.hosts import WAIT, hosts_in, require_launcher

    hosts = hosts_in(words)
    require_launcher()
    from howdah.bench import between_hosts
    from howdah.comm.rendezvous import join

    wrong, told = 0, [between_hosts.HEADING]
    with in_words(), closing(join(seconds=WAIT, hosts=hosts)) as transport:
        for rows in between_hosts.timed(transport, request, gloo=gloo):
            wrong += sum(row.wrong for row in rows)
            if transport.rank == 0:
                print("\n".join([*told, *between_hosts.table(rows)]), flush=True)
                told = []
    return 1 if wrong else 0


def _kind(request: Request) -> "Kind | None":
    kind: Kind | None = request.transport  # type: ignore[assignment]
    return kind
