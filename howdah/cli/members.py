"""`howdah server` and `howdah worker`: members that join a run from any machine.

    node0   howdah train RECIPE --listen node0:29400
    node1   howdah server RECIPE --join node0:29400
    node2   howdah worker RECIPE --join node0:29400

All start from the same recipe and changes, and with the run's secret. What is compared is in
`train/gathering.py`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from howdah.base.errors import UserError
from howdah.base.signals import listen
from howdah.cli.environment import launched, this_machine
from howdah.cli.errors import in_words
from howdah.config.auto import is_auto
from howdah.config.recipe import load_run, resolve_run
from howdah.train.job import Job

if TYPE_CHECKING:
    from howdah.text.tokens import Corpus

Recipe = Annotated[Path, typer.Argument(help="the recipe of the run, as its coordinator has it")]
Overrides = Annotated[list[str] | None, typer.Argument(help="its changes")]
Address = Annotated[
    str, typer.Option("--join", metavar="HOST:PORT", help="where howdah train --listen runs")
]
EVERYWHERE = ("0.0.0.0", "::", "*")


def server(recipe: Recipe, overrides: Overrides = None, join: Address = "") -> None:
    """Join the run of RECIPE as a parameter server: `howdah train --listen` sees to it."""
    from howdah.train.member import serve_there

    _join(recipe, overrides, join, serve_there)


def worker(recipe: Recipe, overrides: Overrides = None, join: Address = "") -> None:
    """Join the run of RECIPE as a worker; Ctrl-C leaves it after the step that is computed."""
    from howdah.train.member import work_there

    _join(recipe, overrides, join, work_there)


def _join(recipe: Path, overrides: list[str] | None, join: str, play: Callable[..., None]) -> None:
    """Prepares what a member needs, joins, and exits when its part is over."""
    if not join:
        raise UserError("--join HOST:PORT says where howdah train --listen runs, and is missing")
    if launched():
        raise UserError("servers and workers are started one by one, not by torchrun")
    run = load_run(recipe, overrides or [])
    if is_auto(run):
        raise UserError("layout=auto is settled for one machine; name the layout of the run")
    machine = this_machine()
    job = resolve_run(run, machine)
    at = require_joinable(job, join, "--join")
    secret = _secret(job)
    import torch

    with in_words(), listen(patient=True) as request:
        torch.set_num_threads(job.threads)
        job, corpus = _prepared(job)
        play(job, corpus, request, at=at, secret=secret)
    sys.exit(128 + request.signal if request.signal else 0)


def _prepared(job: Job) -> tuple[Job, "Corpus"]:
    """The job with its length in steps, and its tokens."""
    from dataclasses import replace

    from howdah.text.batches import order_of
    from howdah.train.length import in_steps
    from howdah.train.start import prepare_tokens

    corpus = prepare_tokens(job, print, check=True)
    order = order_of(corpus, sequence=job.plan.sequence, seed=job.seed)
    train = in_steps(job.train, job.batch, order.sequence, sum(order.samples))
    return replace(job, train=train), corpus


def require_joinable(job: Job, address: str, option: str = "--listen") -> tuple[str, int]:
    """The address at which members of a run meet. Raises UserError for one that is none, and for a
    run that nobody can join.
    """
    from howdah.server.addresses import read_address

    if not job.method.sync:
        raise UserError(
            f"{option} is for runs whose workers join when they like, and this one has no "
            "method.sync; ranks on several machines are started by torchrun "
            "(docs/how-to/two-machines.md)"
        )
    if (ranks := job.layout.workers) > 1:
        raise UserError(
            f"{option}: a worker that joins is one process so far, and layout '{job.layout}' gives "
            f"it {ranks} ranks; drop tp{job.layout.tp}, or start all on one machine by howdah train"
        )
    host, port = read_address(address, option)
    if host in EVERYWHERE:
        raise UserError(f"{option} {address} is every interface: name the address of one of them")
    _secret(job)
    return host, port


def _secret(job: Job) -> bytes:
    from howdah.comm.secret import secret_of
    from howdah.comm.settings import read_settings

    require_certificates(job)
    return secret_of(read_settings(), job.plan.comm.trust)


def require_certificates(job: Job) -> None:
    """Raises UserError for files of `comm.tls` that are of no use."""
    from howdah.comm.tls import sealing

    sealing(job.plan.comm.tls, calls=True)


def train_gathered(job: Job, at: str, *, say: Callable[[str], None], restarts: int) -> int:
    """Sees to a run whose members join at an address; returns its exit code."""
    from howdah.train.gathering import train_gathered as gathered

    where = require_joinable(job, at)
    return gathered(job, at=where, secret=_secret(job), show=say, restarts=restarts)
