"""`howdah server` and `howdah worker`: members that join a run from any machine.

    node0   howdah train RECIPE --listen node0:29400
    node1   howdah server RECIPE --join node0:29400
    node2   howdah worker RECIPE --join node0:29400

All start from the same recipe and changes, and with the run's secret. What is compared is in
`train/gathering.py`. A worker whose layout has several ranks (tp2 server2) starts them on its
machine, or is started on several by a torchrun of its own; the run sees one member.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Annotated

import typer

from howdah.base.errors import UserError
from howdah.base.processes import die_with_parent
from howdah.base.signals import EARLY, Stopped, StopRequest, listen
from howdah.cli.environment import by_torchrun, first_here, launched, number_in, this_machine
from howdah.cli.errors import in_words, report
from howdah.config.auto import is_auto
from howdah.config.recipe import load_run, resolve_run
from howdah.train.job import Job

if TYPE_CHECKING:
    from howdah.comm.launch import Seat
    from howdah.server.addresses import Address
    from howdah.text.tokens import Corpus

Recipe = Annotated[Path, typer.Argument(help="the recipe of the run, as its coordinator has it")]
Overrides = Annotated[list[str] | None, typer.Argument(help="its changes")]
Join = Annotated[
    str, typer.Option("--join", metavar="HOST:PORT", help="where howdah train --listen runs")
]
EVERYWHERE = ("0.0.0.0", "::", "*")
MEETING = 600.0  # seconds that the ranks of a worker wait for torchrun's store
LEAVING = 60.0  # and have to finish a step after a stop signal
Play = Callable[..., None]


def server(recipe: Recipe, overrides: Overrides = None, join: Join = "") -> None:
    """Join the run of RECIPE as a parameter server: `howdah train --listen` sees to it."""
    from howdah.train.member import serve_there

    if launched():
        raise UserError("servers are started one by one, not by torchrun")
    _join(recipe, overrides, join, serve_there)


def worker(recipe: Recipe, overrides: Overrides = None, join: Join = "") -> None:
    """Join the run of RECIPE as a worker; Ctrl-C leaves it after the step that is computed. Its
    ranks, where the layout has several, are started here, or by torchrun.
    """
    if by_torchrun():
        die_with_parent(SIGTERM)  # if torchrun dies, so does this rank
    _join(recipe, overrides, join, _work)


def _join(recipe: Path, overrides: list[str] | None, join: str, play: Play) -> None:
    """Prepares what a member needs, joins, and exits when its part is over."""
    if not join:
        raise UserError("--join HOST:PORT says where howdah train --listen runs, and is missing")
    run = load_run(recipe, overrides or [])
    if is_auto(run):
        raise UserError("layout=auto is settled for one machine; name the layout of the run")
    among = launched()
    # What a launcher has started is one worker, not all of the layout.
    job = resolve_run(run, replace(this_machine(among=among), world=None))
    at = require_joinable(job, join, "--join")
    if among and (world := number_in("WORLD_SIZE")) != job.layout.workers:
        raise UserError(
            f"torchrun has started {world} ranks, and layout '{job.layout}' gives a worker "
            f"{job.layout.workers}; each worker has a torchrun of its own"
        )
    secret = _secret(job)
    import torch

    with in_words(), listen(patient=True) as request:
        torch.set_num_threads(job.threads)
        job, corpus = _prepared(job)
        play(job, corpus, request, at=at, secret=secret)
    sys.exit(128 + request.signal if request.signal else 0)


def _prepared(job: Job) -> tuple[Job, "Corpus"]:
    """The job with its length in steps, and its tokens."""
    from howdah.text.batches import order_of
    from howdah.train.length import in_steps
    from howdah.train.start import prepare_tokens

    corpus = prepare_tokens(job, print, check=first_here())
    order = order_of(corpus, sequence=job.plan.sequence, seed=job.seed)
    train = in_steps(job.train, job.batch, order.sequence, sum(order.samples))
    return replace(job, train=train), corpus


def _work(
    job: Job, corpus: "Corpus", request: StopRequest, *, at: "Address", secret: bytes
) -> None:
    """Works as one process, as a rank of torchrun's, or by ranks that are started here."""
    from howdah.train.member import work_there

    if launched():
        _work_launched(job, corpus, request, at=at, secret=secret)
    elif job.layout.workers > 1:
        _work_here(job, at=at, secret=secret)
    else:
        work_there(job, corpus, request, at=at, secret=secret)


def _work_launched(
    job: Job, corpus: "Corpus", request: StopRequest, *, at: "Address", secret: bytes
) -> None:
    """Works as a rank that torchrun has started."""
    import torch.distributed as dist

    from howdah.comm.announce import launchers_store
    from howdah.comm.launch import Seat
    from howdah.comm.rendezvous import join
    from howdah.comm.settings import read_settings
    from howdah.comm.transport import SingleRank
    from howdah.train.member import work_there

    store, rank, size = launchers_store(MEETING, whole=True)
    own = dist.PrefixStore(f"howdah/{read_settings().restart}/worker", store)
    meet = partial(join, hosts=job.plan.comm.hosts) if size > 1 else SingleRank
    work_there(job, corpus, request, at=at, secret=secret, seat=Seat(rank, size, own), meet=meet)


def _work_here(job: Job, *, at: "Address", secret: bytes) -> None:
    """Starts the ranks of a worker on this machine, and exits with their code if that is not 0."""
    from howdah.comm.launch import Terms, launch

    terms = Terms(job.layout.workers, save_seconds=LEAVING, preload=["howdah.train.member"])
    try:
        ending = launch(work_rank, [job, at, secret], terms, say=report)
    except Stopped as stopped:
        report(EARLY)
        sys.exit(128 + stopped.number)
    if ending.why:
        report(ending.why.rstrip())
    if ending.code:
        sys.exit(ending.code)


def work_rank(seat: "Seat", job: Job, at: "Address", secret: bytes) -> int:
    """Works as a rank that this program has started; returns its exit code."""
    import torch

    from howdah.comm.rendezvous import choose
    from howdah.train.member import work_there
    from howdah.train.serving import corpus_of

    torch.set_num_threads(job.threads)
    with listen(patient=True) as request:
        meet = partial(choose, seat.store, rank=seat.rank, size=seat.size)
        work_there(job, corpus_of(job), request, at=at, secret=secret, seat=seat, meet=meet)
    return 128 + request.signal if request.signal else 0


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
