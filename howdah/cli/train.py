"""`howdah train`.

A run is checked before any process is started, so that a mistake ends with one sentence and exit
code 2. `train` starts its ranks itself, or is one of the ranks that torchrun has started, which
has set environment variables.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Annotated

import typer

from howdah.base.errors import UserError, named, pasted, several
from howdah.base.files import kind_of
from howdah.base.output import lasting_output
from howdah.base.processes import die_with_parent
from howdah.base.signals import EARLY, Stopped, listen
from howdah.cli import members
from howdah.cli.auto import settled, settled_by_all
from howdah.cli.check import and_the_rest, file_problems, free_disk, lacks_disk, problem_of
from howdah.cli.environment import (
    by_torchrun,
    first_here,
    launched,
    number_in,
    several_machines,
    this_machine,
    visible_cards,
)
from howdah.cli.errors import in_words, report
from howdah.cli.hosts import with_algorithms
from howdah.config.auto import Settled, is_auto, keep_why
from howdah.config.history import (
    changes_since,
    refuse_accident,
    refuse_in_vain,
    refuse_other_start,
    remember,
)
from howdah.config.recipe import Machine, Run, folder_of, load_run, resolve_run, resolved
from howdah.config.save import save_run
from howdah.config.shipped import found, which
from howdah.host.facts import free_memory, has_card
from howdah.search.capacity import Room, refuse_too_large
from howdah.text.sources import unreadable
from howdah.train.inputs import code_problems
from howdah.train.job import Job
from howdah.train.notes import algorithm_note, device_note, notes_of, rate_note, sample_note
from howdah.train.run_folder import folder_problems

if TYPE_CHECKING:
    from howdah.comm.launch import Seat
    from howdah.comm.transport import Transport

SAVE_SECONDS = 600  # how long a stopped run may take to save before its processes are killed

Recipe = Annotated[
    Path,
    typer.Argument(help="a recipe (.toml), a run folder to resume, or a shipped recipe"),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help='changes, such as layout="dp2 x4" train.steps=100')
]


def train(  # noqa: PLR0917 (each is an option)
    recipe: Recipe,
    overrides: Overrides = None,
    restarts: Annotated[int, typer.Option(help="start again after a failure")] = 0,
    force: Annotated[bool, typer.Option(help="even if the machine seems too small")] = False,
    resume: Annotated[bool, typer.Option(help="go on, although settings have changed")] = False,
    at: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="servers and workers join there")
    ] = "",
) -> None:
    """Train RECIPE, or resume a run folder. `howdah keys` lists what KEY=VALUE can change."""
    if restarts < 0:
        raise UserError(f"--restarts is {restarts}; it must be at least 0")
    load = partial(load_run, recipe, overrides or [])
    sys.exit(start(load, recipe, restarts=restarts, force=force, resume=resume, at=at))


def start(
    load: Callable[[], Run],
    recipe: Path,
    *,
    restarts: int = 0,
    force: bool = False,
    resume: bool = False,
    at: str = "",
) -> int:
    """Trains the run that `load` reads, of a recipe or run folder; returns its exit code. Raises
    UserError with everything that keeps it from starting.
    """
    among = launched()
    with and_the_rest(force=force or among):
        run = load()
    if by_torchrun():
        die_with_parent(SIGTERM)  # if torchrun dies, so does this rank
    machine = this_machine(among=among)
    auto, store = None, None  # which serves the other ranks while it is kept
    with and_the_rest(force=force or among):
        if is_auto(run):
            auto, store = settled_by_all(run, machine) if among else (settled(run, machine), None)
            run = auto.run
        run, chosen = with_algorithms(run, machine)
        job = resolve_run(run, machine)
    if among and job.method.sync:
        raise UserError("method.sync starts its own processes: use howdah train without torchrun")
    if at:
        members.require_joinable(job, at)
    members.require_certificates(job)
    lacks_room = [] if at else [*_lacks_room(job, machine, force=force)]
    own = [*code_problems(job.train, job.method, ranks=job.processes)]
    first = not among or os.environ["RANK"] == "0"
    if first:
        own += folder_problems(folder_of(run), job.data)
    if lacking := [*lacks_room, *_lacks_compiler(job), *own]:
        raise UserError(several([*dict.fromkeys([*lacking, *file_problems(run)])]))
    said = [which(str(recipe)), f"algorithms  {chosen}" if chosen else ""] if first else []
    notes = filter(None, _device_notes(run, job, machine) if first else ())
    said = [*filter(None, said), *(f"note        {note}" for note in notes)]
    for line in said:
        print(line, flush=True)
    folder = kind_of(found(recipe)) == "folder"
    with ExitStack() as after:
        said += [_layout_line(auto)] if auto and first else []
        ready = partial(_make_ready, run, job, first=first, said=said)
        ready = partial(ready, resume=resume or folder, asked=resume)
        if auto and first:
            ready = partial(_tell_layout, ready, auto)
        if among:
            with in_words():
                job = ready(after=after)
            code = _train_launched(job)
            del store
            return code
        return _train_listening(ready, after, restarts, at)


def _train_listening(
    ready: Callable[..., Job], after: ExitStack, restarts: int, at: str = ""
) -> int:
    """Trains on this machine the job that `ready` prepares; returns the run's exit code."""
    code: int | None = None
    try:
        with in_words():
            job = ready(after=after)
        with listen(patient=True):  # training handles stop signals itself
            if job.method.sync:
                code = _train_served(job, restarts, at)
            else:
                here = job.layout.world > 1 or restarts
                code = _train_here(job, restarts) if here else _train_alone(job)
    except Stopped as stopped:
        if code is None:  # otherwise training has ended already
            report(EARLY)
            code = 128 + stopped.number
    return code


