"""`howdah verify`: the case is chosen and checked before any process is started."""

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from howdah.base.errors import UserError, shown
from howdah.cli.environment import launched, ready_torch, this_machine, visible_cards
from howdah.cli.errors import in_words
from howdah.cli.hosts import with_algorithms
from howdah.cli.train import Overrides, Recipe
from howdah.config.recipe import Run, load_run, resolve_run

if TYPE_CHECKING:
    from howdah.verify.case import Case
    from howdah.verify.verify import Verdict

DEVICES = ("cpu", "cuda")


def verify(  # noqa: PLR0917  each is an option of the command
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="updates to compare")] = 3,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bf16")] = "float64",
    full: Annotated[bool, typer.Option(help="the run itself instead of its miniature")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda; else the recipe's, or the CPU")] = "",
) -> None:
    """Prove that a run's layout computes the gradients of one device; exit code 1 if not."""
    ready_torch()
    from howdah.comm.spawn import Workers
    from howdah.host.devices import require_cards, sharing
    from howdah.verify.case import check_case, full_case, miniature
    from howdah.verify.verify import report
    from howdah.verify.verify import verify as prove

    precision = check_case(dtype, steps=steps)
    if device and device not in DEVICES:
        raise UserError(f"--device {shown(device)} is unknown; use cpu or cuda")
    run = load_run(recipe, [*(overrides or []), *([f"device={device}"] if device else [])])
    machine = this_machine(among=launched())
    if launched():
        run, _ = with_algorithms(run, machine)
    job, world = resolve_run(run, machine), machine.world or 0
    where = device_of(run.device)
    if full:
        case = full_case(job, precision=precision, steps=steps, device=where)
    else:
        case = miniature(job, precision=precision, steps=steps, device=where, world=world)
    if launched():
        verdict, proved = _among(case, run, world, layout=str(job.layout))
        if verdict is None:
            sys.exit(0 if proved else 1)
    else:
        if case.device == "cuda":
            require_cards(case.layout.world, visible=visible_cards())
        with in_words(), Workers(case.layout.world, device=case.device) as workers:
            verdict = prove(case, workers)
    if case.layout != job.layout:
        print(f"the miniature of {job.layout}:")
    if case.device == "cuda" and (shared := sharing(case.layout.world, machine.cuda)):
        print(shared)
    for line in report(verdict):
        print(line)
    sys.exit(0 if verdict.proved else 1)


def _among(case: "Case", run: Run, world: int, *, layout: str) -> "tuple[Verdict | None, bool]":
    """The verdict of the ranks that torchrun has started, on rank 0; and on all, whether the layout
    is proved. Raises UserError.
    """
    from howdah.verify.launched import Launched
    from howdah.verify.verify import verify as prove

    if case.layout.world != world:
        what, instead = f"the layout is {layout}", ""
        if str(case.layout) != layout:
            what = f"the miniature of {layout} is {case.layout}"
            instead = ", or give --full for the run itself"
        told = f"{what}: start {case.layout.world}{instead}"
        raise UserError(f"torchrun has started {world} processes, and {told}")
    if case.device == "cuda":
        raise UserError("GPUs are verified on one machine: leave torchrun out")
    with in_words(), closing(Launched(run.comm.hosts)) as ranks:
        verdict = None
        if ranks.rank == 0:
            verdict = prove(case, ranks)
        else:
            ranks.follow(case)
        proved = ranks.agree(bool(verdict and verdict.proved))
    return verdict, proved


def device_of(asked: str) -> str:
    """The device of a verification: `auto` is the CPU, where a miniature needs no card and the
    bytes of activations are known.
    """
    return "cuda" if asked == "cuda" else "cpu"
