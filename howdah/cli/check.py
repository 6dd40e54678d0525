"""`howdah check`: everything that keeps a recipe from running here, without starting it.

torch is loaded only where a recipe asks for a GPU, or for the weights of a folder.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from howdah.base.errors import UserError, several
from howdah.checkpoint.folders import steps
from howdah.cli.auto import machine_for, settled
from howdah.cli.environment import cluster_named, ready_torch, this_machine, visible_cards
from howdah.config.auto import is_auto
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
from howdah.host.facts import free_memory, has_card, usable_cores
from howdah.host.precision import precision_notes
from howdah.host.scratch import free_bytes, require_folder
from howdah.machines.cluster_file import HERE, split_size
from howdah.plan.homes import homes
from howdah.plan.layout import parse_layout
from howdah.plan.plan import Plan
from howdah.plan.schedule.text import read_schedule
from howdah.search.capacity import Room, refuse_too_large
from howdah.text.labels import check_labels, label_problems
from howdah.text.sources import unreadable
from howdah.train.inputs import code_problems, input_problems, text_of
from howdah.train.notes import notes_of
from howdah.train.run_folder import folder_problems


def check(
    recipe: Annotated[Path, typer.Argument(help="a recipe (.toml), or a run folder")],
    overrides: Annotated[list[str] | None, typer.Argument(help='such as layout="dp4"')] = None,
    force: Annotated[bool, typer.Option(help="do not ask whether this machine is enough")] = False,
) -> None:
    """List everything that keeps RECIPE from running here; exit code 2 if anything does."""
    print("\n".join(sound(recipe, overrides or [], force=force)))


def sound(recipe: Path, overrides: Sequence[str], *, force: bool) -> list[str]:
    """What there is to say of a recipe that can run here. Raises UserError with everything that
    keeps it from running.

    force  do not ask whether the machine's memory and cores are enough
    """
    with and_the_rest(force=force):
        run = load_run(recipe, overrides)
        auto = settled(run, machine_for(run)) if is_auto(run) else None
        run = _with_one_replica(auto.run if auto else run)
        if problems := problems_of(run, None):
            raise WrongRun(problems, run)
    if problems := [*_lacks_here(run, force=force), *file_problems(run)]:
        raise UserError(several([*dict.fromkeys(problems)]))
    plan = plan_of(run, parse_layout(run.layout))
    told = [which(str(recipe))]
    told.append(
        f"{recipe}: sound: {run.name} on {plan.layout}, {plan.layout.world} ranks, "
        f"{plan.batch.global_batch} x {plan.sequence} tokens a step"
    )
    if auto:
        told.append(f"layout: {auto.told}")
    told += [f"note: {note}" for note in notes_of(plan, run.train)]
    if not (force or is_elsewhere(run)) and (run.device == "cpu" or not has_card()):
        told += [f"note: {note}" for note in precision_notes(plan.method.precision, "cpu")]
    return [*filter(None, told)]


@contextmanager
def and_the_rest(*, force: bool) -> Iterator[None]:
    """Adds to the problems of a recipe, where its block finds some, those of its files and of this
    machine.

    force  do not ask whether the machine's memory and cores are enough
    """
    try:
        yield
    except WrongRun as wrong:
        run = _with_one_replica(wrong.run)
        rest = [*_lacks_here(run, force=force or not wrong.meant)]
        rest += file_problems(run, meant=wrong.meant)
        raise UserError(several([*dict.fromkeys([*wrong.problems, *rest])])) from None


def file_problems(run: Run, *, meant: bool = True) -> Iterator[str]:
    """Yields what is wrong with the files that a run reads.

    meant  whether its model and data are those that were written; otherwise only whether its text
           is there is looked at
    """
    data = text_of(run.data, run.init_from)
    missing = unreadable(data, opened=meant)
    yield from missing
    if run.schedule is not None:
        yield from problem_of(partial(read_schedule, run.schedule))
    if not meant:
        return
    yield from folder_problems(folder_of(run), data)
    if data.labelled and not missing and not any(label_problems(data, run.model)):
        yield from problem_of(partial(check_labels, data, run.model.labels))
    if run.init_from is not None:
        ready_torch()
    yield from input_problems(
        data,
        shape=run.model,
        prompt=run.train.prompt,
        init_from=run.init_from,
        folder=folder_of(run),
    )
    if run.method.adapter:
        yield from _adapter_problems(run)


def _adapter_problems(run: Run) -> Iterator[str]:
    """Yields why an adapter cannot be trained beside a base, or begin as it is to."""
    from howdah.train.adapted import first_adapter, needs_base

    yield from needs_base(run.method, run.init_from)
    if run.init_from and run.init_adapter and not steps(folder_of(run) / "checkpoints"):
        args = run.init_adapter, run.model, run.method, run.init_from
        yield from problem_of(partial(first_adapter, *args))


def free_disk(plan: Plan) -> int | None:
    """Free bytes of the disk that is a home; None if none is."""
    return free_bytes(Path(plan.storage.folder)) if "disk" in homes(plan.layout) else None


def lacks_disk(plan: Plan) -> Iterator[str]:
    """Yields why the folder of a home on the disk cannot be used."""
    if "disk" in homes(plan.layout):
        folder, direct = Path(plan.storage.folder), plan.storage.direct
        yield from problem_of(partial(require_folder, folder, direct=direct))


def problem_of(act: Callable[[], object]) -> Iterator[str]:
    """Yields the sentence that `act` refuses with, if it does."""
    try:
        act()
    except UserError as problem:
        yield str(problem)


def is_elsewhere(run: Run) -> bool:
    """Whether a run is meant for other machines than this one, by the cluster that it names."""
    return run.cluster is not None and split_size(run.cluster)[0] != HERE and not has_card()


def _refuse_there(plan: Plan, cluster: str) -> None:
    from howdah.cli.fits import refuse_elsewhere

    refuse_elsewhere(plan, cluster_named(cluster, devices=plan.layout.world), cluster)


def _with_one_replica(run: Run) -> Run:
    """`run` with dp1 in place of dp*, which may be any number of replicas."""
    words = ["dp1" if word == "dp*" else word for word in run.layout.split()]
    return replace(run, layout=" ".join(words))


def _lacks_here(run: Run, *, force: bool) -> Iterator[str]:
    """Yields what this machine lacks for a run; of one that has no plan, only its settings."""
    on_cards = run.device == "cuda"
    machine = Machine(None, None, usable_cores(), cuda=0, cache=Path())
    machine = this_machine() if on_cards else machine
    yield from lacks_of(machine, run)
    try:
        plan = plan_of(run, parse_layout(run.layout))
    except UserError as problem:
        if not problems_of(run, None):
            yield str(problem)
        return
    yield from lacks_disk(plan)
    world = plan.layout.world
    yield from code_problems(run.train, run.method, ranks=world)
    if is_elsewhere(run):
        yield from problem_of(partial(_refuse_there, plan, str(run.cluster)))
        return
    if on_cards and machine.cuda:
        from howdah.host.devices import require_cards

        yield from problem_of(partial(require_cards, world, visible=visible_cards()))
    elif not (on_cards or force):  # only torch knows a GPU's memory
        room = Room(free_memory(), usable_cores(), world, disk=free_disk(plan))
        yield from problem_of(partial(refuse_too_large, plan, room))
