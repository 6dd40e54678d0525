"""The commands: reads words and the environment, and calls one function each.

This is the only place where howdah reads the environment. Everything that can be wrong with a
run is checked before a process is started; then a mistake is one sentence and exit code 2.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from howdah import cli_bench, cli_plan
from howdah.plan.problems import BadInput
from howdah.run import Machine, Run, load_run, resolve_run, resolved, save_run
from howdah.train.job import Job

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plan, verify, train and resume transformer language models on more than one device.",
)

app.command()(cli_plan.plan)
app.command()(cli_plan.simulate)
app.command()(cli_plan.check)
app.command()(cli_plan.trace)
app.add_typer(cli_plan.draw_app, name="draw")
app.add_typer(cli_plan.cluster_app, name="cluster")
app.add_typer(cli_bench.bench_app, name="bench")

STOPPED = (130, 143)  # exit codes of ranks that were asked to stop, and have said so
SAVE_SECONDS = 600  # how long a stopped run may take to save before its processes are killed

Recipe = Annotated[Path, typer.Argument(help="a recipe (.toml), or a run folder to go on with")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help='changes, such as layout="dp2 x4" pace.steps=100')
]


def main() -> None:
    """The entry point: a user's mistake is a sentence on standard error and exit code 2."""
    try:
        app()
    except BadInput as mistake:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # of torchrun's ranks, one for each machine
            print(f"howdah: {mistake}", file=sys.stderr)
        sys.exit(2)


@app.command()
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train RECIPE: start its processes, or join those that torchrun has started."""
    run = load_run(recipe, overrides or [])
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        job = resolve_run(run, _machine(launched=True))
        _make_ready(run, job, first=os.environ["RANK"] == "0")
        _train_rank(job)
        return
    job = resolve_run(run, _machine(launched=False))
    _make_ready(run, job, first=True)
    sys.exit(_train_here(job) if job.layout.world == 1 else _launch(job))


def _machine(*, launched: bool) -> Machine:
    import torch

    environment = os.environ
    cache = environment.get("HOWDAH_CACHE") or environment.get("XDG_CACHE_HOME")
    return Machine(
        world=int(environment["WORLD_SIZE"]) if launched else None,
        local_world=int(environment.get("LOCAL_WORLD_SIZE", "1")) if launched else None,
        cores=len(os.sched_getaffinity(0)),
        cuda=torch.cuda.device_count(),
        cache=(Path(cache) if cache else Path.home() / ".cache") / "howdah",
    )


def _make_ready(run: Run, job: Job, *, first: bool) -> None:
    """Whatever can be wrong is found here; the `first` process writes the run down."""
    from howdah.train.folder import hold
    from howdah.train.ready import ready_start, ready_tokens
    from howdah.train.show import Silent

    say = print if first else Silent().say
    with hold(job.folder) if first else nullcontext():
        corpus = ready_tokens(job, say)
        if first:
            ready_start(job, corpus, say)
            save_run(resolved(run, job), job.folder / "run.toml")


def _train_here(job: Job) -> int:
    from howdah.comm.transport import Alone
    from howdah.train.loop import train as train_loop

    return train_loop(job, Alone()).exit_code


def _launch(job: Job) -> int:
    """Starts the layout's processes and waits for them; their exit code.

    Raises BadInput when a rank did.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from howdah.comm.spawn import launch

    try:
        launch(_train_rank, [job], ranks=job.layout.world, save_seconds=SAVE_SECONDS)
        return 0
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode not in STOPPED:
            print(_story(rank, failure), file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1


def _story(rank: int, failure: "ProcessFailure") -> str:
    """A defect, as the rank that met it saw it; that a rank died is a sentence. Raises BadInput
    when it was a mistake.
    """
    from howdah.comm.transport import PeerLost

    message, again = failure.message, "the others were ended; go on with the same command"
    if not isinstance(message, dict):  # the rank had no time to write anything: it was killed
        why = "; the system does so when memory runs out" if failure.exitcode == -9 else ""
        return f"howdah: rank {rank} failed: {message}{why}; {again}"
    what, _, sentence = message["message"].partition(": ")
    if what == BadInput.__name__:
        raise BadInput(sentence)
    if what == PeerLost.__name__:
        return f"howdah: {sentence}; {again}"
    return f"howdah: rank {rank} failed:\n{message['extraInfo']['py_callstack']}"


def _train_rank(job: Job) -> None:
    """One rank of a run, in a process that a launcher started.

    Returns when the run has ended. A stopped rank leaves by `sys.exit`: from one that returns,
    the launcher would first want the results of all, which it no longer asks for after a signal.
    """
    from howdah.comm.spawn import join
    from howdah.train.loop import train as train_loop

    transport = join(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    outcome = train_loop(job, transport, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    if outcome.exit_code:
        sys.exit(outcome.exit_code)


@app.command()
def verify(
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="updates to compare")] = 3,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bf16")] = "float64",
    full: Annotated[bool, typer.Option(help="the run itself instead of its miniature")] = False,
) -> None:
    """Prove that a run's layout computes the gradients of one device; exit code 1 if not."""
    from howdah.comm.spawn import Workers
    from howdah.verify.case import check_case, full_case, miniature
    from howdah.verify.verify import report
    from howdah.verify.verify import verify as prove

    precision = check_case(dtype, steps=steps)
    job = resolve_run(load_run(recipe, overrides or []), _machine(launched=False))
    make_case = full_case if full else miniature
    case = make_case(job, precision=precision, steps=steps)
    with Workers(case.layout.world) as workers:
        verdict = prove(case, workers)
    if case.layout != job.layout:
        print(f"the miniature of {job.layout}:")
    for line in report(verdict):
        print(line)
    sys.exit(0 if verdict.proved else 1)


@app.command()
def sample(  # noqa: PLR0913, PLR0917  each is an option of the command
    folder: Annotated[Path, typer.Argument(help="a run folder")],
    prompt: Annotated[str, typer.Argument(help="what the text begins with")],
    length: Annotated[int, typer.Option(help="tokens to add")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.8,
    top_k: Annotated[int, typer.Option(help="the k likeliest tokens only; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="the likeliest tokens that hold this share")] = 1.0,
    seed: Annotated[int, typer.Option(help="names the draw")] = 0,
) -> None:
    """Continue PROMPT with the newest checkpoint of a run."""
    from howdah.train.opened import open_run
    from howdah.train.sample import Draw, sample_text

    opened = open_run(folder, say=lambda line: print(line, file=sys.stderr))
    draw = Draw(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    parts = sample_text(
        opened.model(), opened.tokenizer(), prompt, length=length, draw=draw, end=opened.end
    )
    print(prompt, end="")
    for part in parts:
        print(part, end="", flush=True)
    print()


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="a run folder")],
    to: Annotated[Path, typer.Option(help="the Hugging Face folder to write")],
    best: Annotated[bool, typer.Option(help="the best checkpoint instead of the newest")] = False,
) -> None:
    """Write a run's weights as a Hugging Face folder."""
    from howdah.train.opened import open_run

    opened = open_run(folder, say=lambda line: print(line, file=sys.stderr), best=best)
    opened.export(to)
    print(f"step {opened.checkpoint.step} of {folder} is in {to}")


@app.command()
def doctor() -> None:
    """Say what this machine has, and what each lack means."""
    from howdah.comm.doctor import doctor as examine

    for finding in examine(_machine(launched=False).cache):
        print(f"{finding.name:16s} {finding.value}")
        if finding.lack:
            print(f"{'':16s} {finding.lack}")


if __name__ == "__main__":
    main()
