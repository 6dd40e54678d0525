"""Launches a training run on this machine, and supervises it until its end.

    run ── fork server ──┬── rank 0        howdah train starts the ranks, forwards stop signals,
                         └── rank 1        and reports in one sentence how they ended

A rank reports over its pipe why it exits, also where its work is done; for a rank that was killed,
the system reports it. Of all these reasons, the first in this list becomes the reason of the run,
because the others follow from it:

    mistake   UserError: the same for all ranks                            exit code 2
    killed    a rank was killed by a signal, or was stopped (SIGSTOP)      1
    defect    an unexpected exception, with its traceback, or no report    1
    limit     the machine has no more memory, disk, files                  1
    stopped   a stop signal; the run has saved and printed its state       128 + signal
    early     a stop signal before the first step                          128 + signal
    lost      a rank has lost its connection to another rank               1

After the first failure, the other ranks have GRACE seconds to exit by themselves, because their
reasons are useful. After a stop signal they have the time to save. Then they are killed.
"""

import json
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import torch.distributed as dist

from howdah.base.errors import Unfinished, UserError
from howdah.base.processes import StoppedFor, adopt_orphans
from howdah.base.signals import EARLY, Stopped, StopRequest, listen, name_of
from howdah.comm.fork_server import KILLED, Child, ForkServer, ServerLost
from howdah.comm.transport import PeerLost

GRACE = 4.0  # seconds that ranks have to exit by themselves when one has failed
GLANCE = 0.05  # seconds after which a signal is forwarded at the latest
LOOK = 0.5  # seconds between checks whether ranks are stopped
LOOKS = 10  # checks in a row that find a rank stopped, after which all ranks are killed
ORDER = ("mistake", "killed", "defect", "limit", "stopped", "early", "lost")
ASKED = ("stopped", "early")
DONE = "done"  # of a rank whose work is finished
WAY = "start fewer ranks, or raise the limits that `ulimit -a` shows"
LONGEST = 1 << 16  # the most characters of a traceback that are reported
NO_MEMORY = (  # in error messages of torch and its libraries
    *("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate"),
    *("std::bad_alloc", "could not create a primitive"),
)
NO_THREAD = "can't start new thread"  # an error message of Python


