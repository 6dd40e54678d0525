"""Workers: processes that are started once, kept, and run functions together in milliseconds.

They serve `verify`, the benchmarks and the tests:

    with Workers(4) as workers:
        workers.run(function, argument, ranks=3)     # → [result of rank 0, 1, 2]

where `function(transport, argument)` runs on each rank with a fresh group.
"""

import signal
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from howdah.comm.fork_server import ForkServer
from howdah.comm.meeting import Kind
from howdah.comm.pipes import receive, send
from howdah.comm.rendezvous import choose

PATIENCE = 120  # seconds for a worker that does not come or is silent
PRELOAD = ("torch", "torch.distributed", "howdah.comm.spawn")


class WorkerError(RuntimeError):
    """A function failed on a worker; the text is the worker's traceback."""


class Workers:
    """`size` processes that wait for functions to run together."""

    def __init__(self, size: int, *, threads: int = 1) -> None:
        self._runs = 0
        self._pipes: list[Connection] = []
        self._server: ForkServer | None = ForkServer(
            farewell=signal.SIGKILL, grace=0, preload=PRELOAD, main=True
        )
        try:
            for _ in range(size):
                self._pipes.append(self._server.fork(_serve, threads).pipe)
        except BaseException:
            self.close(kill=True)
            raise

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
                send(pipe, function, arguments, rank, ranks, self._runs, transport)
        results: dict[int, Any] = {}
        while len(results) < len(pipes):
            silent = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
            spoken = wait(list(silent))
            for pipe in (pipe for pipe in silent if pipe in spoken):
                results[silent[pipe]] = self._answer(pipe, silent[pipe])
        return [results[rank] for rank in range(len(pipes))]

    def _answer(self, pipe: Connection, rank: int) -> Any:
        try:
            failed, value = receive(pipe)
        except (EOFError, ConnectionResetError):
            failed, value = True, f"worker {rank} died"
        if failed:
            self.close(kill=True)
            raise WorkerError(value)
        return value

    def close(self, *, kill: bool = False) -> None:
        """Ends the workers: lets them leave, or kills them where they may be stuck."""
        if self._server:
            self._server.close(kill=kill)
        self._pipes, self._server = [], None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)  # after an error they may wait for each other


def _serve(pipe: Connection, store: dist.Store, threads: int) -> int:
    torch.set_num_threads(threads)
    while True:
        try:
            function, arguments, rank, size, run, kind = receive(pipe)
        except EOFError:
            return 0
        try:
            met = dist.PrefixStore(f"run{run}", store)
            with closing(
                choose(met, rank=rank, size=size, transport=kind, seconds=PATIENCE)
            ) as transport:
                send(pipe, False, function(transport, *arguments))
        except Exception:
            send(pipe, True, f"rank {rank} of {size}:\n{traceback.format_exc()}")
