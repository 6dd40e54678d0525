"""What a person sees while a run works: a bar on a terminal, plain lines otherwise.

Only rank 0 shows anything. The bar carries the loss, the rate and the time left; a file or a
pipe gets the log line instead, which parsers know.
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
    """Where messages and progress go."""

    def say(self, line: str) -> None:
        """A line for the reader."""
        ...

    def step(self, step: int) -> None:
        """A step is done."""
        ...

    def measured(self, measured: StepMetrics) -> None:
        """A stretch of steps was measured."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class Silent:
    """Ranks other than 0, and tests."""

    def say(self, line: str) -> None:
        """Nobody listens."""

    def step(self, step: int) -> None:
        """Nobody looks."""

    def measured(self, measured: StepMetrics) -> None:
        """Nobody reads."""

    def close(self) -> None:
        """Nothing is open."""


class Lines(Silent):
    """Plain lines, for a file or a pipe."""

    def __init__(self) -> None:
        self._console = Console(soft_wrap=True, highlight=False, markup=False)

    def say(self, line: str) -> None:
        """Prints it."""
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
        """Prints above the bar."""
        self._progress.console.print(line, markup=False, highlight=False)

    def step(self, step: int) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=step)

    def measured(self, measured: StepMetrics) -> None:
        """Shows the loss and the rate beside the bar."""
        state = f"loss {measured.loss:.4f}  {round(measured.tps):,} tokens/s per rank"
        self._progress.update(self._task, state=state)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._progress.stop()


def open_show(rank: int, steps: int, done: int) -> Show:
    """A bar on a terminal, lines elsewhere, nothing on ranks other than 0."""
    if rank != 0:
        return Silent()
    return Bar(steps=steps, done=done) if Console().is_terminal else Lines()


@contextmanager
def encoding_bar() -> Iterator[Callable[[float], None]]:
    """Shows, on a terminal, which share of the text is tokenised; starts when it is first told."""
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
