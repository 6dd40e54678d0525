"""Long calls of a library that a signal can leave.

Python runs signal handlers in the main thread, between two of its own instructions: a library that
computes for a minute is not interrupted for a minute. So it computes in a thread, and the main
thread waits, which a handler may end by raising. The abandoned call runs on until the process ends;
what it computes is lost, so it must not write anything.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def interruptible(call: Callable[[], T]) -> T:
    """What `call` returns or raises. In other threads than the main one it is just called."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()  # not join: a thread whose join was left is taken for ended

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # whatever it is, it is the caller's to see
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="howdah-library", daemon=True).start()
    done.wait()
    if errors:
        raise errors[0]
    return results[0]