def _lacks_room(job: Job, machine: Machine, *, force: bool) -> Iterator[str]:
    """Yields why this machine is too small for its ranks; only of GPUs if `force` is set."""
    import torch

    from howdah.host.devices import require_cards
    from howdah.host.precision import require_precision

    ranks, device = machine.local_world or job.processes, 0
    if job.device == "cuda":
        if unusable := [*problem_of(partial(require_cards, ranks, visible=visible_cards()))]:
            yield from unusable
            return  # the cards are not asked for more
        sharing = -(-ranks // machine.cuda)
        device = torch.cuda.get_device_properties(0).total_memory // sharing
    yield from problem_of(partial(require_precision, job.method.precision, job.device))
    yield from lacks_disk(job.plan)
    room = Room(free_memory(), machine.cores, ranks, device, free_disk(job.plan))
    if not force:
        yield from problem_of(partial(refuse_too_large, job.plan, room))


def _device_notes(run: Run, job: Job, machine: Machine) -> Iterator[str]:
    """Yields what the run does not do with the GPUs of this machine, and why."""
    lack = machine.no_cuda if has_card() else ""
    yield device_note(run.device, job.device, cards=machine.cuda, lack=lack)
    if job.device == "cuda":
        import torch

        room = torch.cuda.get_device_properties(0).total_memory
        yield sample_note(job.plan, job.train.prompt, room=room)


def _lacks_compiler(job: Job) -> Iterator[str]:
    """Yields that torch.compile would not find its compiler, which it asks for late."""
    name = os.environ.get("CXX", "g++")
    if job.compile and job.device == "cpu" and not shutil.which(name):
        yield (
            f"compile is true, but the C++ compiler that torch.compile uses, {named(name)}, is not "
            "found; install it, name another in CXX, or leave compile out"
        )
    if job.compile and job.device == "cuda" and not find_spec("triton"):
        yield (
            "compile is true, but triton, with which torch.compile writes kernels for GPUs, is not "
            "installed; install it beside torch, or leave compile out"
        )


def _make_ready(  # noqa: PLR0913 (what a start was asked, all by keyword)
    run: Run,
    job: Job,
    *,
    first: bool,
    said: Sequence[str] = (),
    resume: bool = True,
    asked: bool = True,
    after: ExitStack | None = None,
) -> Job:
    """Prepares a run's tokens, which finds its remaining mistakes, and returns the job with its
    length in steps: 1. what is wrong so far, 2. the tokens, 3. the start, 4. what the run is told,
    5. the run folder.

    The `first` process also prepares the start, and writes run.toml into the run folder, and into
    log.txt what was `said` before and here; `after` removes that if no step follows. Without
    `resume`, settings that change the result must be those of the run that is there; without
    `asked`, also the held-out text.
    """
    from howdah.checkpoint.folders import steps
    from howdah.text.batches import order_of
    from howdah.train.console import RunConsole, to_each
    from howdah.train.length import in_steps
    from howdah.train.metrics import append
    from howdah.train.run_folder import LOG, lock, remove_start
    from howdah.train.start import prepare_start, prepare_tokens, require_inputs

    lines = [*said]
    say = to_each(RunConsole(rank=0 if first else 1).say, lines.append)
    now = resolved(run, job)
    with lock(job.folder) if first else nullcontext() as there:
        if after and there:
            after.callback(remove_start, there)
        done = max(steps(job.folder / "checkpoints"), default=0) if first else 0
        changed = changes_since(job.folder, now) if done else {}  # 1
        adapts = job.method.adapter is not None
        asks = [partial(refuse_other_start, changed, job.folder, beside=adapts)]
        if not resume:
            steps_now = 0 if job.train.epochs else job.train.steps
            accident = partial(refuse_accident, changed, job.folder, done=done, steps=steps_now)
            asks = [accident, *asks]
        wrong = [problem for ask in asks for problem in problem_of(ask)]
        inputs = [*problem_of(partial(require_inputs, job))] if first else []
        if wrong or inputs:
            raise UserError(several([*wrong, *(inputs or unreadable(job.data))]))
        # 2. One rank of each machine checks the files that all its ranks will read.
        corpus = prepare_tokens(job, say, check=first_here())
        order = order_of(corpus, sequence=job.plan.sequence, seed=job.seed)
        train = in_steps(job.train, job.batch, order.sequence, sum(order.samples))
        job = replace(job, train=train)
        now = resolved(run, job)
        changed = changes_since(job.folder, now) if done else {}
        if first:  # 3
            other = asked or any(key.startswith("data.validation") for key in changed)
            prepare_start(job, corpus, other_held_out=other, parts=several_machines())
            refuse_in_vain(changed, job.folder, done=done, steps=train.steps)
        rates = rate_note(changed, job.method.lr, steps=train.steps, done=done)  # 4
        orders = algorithm_note(changed, done=done)
        for note in [*notes_of(job.plan, job.train), rates, orders]:
            if note:
                say(f"note        {note}")
        if first and done < train.steps:  # 5; what no step has used is not how the run was trained
            save_run(now, job.folder / "run.toml")
            remember(job.folder, done, changed)
            with suppress(OSError):  # a run trains without its log
                for line in lines:
                    append(job.folder / LOG, line)
    return job


def _layout_line(auto: Settled) -> str:
    return f"layout      {auto.told}"


def _tell_layout(ready: Callable[..., Job], auto: Settled, *, after: ExitStack) -> Job:
    """Prepares a run, says which layout was chosen, and keeps in the run folder why."""
    job = ready(after=after)
    line = _layout_line(auto)
    print(line, flush=True)
    try:
        keep_why(auto, job.folder, line)
    except OSError as error:
        print(f"note        why is not written: {error.strerror}", flush=True)
    return job


def _train_alone(job: Job) -> int:
    """Trains in this process; returns the run's exit code."""
    from howdah.comm.transport import SingleRank

    with in_words():
        return _train(job, SingleRank(), local_rank=0)


def _train_served(job: Job, restarts: int, at: str = "") -> int:
    """Trains with workers and servers that do not wait for each other, and then evaluates in this
    process; returns the run's exit code.

    at  where servers and workers join; empty: they are started here
    """
    from howdah.train.console import RunConsole
    from howdah.train.resume import choose
    from howdah.train.serving import alone, train_served

    say, steps = RunConsole(0).say, job.train.steps
    if at:
        code = members.train_gathered(job, at, say=say, restarts=restarts)
    else:
        code = train_served(job, show=say, restarts=restarts)
    if code:
        return code
    found = choose(job.folder / "checkpoints", say)
    if not found or found.step < steps:  # one process would train what is missing
        there = f"the newest checkpoint is of step {found.step}" if found else "there is none"
        again = "the same commands" if at else f"howdah train {pasted(job.folder)}"
        raise UserError(f"step {steps} is not among the checkpoints: {there}; go on with {again}")
    return _train_alone(alone(job))


def _train_here(job: Job, restarts: int) -> int:
    """Trains in processes that are started on this machine; returns the run's exit code."""
    from howdah.comm.launch import Terms, launch
    from howdah.train.checkpointing import remove_drafts

    terms = Terms(
        ranks=job.layout.world,
        save_seconds=SAVE_SECONDS,
        preload=["howdah.train.loop", "torch._dynamo"],
        restarts=restarts,
    )
    ending = launch(train_rank, [job], terms, say=report)
    if ending.code:
        remove_drafts(job.folder)
    if ending.kind in ("killed", "lost"):
        report(f"{ending.why}; the others were ended; go on with the same command")
    elif ending.why:
        report(ending.why.rstrip())
    return ending.code


def train_rank(seat: "Seat", job: Job) -> int:
    """Trains as a rank that this program has started; returns the rank's exit code."""
    from howdah.comm.rendezvous import choose
    from howdah.host.devices import own_device

    lasting_output()
    with listen(last=True) as request:
        device = own_device(job.device, seat.rank)
        transport = choose(seat.store, rank=seat.rank, size=seat.size, device=device)
        request.patient = True  # training handles stop signals itself
        return _train(job, transport, local_rank=seat.rank)


def _train_launched(job: Job) -> int:
    """Trains as a rank that torchrun has started; returns the rank's exit code."""
    from howdah.comm.rendezvous import join
    from howdah.comm.transport import SingleRank
    from howdah.host.devices import own_device

    local_rank = number_in("LOCAL_RANK", least=0)
    with in_words(), listen() as request:
        device = own_device(job.device, local_rank)
        hosts = job.plan.comm.hosts
        alone = job.layout.world == 1
        transport = SingleRank() if alone else join(device=device, hosts=hosts)
        request.patient = True  # training handles stop signals itself
        return _train(job, transport, local_rank=local_rank)


def _train(job: Job, transport: "Transport", *, local_rank: int) -> int:
    from howdah.train.loop import train as train_loop

    with closing(transport):  # until then the other ranks watch this one
        outcome = train_loop(job, transport, local_rank=local_rank)
    return 128 + outcome.signal if outcome.signal else 0
