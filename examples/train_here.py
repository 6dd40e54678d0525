"""Trains a recipe from a script, on worker processes of this machine.

python examples/train_here.py recipes/laptop.toml train.steps=20 folder=runs/script
"""

import sys
from pathlib import Path

from howdah import Workers, load_run, resolve_run
from howdah.cli.environment import this_machine
from howdah.comm.transport import Transport
from howdah.train.job import Job
from howdah.train.loop import Outcome, train


def run(transport: Transport, job: Job) -> Outcome:
    """Trains on this rank. All ranks call together."""
    return train(job, transport)


def main(recipe: str, *overrides: str) -> None:
    """Resolves the recipe as `howdah train` does, trains it, and prints how the run ended."""
    job = resolve_run(load_run(Path(recipe), overrides), this_machine())
    ranks = job.layout.world
    with Workers(ranks, threads=job.threads) as workers:
        outcome, *_ = workers.run(run, job, ranks=ranks)
    print(f"{job.name}: {outcome.step} steps on {job.layout}")


if __name__ == "__main__":
    main(*sys.argv[1:])
