"""`howdah eval`: what a model scores on a task of a local file."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from howdah.cli.environment import ready_torch


def evaluate(
    folder: Annotated[Path, typer.Argument(help="a run folder, or a Hugging Face folder")],
    task: Annotated[Path, typer.Option(help="a task file (.toml or .json)")],
    best: Annotated[bool, typer.Option("--best", help="the best checkpoint of a run")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Score a model on a task: perplexity, last words, or the choice among answers."""
    ready_torch()
    from howdah.tasks.evaluate import evaluate_task
    from howdah.tasks.opened import open_model
    from howdah.tasks.task_file import questions, read_task

    read = read_task(task)
    asked = questions(read, task.parent)
    opened = open_model(folder, say=lambda line: print(line, file=sys.stderr), best=best)
    scores = evaluate_task(opened, opened.model(), read, asked)
    if as_json:
        rows = {"task": scores.kind, "samples": scores.samples, **scores.values}
        rows |= {f"{name}_stderr": error for name, error in scores.errors.items()}
        print(json.dumps(rows, indent=1))
        return
    lines = f"{scores.samples} line{'s' * (scores.samples != 1)}"
    print(f"{scores.kind}: {lines} of {read.file}")
    for name, value in scores.values.items():
        error = f" ± {scores.errors[name]:.4f}" if name in scores.errors else ""
        print(f"{name:16s} {value:.4f}{error}")
