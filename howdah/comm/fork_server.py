"""The fork server: a process that has torch loaded, forks others in milliseconds, and keeps the
store at which they meet.

    caller ── control ── fork server ── forks ── child 0, child 1, ...
       │                    └── store ─────────────┘  │
       └──────────────────── pipes ───────────────────┘

All of these are socket pairs that were inherited: no port is opened, no socket has a name in any
folder, and only the caller writes what a child unpickles. Nothing is left when the processes end.

Whoever ends, the others notice by themselves:

    a child        the server reaps it, and tells the caller how it ended
    the server     the caller's end of `control` closes; the children get `farewell`; one that is
                   stopped (SIGSTOP) is killed
    the caller     the server's end of `control` closes; the children get `farewell`, and after
                   `grace` seconds SIGKILL, or as soon as they are seen to be stopped; a caller
                   that is stopped counts as one that ended, and is woken when they are gone

Stop signals are blocked in the server, which a Ctrl-C reaches too, and in the children until they
listen (`base/signals.py`).
"""

import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from time import monotonic
from types import FrameType
from typing import Any

from howdah.base.processes import StoppedFor, die_with_parent
from howdah.base.signals import blocked
from howdah.comm.local_store import Line, LocalStore, Table
from howdah.comm.pipes import receive, send

LOOK = 0.5  # seconds between looks at a process that may be stopped
LOOKS = 10  # in a row that find it stopped, and it is given up
PATIENCE = 10  # seconds that a server without children may take to end
START = "import sys; sys.path[:] = {path}; from howdah.comm.fork_server import main; main({words})"

KILLED = "the process that started the ranks was killed"

Target = Callable[..., int]  # (pipe, store, *arguments) → exit code


class ServerLost(RuntimeError):
    """The fork server has ended, or cannot fork."""


@dataclass
class Child:
    """A forked process: its number, the caller's end of its pipe, and how it ended.

    status  None while it lives; else its exit code, or minus the signal that killed it
    """

    pid: int
    pipe: Connection
    status: int | None = None


