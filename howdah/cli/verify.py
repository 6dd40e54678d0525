"""`howdah verify`: the case is chosen and checked before any process is started."""

import sys
from typing import Annotated

import typer

from howdah.base.errors import UserError, shown
from howdah.cli.environment import ready_torch, this_machine, visible_cards
from howdah.cli.errors import in_words
from howdah.cli.train import Overrides, Recipe
from howdah.config.recipe import load_run, resolve_run

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
    machine = this_machine()
    job = resolve_run(run, machine)
    make_case = full_case if full else miniature
    case = make_case(job, precision=precision, steps=steps, device=device_of(run.device))
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


def device_of(asked: str) -> str:
    """The device of a verification: `auto` is the CPU, where a miniature needs no card and the
    bytes of activations are known.
    """
    return "cuda" if asked == "cuda" else "cpu"
