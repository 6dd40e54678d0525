"""Starting processes: workers that are kept and reused, and runs through torch's launcher.

`Workers` serves `verify`, the benchmarks and the tests. It starts processes once, from a
fork server that has torch loaded already, and then runs functions on any number of them in
milliseconds:

    with Workers(4) as workers:
        workers.run(function, argument, ranks=3)     # → [result of rank 0, 1, 2]

where `function(transport, argument)` runs on each rank with a fresh group.

`launch` starts a training run with torch's elastic launcher, which watches its processes,
passes signals on and ends all when one dies.
"""

import logging
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from howdah.comm.meeting import Kind
from howdah.comm.rendezvous import choose
from howdah.comm.transport import Alone, Transport

HOST = "127.0.0.1"
PATIENCE = 120  # seconds for a worker that does not come or is silent


class WorkerError(RuntimeError):
    """A function failed on a worker; the text is the worker's traceback."""


class Workers:
    """`size` processes that wait for functions to run together."""

    def __init__(self, size: int, *, threads: int = 1) -> None:
        context = multiprocessing.get_context("forkserver")
        _preload(context)
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._runs = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self._store.port, threads), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int | None = None,
        transport: Kind | None = None,
    ) -> list[Any]:
        """Calls function(transport, *arguments) on the first `ranks` workers at once.

        `transport` is the kind they get, by default the best that there is.
        Returns their results in rank order. Raises WorkerError with the first traceback that
        arrives; the workers of a failed run may wait for each other, so they are ended, and
        later runs are refused.
        """
        ranks = len(self._pipes) if ranks is None else ranks
        if not 1 <= ranks <= len(self._pipes):
            raise WorkerError(f"{ranks} ranks were asked for, but {len(self._pipes)} workers live")
        pipes = self._pipes[:ranks]
        self._runs += 1
        for rank, pipe in enumerate(pipes):
            with suppress(BrokenPipeError):  # it died: reading its answer says so
                pipe.send((function, arguments, rank, ranks, self._runs, transport))
        results: dict[int, Any] = {}
        while len(results) < len(pipes):
            silent = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
            spoken = wait(list(silent))
            for pipe in (pipe for pipe in silent if pipe in spoken):
                results[silent[pipe]] = self._answer(pipe, silent[pipe])
        return [results[rank] for rank in range(len(pipes))]

    def _answer(self, pipe: Connection, rank: int) -> Any:
        try:
            failed, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            failed, value = True, f"worker {rank} died"
        if failed:
            self.close(kill=True)
            raise WorkerError(value)
        return value

    def close(self, *, kill: bool = False) -> None:
        """Ends the workers: asks them, or kills them where they may be stuck."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill:
                process.kill()
            pipe.close()
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)  # after an error they may wait for each other


def _quieten(package: str) -> None:
    """The launcher logs a failed or stopped process several times over; the caller tells once.

    Its modules each set a level of their own when they are imported.
    """
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(package)]:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _preload(context: multiprocessing.context.ForkServerContext) -> None:
    context.set_forkserver_preload(["torch", "torch.distributed", "howdah.comm.spawn"])


def _serve(pipe: Connection, port: int, threads: int) -> None:
    torch.set_num_threads(threads)
    store = dist.TCPStore(HOST, port, is_master=False)
    while True:
        try:
            function, arguments, rank, size, run, kind = pipe.recv()
        except EOFError:
            return
        try:
            met = dist.PrefixStore(f"run{run}", store)
            with closing(
                choose(met, rank=rank, size=size, transport=kind, seconds=PATIENCE)
            ) as transport:
                pipe.send((False, function(transport, *arguments)))
        except Exception:
            pipe.send((True, f"rank {rank} of {size}:\n{traceback.format_exc()}"))


def launch(
    function: Callable[..., Any], arguments: Sequence[Any], *, ranks: int, save_seconds: int
) -> list[Any]:
    """Runs function(*arguments) in `ranks` new processes of this machine; their results.

    The launcher gives each its rank through the environment, as torchrun does. A stop signal is
    passed on, and the processes have `save_seconds` to save before they are killed. Raises
    torch's ChildFailedError when a process fails, SignalException after a stop signal.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quieten("torch.distributed.elastic")
    _quieten("torch.multiprocessing")
    _preload(multiprocessing.get_context("forkserver"))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="howdah",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{HOST}:0",
        max_restarts=0,
        start_method="forkserver",
        shutdown_timeout=save_seconds,
    )
    results = elastic_launch(config, function)(*arguments)
    return [results[rank] for rank in sorted(results)]


def join(*, rank: int, size: int, seconds: float = 600) -> Transport:
    """Connects this process to the ranks that a launcher started (its environment says where).

    Raises RuntimeError when the others do not come within `seconds`.
    """
    if size == 1:
        return Alone()
    rendezvous = dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=seconds))
    store, rank, size = next(iter(rendezvous))
    return choose(dist.PrefixStore("howdah", store), rank=rank, size=size, seconds=seconds)
