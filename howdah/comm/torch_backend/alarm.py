"""A thread that is woken after a moment, unless that is called off before.

Waking a thread of Python takes some 90 us of the one that wakes it: both want the interpreter's
lock, and the core. A timer of the kernel (timerfd) wakes it later, by itself; turned off in time,
it wakes nobody. `os.timerfd_create` is there from Python 3.13 on.
"""

import ctypes
import os
import struct
from time import CLOCK_MONOTONIC

LIBC = ctypes.PyDLL(None, use_errno=True)  # these calls do not wait: the lock is kept
SPEC = struct.Struct("@4l")  # struct itimerspec: seconds and ns between, seconds and ns until
OFF = SPEC.pack(0, 0, 0, 0)
NOW = SPEC.pack(0, 0, 0, 1)
EXPIRED = 8  # bytes of the number that a timer gives


def spec(seconds: float) -> bytes:
    """A delay, for `set`."""
    whole, part = divmod(round(seconds * 1e9), 10**9)
    return SPEC.pack(0, 0, whole, part) if seconds > 0 else NOW


class Alarm:
    """A timer for which one thread waits."""

    def __init__(self) -> None:
        self._file = LIBC.timerfd_create(CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._file < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def set(self, delay: bytes) -> None:
        """Lets `wait` return after a delay, of `spec`; OFF: not at all."""
        LIBC.timerfd_settime(self._file, 0, delay, None)

    def wait(self) -> None:
        """Returns when the time has come."""
        os.read(self._file, EXPIRED)

    def close(self) -> None:
        """Frees the timer, for which nobody waits any more."""
        os.close(self._file)
