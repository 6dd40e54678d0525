"""What the user sees during a run: a progress bar on a terminal, plain lines otherwise.

Only rank 0 shows anything. The bar shows the loss, the tokens per second and the time left; a file
or a pipe gets the log lines instead, for which parsers exist.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


def to_each(*listeners: Say) -> Say:
    """Returns a function that passes a line on to each of `listeners`."""

    def say(line: str) -> None:
        for one in listeners:
            one(line)

    return say


class RunConsole:
    """Prints lines on rank 0. With `steps`, a terminal also gets a bar below the lines."""

    def __init__(self, rank: int, *, steps: int = 0, done: int = 0) -> None:
        self._console = Console(
            quiet=rank != 0, soft_wrap=True, highlight=False, markup=False, emoji=False
        )
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (steps and self._console.is_terminal and rank == 0),
        )
        self._task = self._bar.add_task("training", total=steps, completed=done, state="")
        self._bar.start()

    @property
    def has_bar(self) -> bool:
        """Whether the progress is shown by a bar."""
        return not self._bar.disable

    def say(self, line: str) -> None:
        """Prints the line, above the bar if there is one."""
        self._console.print(line)

    def step(self, step: int) -> None:
        """Moves the bar to `step`."""
        self._bar.update(self._task, completed=step)

    def measured(self, measured: StepMetrics) -> None:
        """Shows the loss and the tokens per second beside the bar; without a bar, the log line."""
        if not self.has_bar:
            self.say(measured.line())
            return
        state = f"loss {measured.loss:.4f}  {round(measured.tps):,} tokens/s per rank"
        self._bar.update(self._task, state=state)

    def close(self) -> None:
        """Stops the bar; its last state stays on the screen."""
        self._bar.stop()


@contextmanager
def encoding_bar() -> Iterator[Callable[[float], None]]:
    """Yields a function that takes the tokenised share of the text. On a terminal it shows the
    share in a bar, which appears at the first call.
    """
    columns = (TextColumn("encoding"), BarColumn(), TextColumn("left"), TimeRemainingColumn())
    console = Console()  # rich's own is what the first that asked for it found
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("encoding", total=1.0)

    def show(share: float) -> None:
        bar.start()
        bar.update(task, completed=share)

    try:
        yield show
    finally:
        bar.stop()
