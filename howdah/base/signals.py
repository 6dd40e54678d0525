"""Stop signals: which they are, and two ways to take them.

    at once    Stopped is raised where the signal arrives: nothing is lost by leaving there
    patient    the request is noted, and whoever holds it looks at a moment of its own choice

A process begins at once, is patient while it trains, and is at once again when all is saved. Only
the first signal is raised: the others must not break off what it made leave. It is noted as well,
for Python drops what is raised inside a finalizer.

Children of the fork server start with these signals blocked (`comm/forkserver.py`). Those that come
before a child listens wait until it does.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

# Termination; Ctrl-C; a lost terminal; Ctrl-\; what batch systems send before a limit.
SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)
AGAIN = 0.01  # seconds
EARLY = "stopped before the first step: there is nothing to save"


class Stopped(BaseException):
    """The process was asked to stop. Not an Exception: whatever fails, this is not a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(name_of(number))
        self.number = number


def name_of(number: int) -> str:
    """SIGTERM of 15."""
    known = {one.value for one in signal.Signals}
    return signal.Signals(number).name if number in known else f"signal {number}"


def stop_behind(error: BaseException) -> Stopped | None:
    """The Stopped that an error is, or was made of: Python does so in a class's __set_name__."""
    cause: BaseException | None = error
    while not isinstance(cause, Stopped):
        if cause is None:
            return None
        cause = cause.__cause__
    return cause


@dataclass
class StopRequest:
    """What was asked of a process.

    signal   the first that came; 0: none
    patient  its holder looks at `signal`; otherwise Stopped is raised
    """

    signal: int = 0
    patient: bool = False

    def ask(self, number: int, _: FrameType | None) -> None:
        """The handler of all stop signals."""
        first, self.signal = not self.signal, self.signal or number
        if first and not self.patient:
            raise Stopped(number)

    def hurry(self) -> None:
        """No longer patient. Raises Stopped where a signal has come before."""
        self.patient = False
        if self.signal:
            raise Stopped(self.signal)


@contextmanager
def listen(*, patient: bool = False, last: bool = False) -> Iterator[StopRequest]:
    """Turns stop signals into a request while the block runs. For the main thread.

    last  the process leaves after the block, and has said how: signals do nothing any more

    Inside another block of this kind, what that was asked before counts here, and what comes here
    counts there. A hang-up that is ignored already (nohup) stays so. May raise Stopped at once.
    """
    request = StopRequest(patient=patient)
    taken = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]

    def dropped(what: "sys.UnraisableHookArgs") -> None:
        """Stopped was raised inside a finalizer, where Python drops it: once more, elsewhere."""
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
    """The request that a handler serves; one that nobody looks at where it is none of ours."""
    request = getattr(handler, "__self__", None)
    return request if isinstance(request, StopRequest) else StopRequest()


@contextmanager
def blocked() -> Iterator[None]:
    """Stop signals wait while the block runs; a process started inside begins with them blocked."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
