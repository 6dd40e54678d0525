"""`howdah check`: everything that keeps a recipe from running here, without starting it.

torch is loaded only where a recipe asks for a GPU, or for the weights of a folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from howdah.base.errors import UserError, several
from howdah.cli.environment import ready_torch, this_machine, visible_cards
from howdah.config.recipe import (
    Machine,
    Run,
    WrongRun,
    folder_of,
    lacks_of,
    load_run,
    plan_of,
    problems_of,
)
from howdah.config.shipped import which
from howdah.host.facts import free_memory, usable_cores
from howdah.plan.layout import parse_layout
from howdah.search.capacity import Room, refuse_too_large
from howdah.text.sources import unreadable
from howdah.train.inputs import input_problems, text_of
from howdah.train.notes import notes_of


def check(
    recipe: Annotated[Path, typer.Argument(help="a recipe (.toml), or a run folder")],
    overrides: Annotated[list[str] | None, typer.Argument(help='such as layout="dp4"')] = None,
    force: Annotated[bool, typer.Option(help="do not ask whether this machine is enough")] = False,
) -> None:
    """List everything that keeps RECIPE from running here; exit code 2 if anything does."""
    with and_missing_text():
        run = load_run(recipe, overrides or [])
    # dp* may be any number of replicas; the check uses one
    words = ["dp1" if word == "dp*" else word for word in run.layout.split()]
    run = replace(run, layout=" ".join(words))
    if problems := [*problems_of(run, None), *_problems_here(run)]:
        raise UserError(several(problems))
    plan = plan_of(run, parse_layout(run.layout))
    if run.device == "cuda":
        from howdah.host.devices import require_cards

        require_cards(plan.layout.world, visible=visible_cards())
    elif not force:  # only torch knows a GPU's memory
        refuse_too_large(plan, Room(free_memory(), usable_cores(), plan.layout.world))
    if told := which(str(recipe)):
        print(told)
    print(
        f"{recipe}: sound: {run.name} on {plan.layout}, {plan.layout.world} ranks, "
        f"{plan.batch.global_batch} x {plan.sequence} tokens a step"
    )
    for note in notes_of(plan, run.train):
        print(f"note: {note}")


def _problems_here(run: Run) -> Iterator[str]:
    """Yields what the machine lacks, and what is wrong with the files that the run reads."""
    if run.init_from is not None:
        ready_torch()
    machine = Machine(None, None, usable_cores(), cuda=0, cache=Path())
    yield from lacks_of(this_machine() if run.device == "cuda" else machine, run)
    data = text_of(run.data, run.init_from)
    yield from unreadable(data)
    yield from input_problems(
        data,
        shape=run.model,
        prompt=run.train.prompt,
        init_from=run.init_from,
        folder=folder_of(run),
    )


@contextmanager
def and_missing_text() -> Iterator[None]:
    """Adds to the problems of a recipe, where its block finds some, the text that is missing."""
    try:
        yield
    except WrongRun as wrong:
        missing = unreadable(wrong.run.data, opened=False)
        raise UserError(several([*wrong.problems, *missing])) from None
