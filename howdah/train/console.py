"""What the user sees during a run: a progress bar on a terminal, plain lines otherwise.

Only rank 0 shows anything. The bar shows the loss, the tokens per second and the time left; a file
or a pipe gets the log lines instead, for which parsers exist.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from howdah.train.metrics import StepMetrics

Say = Callable[[str], None]


class Show(Protocol):
    """An output for messages and progress."""

    def say(self, line: str) -> None:
        """Shows a line."""
        ...

    def step(self, step: int) -> None:
        """Shows that `step` is done."""
        ...

    def measured(self, measured: StepMetrics) -> None:
        """Shows the measurements of a stretch of steps."""
        ...

    def close(self) -> None:
        """Ends the output."""
        ...


class Silent:
    """Shows nothing: for ranks other than 0, and for tests."""

    def say(self, line: str) -> None:
        """Does nothing."""

    def step(self, step: int) -> None:
        """Does nothing."""

    def measured(self, measured: StepMetrics) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Lines(Silent):
    """Prints plain lines, for a file or a pipe."""

    def __init__(self) -> None:
        self._console = Console(soft_wrap=True, highlight=False, markup=False)

    def say(self, line: str) -> None:
        """Prints the line."""
        self._console.print(line)

    def measured(self, measured: StepMetrics) -> None:
        """Prints the log line."""
        self.say(measured.line())


class Bar:
    """A progress bar with the time left; messages scroll above it."""

    def __init__(self, *, steps: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("training", total=steps, completed=done, state="")
        self._progress.start()

    def say(self, line: str) -> None:
        """Prints the line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False)

    def step(self, step: int) -> None:
        """Moves the bar to `step`."""
        self._progress.update(self._task, completed=step)

    def measured(self, measured: StepMetrics) -> None:
        """Shows the loss and the tokens per second beside the bar."""
        state = f"loss {measured.loss:.4f}  {round(measured.tps):,} tokens/s per rank"
        self._progress.update(self._task, state=state)

    def close(self) -> None:
        """Stops the bar; its last state stays on the screen."""
        self._progress.stop()


def open_show(rank: int, steps: int, done: int) -> Show:
    """The output of a rank: a bar on a terminal, lines elsewhere, nothing on ranks other than 0."""
    if rank != 0:
        return Silent()
    return Bar(steps=steps, done=done) if Console().is_terminal else Lines()


@contextmanager
def encoding_bar() -> Iterator[Callable[[float], None]]:
    """Yields a function that takes the tokenised share of the text. On a terminal it shows the
    share in a bar, which appears at the first call.
    """
    if not Console().is_terminal:
        yield lambda share: None
        return
    columns = (TextColumn("encoding"), BarColumn(), TextColumn("left"), TimeRemainingColumn())
    progress = Progress(*columns, transient=True)
    task = progress.add_task("encoding", total=1.0)

    def tell(share: float) -> None:
        progress.start()
        progress.update(task, completed=share)

    try:
        yield tell
    finally:
        progress.stop()
