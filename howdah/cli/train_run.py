"""`howdah.train_run`: what `howdah train` does, from a script or a notebook.

It is not called `howdah.train`, which is the package of the training loop (decision 46).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howdah.base.errors import Unfinished, UserError
from howdah.base.named_code import loading, name_of
from howdah.cli.train import start
from howdah.config.recipe import Run, folder_of, load_run

if TYPE_CHECKING:
    from howdah.train.finished_run import FinishedRun


def train_run(
    run: Run | Path | str,
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Callable[..., Any] | str] = (),
    loss: Callable[..., Any] | str = "",
    resume: bool = False,
) -> "FinishedRun":
    """Trains a run, on processes that it starts or, on a layout of one rank, in this one; returns
    the run at its newest checkpoint.

    run        a recipe, a run folder, the name of a recipe that ships, or a Run
    overrides  changes, such as "train.steps=100"; of a Run none
    callbacks  functions or classes, or their names FILE.py:FUNCTION: called after every step, on
               every rank, with a `Moment` (`train/callbacks.py`); behind those of the recipe
    loss       of logits [n, V] and labels [n], n losses (`model/own_loss.py`)
    resume     go on, although settings have changed

    Functions travel by name, and ranks load the file that defines them. One that is defined in a
    notebook's cell runs on a layout of one rank alone. Raises UserError with everything that keeps
    the run from starting, and Unfinished when it does not reach its end.
    """
    if loading():
        raise UserError(
            "howdah.train_run is called by a file that a rank loads for a function in it; put the "
            'call behind if __name__ == "__main__":'
        )
    for name, given in (("overrides", overrides), ("callbacks", callbacks)):
        if isinstance(given, str) or callable(given):
            raise UserError(f"{name} must be a list, even of one: {name}=[...]")
    if isinstance(run, Run) and overrides:
        raise UserError("overrides are of a recipe; change a Run with dataclasses.replace")
    names = [name_of(one) for one in callbacks]
    own, kept = name_of(loss) if loss else "", list[Run]()

    def load() -> Run:
        found = run if isinstance(run, Run) else load_run(Path(run), overrides)
        train = replace(found.train, callbacks=(*found.train.callbacks, *names))
        method = replace(found.method, loss=own or found.method.loss)
        kept[:] = [replace(found, train=train, method=method)]
        return kept[0]

    recipe = Path(run.name) if isinstance(run, Run) else Path(run)
    code = start(load, recipe, resume=resume)
    if code:
        raise Unfinished(f"training has ended with exit code {code}; what it said stands above")
    from howdah.train.finished_run import open_run

    return open_run(folder_of(kept[0]), say=partial(print, flush=True))
