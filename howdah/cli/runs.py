"""The commands that use a run's checkpoints, and `doctor`, which examines the machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from howdah.base.errors import UserError, shown
from howdah.cli.environment import ready_torch

STORED = {"float32": "float32", "bf16": "bfloat16"}  # torch's names


def export(
    folder: Annotated[Path, typer.Argument(help="a run folder")],
    to: Annotated[Path, typer.Option(help="the Hugging Face folder to write")],
    *,
    best: Annotated[bool, typer.Option(help="the best checkpoint instead of the newest")] = False,
    average: Annotated[bool, typer.Option(help="the average of the weights")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="the adapter alone, as PEFT's files")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="of the stored weights: float32, or bf16 in half the room")
    ] = "float32",
) -> None:
    """Write a run's weights as a Hugging Face folder."""
    if precision not in STORED:
        raise UserError(f"--precision is {shown(precision)}; it must be {' or '.join(STORED)}")
    if adapter and precision != "float32":
        raise UserError("--precision is of a whole model, and --adapter writes float32; drop one")
    ready_torch()
    import torch

    from howdah.train.finished_run import open_run

    opened = open_run(folder, say=_to_stderr, best=best, average=average)
    if adapter:
        from howdah.train.adapted import export_adapter

        export_adapter(opened.checkpoint, to)
    else:
        opened.export(to, dtype=getattr(torch, STORED[precision]))
    print(f"step {opened.checkpoint.step} of {folder} is in {to}")


def doctor(
    words: Annotated[
        list[str] | None, typer.Argument(help="with --hosts, such as comm.trust=network")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="measure the flop/s of mfu again; with --hosts, algorithms too"
        ),
    ] = False,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="the hosts and links of a run, under torchrun")
    ] = False,
) -> None:
    """Check this machine, and explain what is missing."""
    cache = ready_torch()
    if hosts:
        from howdah.cli.hosts import doctor_hosts

        sys.exit(doctor_hosts(words or (), tune=measure))
    if words:
        raise UserError(f"{shown(words[0])} is for doctor --hosts: give that too")
    from howdah.host.doctor import doctor as examine
    from howdah.host.doctor import main_device
    from howdah.host.peak import measure_again

    if measure:
        measure_again(main_device(), cache)
    for finding in examine(cache):
        print(f"{finding.name:16s} {finding.value}")
        if finding.lack:
            print(f"{'':16s} {finding.lack}")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
