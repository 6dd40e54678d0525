"""Stop signals: which signals they are, and two modes to handle them.

    at once    Stopped is raised where the signal arrives: nothing is lost by leaving there
    patient    the signal is recorded in a StopRequest, which the program checks between steps

A process starts in the first mode, is patient while it trains, and returns to the first mode when
all is saved. Only the first signal raises: later ones must not interrupt the exit that it started.
It is also recorded, because Python drops an exception that is raised inside a finalizer.

Children of the fork server start with these signals blocked (`comm/fork_server.py`). A signal that
arrives before a child calls `listen` stays pending until then.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

# Termination; Ctrl-C; a lost terminal; Ctrl-\; the signals of batch systems before a time limit.
SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)
AGAIN = 0.01  # seconds until a signal is sent again whose Stopped was dropped in a finalizer
EARLY = "stopped before the first step: there is nothing to save"


class Stopped(BaseException):
    """The process got a stop signal. It is not an Exception, because it is not a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(name_of(number))
        self.number = number


def name_of(number: int) -> str:
    """The name of a signal number: SIGTERM for 15."""
    known = {one.value for one in signal.Signals}
    return signal.Signals(number).name if number in known else f"signal {number}"


def stop_behind(error: BaseException) -> Stopped | None:
    """The Stopped that `error` is or was caused by; None if there is none. Python wraps an
    exception so when it is raised inside __set_name__.
    """
    cause: BaseException | None = error
    while not isinstance(cause, Stopped):
        if cause is None:
            return None
        cause = cause.__cause__
    return cause


@dataclass
class StopRequest:
    """The stop signal that a process has received, and how it is handled.

    signal   the number of the first stop signal; 0: none
    patient  the program checks `signal` by itself; otherwise the handler raises Stopped
    """

    signal: int = 0
    patient: bool = False

    def ask(self, number: int, _: FrameType | None) -> None:
        """The handler of all stop signals."""
        first, self.signal = not self.signal, self.signal or number
        if first and not self.patient:
            raise Stopped(number)

    def hurry(self) -> None:
        """Ends the patient mode. Raises Stopped if a signal has already arrived."""
        self.patient = False
        if self.signal:
            raise Stopped(self.signal)


@contextmanager
def listen(*, patient: bool = False, last: bool = False) -> Iterator[StopRequest]:
    """Records stop signals in the yielded request while the block runs. For the main thread.

    patient  the mode at the start of the block
    last     the process exits after the block and has printed why: signals are ignored then

    Blocks can be nested: a signal of the outer block is also recorded in the inner one, and vice
    versa. A SIGHUP that is already ignored (nohup) stays ignored. May raise Stopped at once.
    """
    request = StopRequest(patient=patient)
    taken = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]

    def dropped(what: "sys.UnraisableHookArgs") -> None:
        """Sends the signal again when Python has dropped its Stopped inside a finalizer."""
        if not isinstance(what.exc_value, Stopped):
            hook(what)
            return
        number, request.signal = request.signal, 0
        again = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    hook, sys.unraisablehook = sys.unraisablehook, dropped
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    before = {number: signal.signal(number, request.ask) for number in taken}
    outer = _request_of(before[signal.SIGTERM])
    try:
        request.signal = outer.signal
        if not patient:
            request.hurry()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
        yield request
    finally:
        sys.unraisablehook = hook
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        outer.signal = outer.signal or request.signal
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if last else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _request_of(handler: object) -> StopRequest:
    """The request whose method `handler` is; for any other handler, a new, unused request."""
    request = getattr(handler, "__self__", None)
    return request if isinstance(request, StopRequest) else StopRequest()


@contextmanager
def blocked() -> Iterator[None]:
    """Stop signals stay pending while the block runs; a process started inside it starts with them
    blocked.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
