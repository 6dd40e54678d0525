"""A worker of a run with servers: pull, forward, backward, push as it goes, at its own pace.

Where the layout has several ranks (tp2 server2), each runs this, over a transport of the worker's
own. The first joins the servers and tells the others its clock and incarnations; it tells of steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

import torch

from howdah.comm.transport import SingleRank, Transport
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.served import PulledWeights
from howdah.server.client import Client
from howdah.server.way import Way
from howdah.text.batches import Micro, Rows, micros, order_of
from howdah.text.tokens import Corpus
from howdah.train.job import Job
from howdah.train.resume import Start
from howdah.train.served import chunks_for, pace_of, sync_of
from howdah.train.served_trace import Keep
from howdah.train.step import StepContext, accumulate, count_tokens

Tell = Callable[[dict[str, object]], None]  # reports to the process that sees to the run


def work(  # noqa: PLR0913 (facts that have nothing in common)
    job: Job,
    place: int,
    way: Way,
    *,
    start: Start,
    corpus: Corpus,
    tell: Tell,
    leave: Callable[[], object] | None = None,
    keep: Keep | None = None,
    transport: Transport | None = None,
) -> int:
    """Trains in a place until the run's last step; returns the clock.

    tell   is called after every step
    leave  whether to leave between two steps, so that another worker may take the place; one rank
           that leaves does so for all
    keep   takes what it did last
    transport  between the ranks of the worker; None: it is one
    """
    transport = transport or SingleRank()
    first = transport.rank == 0
    chunks = chunks_for(job)
    clients: list[Client] = []

    def connect(made: Mapping[str, FlatUnit]) -> Client:
        clients.append(Client(way, place, chunks, made, record.call, rank=mesh.rank))
        return clients[0]

    def agree(told: list[int]) -> list[int]:
        with mesh.counters.aside():
            return [*map(int, mesh.world.sum_scalars([number * first for number in told]))]

    def leaves() -> bool:
        with mesh.counters.aside():
            return bool(leave and any(mesh.world.sum_scalars([float(bool(leave()))])))

    with connect_mesh(replace(job.layout, server=0), transport, torch.device("cpu")) as mesh:
        record = mesh.counters.recorder
        placed = apply(job.plan, mesh=mesh, fill=start.fill, connect=connect)
        context = StepContext(placed, mesh, job.method, job.seed)
        client, step = clients[0], clients[0].join(sync_of(job).begins, agree)
        order = order_of(corpus, sequence=job.data.sequence_length, seed=job.seed)
        pace, micro, sync = pace_of(job, start), job.plan.micro_batch, sync_of(job)
        rows = Rows(micro, sync.workers, place)
        while step < job.train.steps and not leaves():
            batch = micros(corpus, order, rows, first=pace.first(step), size=pace.size(step))
            client.trades = sync.barrier and step + 1 < job.train.steps
            with record.step(step + 1):
                told = _step(context, client, batch, step)
            if first:
                tell(told)
            step += 1
            every = job.train.save_every
            if keep and first and every and step % every == 0:
                keep(f"worker-{place}", record.steps)
        client.drain()
        mesh.world.barrier()  # the first to leave does so for all
        client.close()
        if keep and first:
            keep(f"worker-{place}", record.steps)
    return step


def _step(context: StepContext, client: Client, batch: list[Micro], step: int) -> dict[str, object]:
    """Pulls, computes and pushes one step; what is told of it."""
    began, waited = perf_counter(), context.mesh.waited.seconds
    pushed, pulled = client.moved
    client.clock, client.tokens = step, float(count_tokens(batch))
    gatherer = context.placed.gatherer
    assert isinstance(gatherer, PulledWeights)
    gatherer.updated()
    total = float(accumulate(context, batch, step=step, tokens=1.0))
    seconds, moved = perf_counter() - began, client.moved
    return {
        "step": step + 1,
        "loss": total,
        "tokens": client.tokens,
        "seconds": seconds,
        "waited": context.mesh.waited.seconds - waited,
        "queue": client.deepest,
        "queued": client.queued,
        "came_back": client.came_back,
        "push_rate": (moved[0] - pushed) / seconds,
        "pull_rate": (moved[1] - pulled) / seconds,
    }