@dataclass(frozen=True)
class Seat:
    """A rank of a run: its number, the world size, and the store through which the ranks meet."""

    rank: int
    size: int
    store: dist.Store


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    code  exit code
    why   the reason as one sentence, or with a traceback; may be empty
    kind  one of ORDER; empty after success
    """

    code: int
    why: str = ""
    kind: str = ""

    @property
    def again(self) -> bool:
        """Whether the run may succeed when it is started again."""
        return self.kind in ("killed", "defect", "limit", "lost")


@dataclass
class _Rank:
    """The launcher's state of a rank.

    kind, told  the reason of its exit, as the rank reported it: one of ORDER, or DONE, and a text
    heard       its report has been read, or it has ended without one
    stopped     it was stopped (SIGSTOP) for too long
    ours        it was killed by the launcher
    """

    child: Child
    kind: str = ""
    told: str = ""
    heard: bool = False
    stopped: bool = False
    ours: bool = False

    @property
    def failed(self) -> bool:
        return self.child.status not in (None, 0)


@dataclass(frozen=True)
class Terms:
    """The conditions under which a run is started and ended.

    ranks         number of processes
    save_seconds  seconds that the ranks have to save after a stop signal, before they are killed
    preload       modules that all ranks need, imported once
    restarts      how often a failed run is started again (never after a mistake or a stop signal)
    """

    ranks: int
    save_seconds: float
    preload: Sequence[str] = ()
    restarts: int = 0


def launch(
    function: Callable[..., int],
    arguments: Sequence[Any],
    terms: Terms,
    *,
    say: Callable[[str], None],
) -> Ending:
    """Runs function(seat, *arguments) in new processes, which exit with its result.

    say  is called with the reason when a run is started again

    Raises UserError if a rank raised one, or if the machine cannot start the ranks; Stopped after a
    stop signal before the last rank was started.
    """
    modules = ("torch", "torch.distributed", "howdah.comm.launch", *terms.preload)
    grace, server = terms.save_seconds, None
    with listen(patient=True) as request:  # a second signal must not interrupt the shutdown
        heed = partial(_heed, request)
        adopt_orphans(True)
        try:
            for start in range(terms.restarts + 1):
                if server and server.lost:
                    server.close(kill=True)
                if not server or server.lost:
                    server = ForkServer(
                        farewell=signal.SIGTERM, grace=grace, preload=modules, main=False, heed=heed
                    )
                ending = _Launched(request, terms, server).see_through(
                    function, arguments, f"start{start}"
                )
                if start == terms.restarts or not ending.again or request.signal:
                    break
                say(f"{ending.why}; starting it again, {start + 1} of {terms.restarts} times")
        except ServerLost as lost:
            raise UserError(f"{lost}; {WAY}") from None
        finally:
            if server:
                server.close(kill=True)
            adopt_orphans(False)
    return ending


def _heed(request: StopRequest) -> None:
    if request.signal:
        raise Stopped(request.signal)


class _Launched:
    """One attempt of a run: its ranks, from their start to their end."""

    def __init__(self, request: StopRequest, terms: Terms, server: ForkServer) -> None:
        self._request, self._terms, self._server = request, terms, server
        self._ranks: list[_Rank] = []
        self._passed_on = 0
        self._until: float | None = None  # when the remaining ranks are killed
        self._looked, self._stopped_for = monotonic(), StoppedFor()

    def see_through(
        self, function: Callable[..., int], arguments: Sequence[Any], prefix: str
    ) -> Ending:
        """Starts the ranks, waits until all have ended, and returns how the run ended."""
        for rank in range(self._terms.ranks):
            _heed(self._request)
            member = rank, self._terms.ranks, prefix
            try:
                child = self._server.fork(_run_rank, function, member, arguments)
            except ServerLost:
                if self._server.killed:
                    return Ending(1, KILLED, "killed")
                raise
            self._ranks.append(_Rank(child))
        while any(rank.child.status is None for rank in self._ranks):
            self._watch()
        return self._verdict()

    # -- while the ranks run

    def _watch(self) -> None:
        """Handles all events since the last call: reports and ends of ranks, signals, timeouts."""
        live = [rank for rank in self._ranks if rank.child.status is None]
        pipes = {rank.child.pipe: rank for rank in live if not rank.heard}
        control = [] if self._server.lost else [self._server.control]
        for ready in wait([*pipes, *control], timeout=GLANCE):
            if isinstance(ready, Connection):
                _hear(pipes[ready])
        self._server.look()
        for rank in live:
            if rank.child.status is not None and not rank.heard:
                _hear(rank)
        self._pass_on()
        self._look_for_stopped(live)
        if any(rank.failed and rank.kind not in ASKED for rank in self._ranks):
            self._give(GRACE)
        elif self._server.lost:  # then the kernel sends the ranks SIGTERM
            self._give(self._terms.save_seconds)
        if self._until is not None and monotonic() > self._until:
            self._kill()

    def _pass_on(self) -> None:
        """Forwards a stop signal, received by the launcher or by one rank, to all ranks, once."""
        asked = self._request.signal
        for rank in self._ranks:
            if rank.kind in ASKED and not asked:
                asked = int(rank.told)
        if asked and not self._passed_on:
            self._passed_on = asked
            self._signal(asked)
            self._give(self._terms.save_seconds)

    def _look_for_stopped(self, live: Sequence[_Rank]) -> None:
        if monotonic() - self._looked < LOOK:
            return
        self._looked = monotonic()
        self._server.end_if_stopped()  # then the kernel signals its children
        for rank in live:
            if self._stopped_for.look(rank.child.pid) >= LOOKS:
                rank.stopped = True
                self._kill()

    def _give(self, seconds: float) -> None:
        until = monotonic() + seconds
        self._until = until if self._until is None else min(until, self._until)

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            if rank.child.status is None:
                with suppress(ProcessLookupError):
                    os.kill(rank.child.pid, number)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.ours = rank.ours or rank.child.status is None
        self._signal(signal.SIGKILL)

    # -- when all have ended

    def _verdict(self) -> Ending:
        for rank, one in enumerate(self._ranks):
            status = one.child.status or 0
            if one.stopped:
                one.kind = "killed"
                one.told = f"rank {rank} (process {one.child.pid}) was stopped, and all were ended"
            elif status < 0 and not one.ours:
                one.kind = "killed"
                one.told = killed(f"rank {rank} (process {one.child.pid})", status)
            elif status >= 0 and not one.kind:  # a user's code may call os._exit, with any code
                one.kind, one.told = "defect", f"rank {rank} left with exit code {status}"
        for kind in ORDER:
            for rank, one in enumerate(self._ranks):
                if one.kind == kind:
                    return self._ending(rank, one)
        if any(one.ours for one in self._ranks):
            seconds = self._terms.save_seconds
            why = f"the ranks did not end within {seconds:g} s, and were killed"
            return Ending(1, why, "killed")
        return Ending(0)

    def _ending(self, rank: int, one: _Rank) -> Ending:
        asked = [int(other.told) for other in self._ranks if other.kind in ASKED]
        # A rank that learns of the stop from another rank reports SIGTERM; any other number is
        # that of the original signal.
        stop = self._request.signal or next(
            (n for n in asked if n != signal.SIGTERM), signal.SIGTERM
        )
        match one.kind:
            case "mistake":
                raise UserError(one.told)
            case "stopped" | "early" | "lost" if self._server.lost and not self._request.signal:
                return Ending(1, KILLED, "killed")
            case "stopped":
                return Ending(128 + stop, kind="stopped")
            case "early":
                return Ending(128 + stop, EARLY, "early")
            case "defect" if "\n" in one.told:
                return Ending(1, f"rank {rank} failed:\n{one.told}", "defect")
        return Ending(1, one.told, one.kind)


def _hear(rank: _Rank) -> None:
    """Reads the report of a rank about its exit, if it has sent one."""
    with suppress(EOFError, OSError, ValueError):
        if rank.child.pipe.poll():
            rank.kind, rank.told = json.loads(rank.child.pipe.recv_bytes(8 * LONGEST))
    rank.heard = True


# -- in a rank -----------------------------------------------------------------------


def _run_rank(
    pipe: Connection,
    store: dist.Store,
    function: Callable[..., int],
    member: tuple[int, int, str],
    arguments: Sequence[Any],
) -> int:
    """The main function of a rank. Returns its exit code, and sends the reason to the launcher.

    member  the rank, the world size, and the prefix of this attempt's keys in the store
    """
    rank, size, prefix = member
    try:
        code = function(Seat(rank, size, dist.PrefixStore(prefix, store)), *arguments)
        failure = Failure("stopped", str(code - 128)) if code else Failure(DONE, "")
    except BaseException as error:
        failure = explain(error)
        code = failure.code
    with suppress(OSError):
        pipe.send_bytes(json.dumps((failure.kind, failure.told[-LONGEST:])).encode())
    return code


@dataclass(frozen=True)
class Failure:
    """The reason why a rank exits: one of ORDER, and the text for the user; or DONE."""

    kind: str
    told: str

    @property
    def code(self) -> int:
        """The exit code."""
        match self.kind:
            case "mistake":
                return 2
            case "early":
                return 128 + int(self.told)
        return 1


def explain(error: BaseException) -> Failure:
    """The failure that describes an exception of a rank."""
    kind, told = "defect", "".join(traceback.format_exception(error))
    match error:
        case UserError():
            kind, told = "mistake", str(error)
        case Stopped():
            kind, told = "early", str(error.number)
        case PeerLost():
            kind, told = "lost", str(error)
        case dist.DistNetworkError():
            kind, told = "lost", f"the ranks cannot meet: {_first(error)}"
        case ConnectionError():
            kind, told = "lost", f"a connected process has ended ({error.strerror or error})"
        case Unfinished():
            kind, told = "limit", str(error)
        case MemoryError():
            kind, told = "limit", "there is not enough memory"
        case OSError() if error.strerror:
            where = f": {error.filename}" if error.filename else ""
            kind, told = "limit", error.strerror + where
        case RuntimeError() if any(words in str(error) for words in NO_MEMORY):
            kind, told = "limit", f"there is not enough memory: {_first(error)}"
        case RuntimeError() if NO_THREAD in str(error):
            kind, told = "limit", f"no thread can be started; {WAY}"
    return Failure(kind, told)


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def killed(who: str, status: int) -> str:
    """A sentence about process `who` that was killed by a signal; `status` is minus its number."""
    why = "; the system does so when memory runs out" if status == -signal.SIGKILL else ""
    return f"{who} was killed by {name_of(-status)}{why}"
