"""Workers: processes that are started once and then run functions together, within milliseconds.

`verify`, the benchmarks and the tests use them:

    with Workers(4) as workers:
        workers.run(function, argument, ranks=3)     # → [result of rank 0, 1, 2]

where `function(transport, argument)` runs on each rank with a new transport. A generator keeps it,
and what it has made: what it yields first is the result, and each `ask` gives it something and
returns what it yields then.

    with Workers(2) as workers:
        workers.run(generator, argument)             # → [what rank 0, 1 yield]
        workers.ask(question)                        # the same again, as often as one likes
"""

import signal
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from inspect import isgenerator, isgeneratorfunction
from math import inf
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from howdah.base.processes import StoppedFor
from howdah.comm.fork_server import KILLED, LOOK, LOOKS, Child, ForkServer, ServerLost
from howdah.comm.launch import GRACE, WAY, explain, killed
from howdah.comm.local_store import LocalStore
from howdah.comm.meeting import Kind
from howdah.comm.pipes import receive, send
from howdah.comm.rendezvous import choose
from howdah.host.devices import own_device

PATIENCE = 120  # seconds after which a worker counts as lost that does not join or sends nothing
PRELOAD = ("torch", "torch.distributed", "howdah.comm.spawn")


class WorkerError(RuntimeError):
    """A function failed on a worker, or the workers cannot be started.

    kind  one of `launch.ORDER`. mistake, limit, lost, killed: the message is a sentence for the
          user; defect: it is the worker's traceback
    """

    def __init__(self, told: str, kind: str = "defect") -> None:
        super().__init__(told)
        self.kind = kind


class Workers:
    """`size` worker processes, with `threads` torch threads each. Raises WorkerError.

    device  cpu or cuda: what each works on; ranks on GPUs take theirs before they meet
    main    whether they can run functions of the caller's own script, which they then import
    """

    def __init__(
        self, size: int, *, threads: int = 1, device: str = "cpu", main: bool = True
    ) -> None:
        self._runs = 0
        self._children: list[Child] = []
        self._asked: list[Child] = []  # those whose generators wait for a question
        self._server: ForkServer | None = None
        try:
            self._server = ForkServer(farewell=signal.SIGKILL, grace=0, preload=PRELOAD, main=main)
            for _ in range(size):
                self._children.append(self._server.fork(_serve, threads, device))
        except ServerLost as lost:
            ended = self._server is not None and self._server.killed
            self.close(kill=True)
            if ended:
                raise WorkerError(str(lost), "killed") from None
            raise WorkerError(f"{lost}; {WAY}", "limit") from None
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
        """Calls function(transport, *arguments) on the first `ranks` workers at once; returns their
        results in rank order.

        transport  the kind of transport, by default the best that is available

        Raises WorkerError with the first failure that is received. The workers of a failed run may
        wait for each other, so all workers are ended, and later runs are refused.
        """
        ranks = len(self._children) if ranks is None else ranks
        if self._server is None or not 1 <= ranks <= len(self._children):
            raise WorkerError(
                f"{ranks} ranks were asked for, but {len(self._children)} workers live"
            )
        if self._asked:
            raise WorkerError("these workers answer questions; start others for another run")
        children = self._children[:ranks]
        self._asked = children if isgeneratorfunction(function) else []
        self._runs += 1
        for rank, child in enumerate(children):
            with suppress(ConnectionError):  # it died; reading its answer reports it
                send(child.pipe, function, arguments, rank, ranks, self._runs, transport)
        return self._heard(children)

    def ask(self, *question: Any) -> list[Any]:
        """What the generators of the last run answer, in rank order. Raises WorkerError as `run`
        does.
        """
        if not self._asked:
            raise WorkerError("no worker waits for a question: none was started, or one failed")
        for child in self._asked:
            with suppress(ConnectionError):
                send(child.pipe, *question)
        return self._heard(self._asked)

    def _heard(self, children: Sequence[Child]) -> list[Any]:
        assert self._server is not None
        try:
            return _answers(self._server, children)
        except BaseException:  # also Ctrl-C, after which an answer would be that of another call
            self.close(kill=True)
            raise

    def close(self, *, kill: bool = False) -> None:
        """Ends the workers: waits until they exit, or kills them (`kill`) if they may be stuck."""
        if self._server:
            self._server.close(kill=kill)
        self._children, self._asked, self._server = [], [], None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)  # after an error they may wait for each other


def _answers(server: ForkServer, children: Sequence[Child]) -> list[Any]:
    """The results of all children. Raises WorkerError.

    If a worker reports only that it lost another one, the failure of that one is preferred: it is
    awaited for up to GRACE seconds.
    """
    answers: dict[int, Any] = {}
    lost: WorkerError | None = None
    until, stopped = inf, StoppedFor()
    while len(answers) < len(children) and monotonic() < until:
        silent = {child.pipe: rank for rank, child in enumerate(children) if rank not in answers}
        spoken = wait(list(silent), LOOK)
        for rank in (rank for pipe, rank in silent.items() if pipe in spoken):
            try:
                answers[rank] = _answer(server, children, rank)
            except WorkerError as error:
                if error.kind != "lost":
                    raise
                answers[rank], lost, until = None, lost or error, min(until, monotonic() + GRACE)
        if not spoken:
            server.end_if_stopped()  # which ends its workers too
            for rank in silent.values():
                if stopped.look(children[rank].pid) >= LOOKS:
                    raise WorkerError(f"{_name(children, rank)} was stopped", "killed")
    if lost:
        raise lost
    return [answers[rank] for rank in range(len(children))]


def _answer(server: ForkServer, children: Sequence[Child], rank: int) -> Any:
    try:
        kind, value = receive(children[rank].pipe)
    except (EOFError, ConnectionResetError):
        status, who = server.status_of(children[rank]), _name(children, rank)
        if server.lost:
            raise WorkerError(KILLED, "killed") from None
        if status is not None and status < 0:
            raise WorkerError(killed(who, status), "killed") from None
        raise WorkerError(f"{who} left with exit code {status}") from None
    if kind:
        server.look()
        if server.killed:  # which the worker noticed first
            raise WorkerError(KILLED, "killed")
    if kind == "defect":
        raise WorkerError(f"rank {rank} of {len(children)}:\n{value}")
    if kind:
        raise WorkerError(value, kind)
    return value


def _name(children: Sequence[Child], rank: int) -> str:
    return f"worker {rank} (process {children[rank].pid})"


def _serve(pipe: Connection, store: LocalStore, threads: int, device: str) -> int:
    torch.set_num_threads(threads)
    while True:
        try:
            function, arguments, rank, size, run, kind = receive(pipe)
        except EOFError:
            return 0
        try:
            met = dist.PrefixStore(f"run{run}", store)
            own = own_device(device, rank)
            with closing(
                choose(
                    met,
                    rank=rank,
                    size=size,
                    transport=kind,
                    seconds=PATIENCE,
                    device=own,
                    secret=store.secret,
                    checked=True,  # `verify` and tests take the time to compare GPUs' calls
                )
            ) as transport:
                _tell(pipe, function(transport, *arguments))
        except Exception as error:
            failure = explain(error)
            send(pipe, failure.kind, failure.told)


def _tell(pipe: Connection, made: Any) -> None:
    """Sends what a function has made; of a generator all that it yields, until nobody asks."""
    if not isgenerator(made):
        return send(pipe, "", made)
    with closing(made):
        send(pipe, "", next(made))
        with suppress(EOFError):
            while True:
                send(pipe, "", made.send(receive(pipe)))
    return None
