"""The commands that use a run's checkpoints, and `doctor`, which examines the machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from howdah.cli.environment import ready_torch


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
    ready_torch()
    from howdah.train.finished_run import open_run
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


def export(
    folder: Annotated[Path, typer.Argument(help="a run folder")],
    to: Annotated[Path, typer.Option(help="the Hugging Face folder to write")],
    best: Annotated[bool, typer.Option(help="the best checkpoint instead of the newest")] = False,
) -> None:
    """Write a run's weights as a Hugging Face folder."""
    ready_torch()
    from howdah.train.finished_run import open_run

    opened = open_run(folder, say=lambda line: print(line, file=sys.stderr), best=best)
    opened.export(to)
    print(f"step {opened.checkpoint.step} of {folder} is in {to}")


def doctor(
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

        sys.exit(doctor_hosts(tune=measure))
    from howdah.host.doctor import doctor as examine
    from howdah.host.doctor import main_device
    from howdah.host.peak import measure_again

    if measure:
        measure_again(main_device(), cache)
    for finding in examine(cache):
        print(f"{finding.name:16s} {finding.value}")
        if finding.lack:
            print(f"{'':16s} {finding.lack}")
