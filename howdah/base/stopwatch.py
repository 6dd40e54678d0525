"""Stopwatch: adds up the seconds of the blocks in which it runs.

watch = Stopwatch()
with watch:
    future.result()
watch.seconds
"""

from time import perf_counter


class Stopwatch:
    """Runs inside `with` blocks of one thread, which must not be nested.

    seconds  of all blocks so far
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._began
