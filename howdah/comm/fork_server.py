"""The fork server: a process that has torch loaded, forks other processes in milliseconds, and
keeps the store through which they meet.

    caller ── control ── fork server ── forks ── child 0, child 1, ...
       │                    └── store ─────────────┘  │
       └──────────────────── pipes ───────────────────┘

All of these are inherited socket pairs: no port is opened, no socket has a name in any folder, and
only the caller writes what a child unpickles. Nothing is left when the processes end.

When one of the processes ends, the others react:

    a child        the server reaps it, and reports its exit status to the caller
    the server     the caller's end of `control` closes; the children get the signal `farewell`; a
                   server that is stopped (SIGSTOP) is killed
    the caller     the server's end of `control` closes; the children get `farewell`, and SIGKILL
                   after `grace` seconds, or as soon as they are found stopped; a caller that is
                   stopped is treated as ended, and is resumed when the children have ended

Stop signals are blocked in the server, because a Ctrl-C reaches it too, and in the children until
they call `listen` (`base/signals.py`).
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

LOOK = 0.5  # seconds between checks whether a process is stopped
LOOKS = 10  # checks in a row that find it stopped, after which it counts as lost
PATIENCE = 10  # seconds that a server without children has to end
START = "import sys; sys.path[:] = {path}; from howdah.comm.fork_server import main; main({words})"

KILLED = "the process that started the ranks was killed"

Target = Callable[..., int]  # (pipe, store, *arguments) → exit code


class ServerLost(RuntimeError):
    """The fork server has ended, or cannot fork."""


@dataclass
class Child:
    """A forked process.

    pid     its process number
    pipe    the caller's end of its pipe
    status  None while it runs; then its exit code, or minus the signal that killed it
    """

    pid: int
    pipe: Connection
    status: int | None = None


class ForkServer:
    """The caller's side: starts the server, and has it fork processes.

    farewell  the signal that children get when the caller, or the server, ends
    grace     seconds that children have to exit before they are killed
    preload   modules that the server imports, for all children
    main      whether children can call functions of the caller's own script
    heed      is called from time to time while the caller waits for the server; may raise
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
        del self._prepared["authkey"]  # it cannot be pickled, and is not needed
        if not main:
            self._prepared = {k: v for k, v in self._prepared.items() if "init_main" not in k}
        self._children: list[Child] = []
        self.lost, self._why = False, ""
        self._heed, self._stopped = heed, StoppedFor()
        try:
            self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, blocked():  # blocked from its first instruction
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
        """Whether the server ended without reporting why."""
        return self.lost and not self._why

    def fork(self, target: Target, *arguments: Any) -> Child:
        """Starts a process that runs target(pipe, store, *arguments), and exits with its result.

        Raises ServerLost if the process cannot be started.
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
            self.look()  # its last message may contain the reason of its end
            if self.killed:
                raise ServerLost(KILLED) from None
            raise ServerLost(f"no process can be started: {self._why or error.strerror}") from None
        child = Child(forked, pipe)
        self._children.append(child)
        with suppress(OSError):  # it has ended already; `look` will note its status
            send(child.pipe, self._prepared)
            send(child.pipe, target, arguments)
        return child

    def _wait(self) -> None:
        """Waits until the server sends a message or ends. Raises any exception of `heed`."""
        while not wait([self.control], LOOK):
            self.end_if_stopped()
            if self._heed:
                self._heed()

    def end_if_stopped(self) -> None:
        """Kills the server if LOOKS calls in a row find it stopped. Called every LOOK seconds."""
        if self._stopped.look(self.pid) >= LOOKS:
            self._process.kill()

    def status_of(self, child: Child) -> int | None:
        """Waits for the exit status of a child whose pipe is closed; None if the server has ended
        and the status is unknown.
        """
        while child.status is None and not self.lost:
            self._wait()
            self.look()
        return child.status

    def look(self) -> None:
        """Updates the status of all children. Called when `control` is readable, and regularly."""
        with suppress(BlockingIOError, ConnectionResetError):
            while not self.lost:
                self._hear(socket.MSG_DONTWAIT)
        if self.lost:
            for child in self._children:
                _reap(child)

    def _hear(self, flags: int = 0) -> int:
        """Reads one message of the server. Returns the process number of a new child, or 0 for any
        other message, such as a child's exit status. Raises OSError if the server has ended or
        cannot fork.
        """
        try:
            said = self.control.recv(1 << 12, flags)
        except ConnectionResetError:  # it ended with a request unread; its messages follow
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
        """Closes the pipes, ends the children by `farewell`, or at once by SIGKILL (`kill`), and
        waits for all of them.
        """
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
        except subprocess.TimeoutExpired:  # it may be stopped
            self._process.kill()
            self._process.wait()
        for child in self._children if kill or self.lost else []:
            _reap(child, wait=kill)
        self._children = []


def _reap(child: Child, *, wait: bool = False) -> None:
    """Notes the exit status of a child that this process has adopted; 1 if it belongs to another
    process and has ended.
    """
    if child.status is not None:
        return
    try:
        pid, status = os.waitpid(child.pid, 0 if wait else os.WNOHANG)
    except ChildProcessError:  # not adopted, or the server has not ended yet
        with suppress(ProcessLookupError):
            os.kill(child.pid, 0)
            return
        child.status = 1
    else:
        child.status = os.waitstatus_to_exitcode(status) if pid else None


# -- the server --------------------------------------------------------------------


def main(control: int, farewell: int, grace: float, *preload: str) -> None:
    """The main function of the server's process. The arguments are those of ForkServer; `control`
    is the descriptor of its socket.
    """
    with socket.socket(fileno=control) as caller:
        try:
            for module in preload:
                import_module(module)
            _Server(caller, farewell, grace).run()
        except (OSError, MemoryError, ImportError) as error:  # limits of this machine
            caller.send(f"failed {error or type(error).__name__}".encode()[: 1 << 11])
            sys.exit(1)


class _Server:
    """The server's side: forks, reaps and keeps the store until the caller and all children end."""

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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])  # who started it may block it
        signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._bell, selectors.EVENT_READ, self._reap)
        self._leaving: float | None = None  # when the children are killed
        self._looked, self._secret = monotonic(), os.urandom(32)

    def run(self) -> None:
        """Serves requests until the caller and all children have ended."""
        while self._leaving is None or self._children:
            waits = [LOOK] if (soonest := self._table.soonest()) is None else [LOOK, soonest]
            for key, _ in self._selector.select(min(waits)):
                key.data(key.fileobj)
            self._table.look()
            self._look_for_stopped()
            if self._leaving is not None and monotonic() > self._leaving:
                self._signal(signal.SIGKILL)
        if os.getppid() == self._parent:
            os.kill(self._parent, signal.SIGCONT)  # if it was stopped, it can now report this

    def _look_for_stopped(self) -> None:
        """Treats a stopped caller as ended. After that, kills stopped children: they cannot react
        to `farewell`.
        """
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
            if not pipes:  # the kernel drops a descriptor beyond the limit of open files
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            ours, theirs = socket.socketpair()
            with theirs:
                # Before the fork: a child closes all registered sockets and keeps only its own.
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
        with suppress(OSError):  # the caller has ended; `_serve_caller` notices it
            self._caller.send(" ".join(map(str, words)).encode())

    def _become_child(self, pipe: int, line: socket.socket, server: int) -> None:
        code = 1
        try:
            die_with_parent(self._farewell)
            if os.getppid() != server:  # it ended before die_with_parent()
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for key in [*self._selector.get_map().values()]:
                key.fileobj.close()  # type: ignore[union-attr]  # sockets, all of them
            self._selector.close()
            self._ring.close()
            store = LocalStore(line, self._secret)
            code = _run_child(Connection(pipe), store, self._farewell)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)


def _run_child(pipe: Connection, store: LocalStore, farewell: int) -> int:
    try:
        (prepared,) = receive(pipe, farewell=farewell)
        spawn.prepare(prepared)
        target, arguments = receive(pipe, farewell=farewell)
    except EOFError:
        return 1  # the caller has ended, or is stopped
    code: int = target(pipe, store, *arguments)
    return code


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler for SIGCHLD, so that this signal wakes the server up."""
