"""Long library calls that a signal can interrupt.

Python runs signal handlers in the main thread, between two Python instructions: a library call that
computes for a minute delays them for a minute. So the call runs in another thread while the main
thread waits, and a signal handler can end the wait by raising. The abandoned call continues until
the process ends; its result is lost, so it must not write anything.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from howdah.base.errors import Unfinished, brief

T = TypeVar("T")
PANIC = "PanicException"  # of pyo3, which no module has
WAY = "it may be a limit of this machine that `ulimit -a` shows"


def interruptible(call: Callable[[], T]) -> T:
    """Runs `call` so that a signal can interrupt the wait; returns or raises what `call` does.

    Outside the main thread `call` is called directly. Raises Unfinished when the library, which is
    written in Rust, panics.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[T] = []
    errors: list[BaseException] = []
    # An Event, not join: after an interrupted join, Python takes the thread for ended.
    done = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again in the main thread
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="howdah-library", daemon=True).start()
    done.wait()
    for error in errors:
        if type(error).__name__ == PANIC:  # its pool of threads, say; it is no Exception
            raise Unfinished(f"a library has failed ({brief(error)}); {WAY}") from error
        raise error
    return results[0]