class ForkServer:
    """Starts the server, and asks it for processes.

    farewell  the signal that children get when the caller, or the server, ends
    grace     seconds that they have to leave before they are killed
    preload   modules that all children need
    main      whether children can call functions of the caller's own script
    heed      is called now and then while the caller waits for the server; may raise
    """

    def __init__(
        self,
        *,
        farewell: signal.Signals,
        grace: float,
        preload: Sequence[str],
        main: bool,
        heed: Callable[[], None] | None = None,
    ) -> None:
        self._prepared = spawn.get_preparation_data("howdah")
        del self._prepared["authkey"]  # which refuses to be sent, and nobody needs
        if not main:
            self._prepared = {k: v for k, v in self._prepared.items() if "init_main" not in k}
        self._children: list[Child] = []
        self.lost, self._why = False, ""
        self._heed, self._stopped = heed, StoppedFor()
        try:
            self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, blocked():  # from its first instruction on
                self._process = self._start(theirs.fileno(), int(farewell), grace, *preload)
        except OSError as error:
            raise ServerLost(f"no process can be started: {error.strerror}") from None
        self.pid = self._process.pid

    def _start(self, control: int, *words: object) -> "subprocess.Popen[bytes]":
        path = self._prepared["sys_path"]
        start = START.format(path=path, words=", ".join(map(repr, (control, *words))))
        command = [sys.executable, "-c", start]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[control])

    @property
    def killed(self) -> bool:
        """Whether the server ended without a word."""
        return self.lost and not self._why

    def fork(self, target: Target, *arguments: Any) -> Child:
        """A process that runs target(pipe, store, *arguments), and exits with what it returns.

        Raises ServerLost when there can be none.
        """
        try:
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    socket.send_fds(self.control, [b"fork"], [theirs.fileno()])
                self._wait()
                while not (forked := self._hear()):
                    self._wait()
                pipe = Connection(ours.detach())
        except OSError as error:
            self.look()  # what it said last may tell why it has ended
            if self.killed:
                raise ServerLost(KILLED) from None
            raise ServerLost(f"no process can be started: {self._why or error.strerror}") from None
        child = Child(forked, pipe)
        self._children.append(child)
        with suppress(OSError):  # it has ended already: its status will say so
            send(child.pipe, self._prepared)
            send(child.pipe, target, arguments)
        return child

    def _wait(self) -> None:
        """Until the server says something, or has ended. Raises what `heed` does."""
        while not wait([self.control], LOOK):
            self.end_if_stopped()
            if self._heed:
                self._heed()

    def end_if_stopped(self) -> None:
        """Kills a server that many looks in a row found stopped. For every LOOK seconds."""
        if self._stopped.look(self.pid) >= LOOKS:
            self._process.kill()

    def status_of(self, child: Child) -> int | None:
        """How a child ended whose pipe is closed; None where the server ended and cannot tell."""
        while child.status is None and not self.lost:
            self._wait()
            self.look()
        return child.status

    def look(self) -> None:
        """Notes which children have ended. For when `control` can be read, or after a while."""
        with suppress(BlockingIOError, ConnectionResetError):
            while not self.lost:
                self._hear(socket.MSG_DONTWAIT)
        if self.lost:
            for child in self._children:
                _reap(child)

    def _hear(self, flags: int = 0) -> int:
        """What the server says. The number of a new child; 0 where it says something else, such as
        how a child ended. Raises OSError when it says no more, or cannot fork.
        """
        try:
            said = self.control.recv(1 << 12, flags)
        except ConnectionResetError:  # it left a question unread; what it said comes after this
            said = self.control.recv(1 << 12, flags)
        word, _, rest = said.decode().partition(" ")
        match word:
            case "forked":
                return int(rest)
            case "refused":
                raise OSError(int(rest), os.strerror(int(rest)))
            case "ended":
                pid, status = map(int, rest.split())
                for child in self._children:
                    if child.pid == pid:
                        child.status = os.waitstatus_to_exitcode(status)
            case "failed":
                self._why = rest
            case _:
                self.lost = True
                raise ConnectionResetError(0, "it has ended")
        return 0

    def close(self, *, kill: bool = False) -> None:
        """Lets go of the pipes, ends the children by `farewell` or at once, and waits for all."""
        if kill:
            self.look()
            for pid in [c.pid for c in self._children if c.status is None] + [self.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for child in self._children:
            child.pipe.close()
        self.control.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            self._process.wait()
        for child in self._children if kill or self.lost else []:
            _reap(child, wait=kill)
        self._children = []


def _reap(child: Child, *, wait: bool = False) -> None:
    """Notes how a child ended that this process has adopted; of another one, that it did."""
    if child.status is not None:
        return
    try:
        pid, status = os.waitpid(child.pid, 0 if wait else os.WNOHANG)
    except ChildProcessError:  # somebody else's, or the server is still ending
        with suppress(ProcessLookupError):
            os.kill(child.pid, 0)
            return
        child.status = 1
    else:
        child.status = os.waitstatus_to_exitcode(status) if pid else None


# -- the server --------------------------------------------------------------------


def main(control: int, farewell: int, grace: float, *preload: str) -> None:
    """What the server's process runs."""
    with socket.socket(fileno=control) as caller:
        try:
            for module in preload:
                import_module(module)
            _Server(caller, farewell, grace).run()
        except (OSError, MemoryError, ImportError) as error:  # limits of this machine
            caller.send(f"failed {error or type(error).__name__}".encode()[: 1 << 11])
            sys.exit(1)


class _Server:
    """Forks, reaps and keeps the store, until the caller and all children are gone."""

    def __init__(self, caller: socket.socket, farewell: int, grace: float) -> None:
        self._caller, self._farewell, self._grace = caller, farewell, grace
        self._parent, self._stopped = os.getppid(), StoppedFor()
        self._table, self._children = Table(), set[int]()
        self._selector = selectors.DefaultSelector()
        self._selector.register(caller, selectors.EVENT_READ, self._serve_caller)
        self._bell, ring = socket.socketpair()
        for end in (self._bell, ring):
            end.setblocking(False)
        self._ring = ring  # kept open: the signal's number is written to it
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._bell, selectors.EVENT_READ, self._reap)
        self._leaving: float | None = None  # when the children are killed
        self._looked = monotonic()

    def run(self) -> None:
        """Serves until nobody is left to serve."""
        while self._leaving is None or self._children:
            waits = [LOOK] if (soonest := self._table.soonest()) is None else [LOOK, soonest]
            for key, _ in self._selector.select(min(waits)):
                key.data(key.fileobj)
            self._table.look()
            self._look_for_stopped()
            if self._leaving is not None and monotonic() > self._leaving:
                self._signal(signal.SIGKILL)
        if os.getppid() == self._parent:
            os.kill(self._parent, signal.SIGCONT)  # it may have been stopped; now it can tell

    def _look_for_stopped(self) -> None:
        """A caller that is stopped is given up; a child that is cannot be asked to leave."""
        if monotonic() - self._looked < LOOK:
            return
        self._looked = monotonic()
        if self._leaving is None:
            if self._stopped.look(self._parent) >= LOOKS:
                self._leave()
            return
        for pid in self._children:
            if self._stopped.look(pid) >= LOOKS:
                os.kill(pid, signal.SIGKILL)

    def _serve_caller(self, caller: socket.socket) -> None:
        with suppress(ConnectionResetError):
            word, pipes, _, _ = socket.recv_fds(caller, 16, 1)
            if word:
                return self._fork(pipes)
        self._selector.unregister(caller)
        return self._leave()

    def _leave(self) -> None:
        if self._leaving is None:
            self._leaving = monotonic() + self._grace
            self._signal(self._farewell)

    def _signal(self, number: int) -> None:
        for pid in self._children:
            os.kill(pid, number)  # not reaped yet, so its number is still its own

    def _fork(self, pipes: Sequence[int]) -> None:
        server = os.getpid()
        try:
            if not pipes:  # a descriptor that is one too many does not arrive
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            ours, theirs = socket.socketpair()
            with theirs:
                # First: a child closes what is registered, and so has no end but its own.
                self._selector.register(ours, selectors.EVENT_READ, self._serve_line(Line(ours)))
                if not (pid := os.fork()):
                    self._become_child(pipes[0], theirs, server)
            self._children.add(pid)
            self._tell("forked", pid)
        except OSError as error:
            self._tell("refused", error.errno or 0)
        finally:
            for pipe in pipes:
                os.close(pipe)

    def _serve_line(self, line: Line) -> Callable[[Any], None]:
        def serve(_: object) -> None:
            try:
                self._table.serve(line)
            except (OSError, ValueError):
                self._table.forget(line)
                self._selector.unregister(line.socket)
                line.socket.close()

        return serve

    def _reap(self, bell: socket.socket) -> None:
        with suppress(BlockingIOError):
            bell.recv(1 << 10)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._children.discard(pid)
            self._tell("ended", pid, status)

    def _tell(self, *words: object) -> None:
        with suppress(OSError):  # the caller is gone, as `_serve_caller` will see
            self._caller.send(" ".join(map(str, words)).encode())

    def _become_child(self, pipe: int, line: socket.socket, server: int) -> None:
        code = 1
        try:
            die_with_parent(self._farewell)
            if os.getppid() != server:  # which ended before it could be noticed
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for key in [*self._selector.get_map().values()]:
                key.fileobj.close()  # type: ignore[union-attr]  # sockets, all of them
            self._selector.close()
            self._ring.close()
            code = _run_child(Connection(pipe), line)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)


def _run_child(pipe: Connection, line: socket.socket) -> int:
    try:
        (prepared,) = receive(pipe)
        spawn.prepare(prepared)
        target, arguments = receive(pipe)
    except EOFError:
        return 1  # the caller has ended
    code: int = target(pipe, LocalStore(line), *arguments)
    return code


def _nothing(number: int, frame: FrameType | None) -> None:
    """So that SIGCHLD wakes the server up."""
