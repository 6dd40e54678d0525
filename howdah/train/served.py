"""A run whose workers and servers do not wait for each other: what a server does, and a worker.

    server   its chunks of the weights ─ desk ─ door     saves when all workers have come so far
    worker   pull ─ forward, backward, push as it goes ─ pull …   step after step, at its own pace

Every worker takes its own rows of each step's samples, so that a step of all workers is a global
batch of `method.sync.workers` times the recipe's. Checkpoints are those of every run: the servers
write the pieces that they keep, under the step that the slowest worker has finished. Under bsp that
is the state between two steps; otherwise faster workers have added to it already, and a run that is
resumed takes those of their samples again.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from socket import socket
from time import perf_counter
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from howdah import __version__
from howdah.base.errors import UserError
from howdah.base.signals import StopRequest
from howdah.checkpoint.save import Saver
from howdah.checkpoint.snapshot import InMemory as Entry
from howdah.comm.handshake import Door
from howdah.comm.transport import SingleRank
from howdah.optim.learning_rate import learning_rate
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import DTYPES, FlatUnit
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.served import PulledWeights
from howdah.plan.boxes import Piece
from howdah.plan.flat_buffers import pieces
from howdah.plan.method import Sync
from howdah.plan.sharding import local_buffers
from howdah.server.chunks import Chunk, chunks_of
from howdah.server.client import Client, Way
from howdah.server.clocks import Clocks
from howdah.server.desk import Desk
from howdah.server.host import Host
from howdah.server.ledger import Event
from howdah.server.shard import Shard
from howdah.text.batches import Micro, Rows, micros, order_of
from howdah.text.tokens import Corpus
from howdah.train.checkpointing import about_run
from howdah.train.console import Say
from howdah.train.job import Job
from howdah.train.resume import Start
from howdah.train.step import StepContext, accumulate, count_tokens

TELL = 1.0  # seconds between what a server reports
Tell = Callable[[dict[str, object]], None]  # reports to the process that has started this one


class Pace(NamedTuple):
    """The samples of a run's steps: the first of a step, and how many it has, over all workers."""

    first: Callable[[int], int]
    size: Callable[[int], int]


def sync_of(job: Job) -> Sync:
    """The consistency of a run that has one."""
    assert job.method.sync is not None, "a run without method.sync has other loops"
    return job.method.sync


def run_hello(job: Job) -> dict[str, object]:
    """What workers and servers must have in common: version, model, method, data and seed."""
    about = job.shape, job.method, job.plan.sequence, job.batch, job.data, str(job.layout)
    return {"version": __version__, "run": job.name, "settings": crc32(repr(about).encode())}


def chunks_for(job: Job) -> list[list[Chunk]]:
    """By server, its chunks."""
    plan = job.plan
    return chunks_of(local_buffers(plan, 0), plan.layout.server, element_bytes=plan.master_bytes)


def pace_of(job: Job, start: Start) -> Pace:
    """The samples of the steps from the start on."""
    workers, batch = sync_of(job).workers, job.batch

    def first(step: int) -> int:
        sizes = sum(batch.size(one) for one in range(start.step, step))
        return start.samples + workers * sizes

    return Pace(first, lambda step: workers * batch.size(step))


# -- a server ----------------------------------------------------------------------


class Server:
    """One server of a run.

    number    among the servers
    listener  the socket at which workers arrive
    """

    def __init__(
        self, job: Job, number: int, *, start: Start, listener: socket, secret: bytes
    ) -> None:
        self.job, self.number, self.start = job, number, start
        self._buffers = {one.unit: one for one in local_buffers(job.plan, 0)}
        chunks = chunks_for(job)[number]
        masters = [self._filled(chunk) for chunk in chunks]
        rate, steps = job.method.lr, job.train.steps
        shard = Shard(
            chunks, masters, job.method, lambda clock: learning_rate(rate, step=clock, steps=steps)
        )
        self.desk = Desk(Clocks(sync_of(job), len(chunks), start.step), shard)
        self._restore(shard)
        dtype = DTYPES[job.method.precision]
        hello = run_hello(job)
        door = Door(listener, secret, json.dumps(hello).encode())
        self.host = Host(self.desk, door, hello, dtype=dtype)

    def _filled(self, chunk: Chunk) -> Tensor:
        wide = torch.promote_types(DTYPES[self.job.method.precision], torch.float32)
        found = torch.zeros(chunk.length, dtype=wide)
        for piece, a, b in self._pieces(chunk):
            self.start.fill(piece, found[a:b])
        return found

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[Piece, int, int]]:
        """The pieces of a chunk, and their places in it."""
        for piece, a, b in pieces(self._buffers[chunk.unit], chunk.start, chunk.stop):
            yield piece, a - chunk.start, b - chunk.start

    def _restore(self, shard: Shard) -> None:
        checkpoint = self.start.checkpoint
        if checkpoint is None:
            return
        updates = self.start.step
        if not self.desk.clocks.barrier:
            updates *= sync_of(self.job).workers
        for kind, piece, tensor in self.entries():
            if kind != "weight":
                checkpoint.read(kind, piece, tensor)
        for optimizer in shard.optimizers:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"] = torch.full_like(state["step"], float(updates))

    def entries(self) -> Iterator[Entry]:
        """What the server saves, as named pieces."""
        shard = self.desk.shard
        for key, chunk in enumerate(shard.chunks):
            for piece, a, b in self._pieces(chunk):
                yield "weight", piece, shard.masters[key][a:b]
            for part in shard.ranges[key]:
                states = shard.optimizers[key].state.get(part.master, {})
                for name in self.job.method.optimizer.states if part.master.numel() else ():
                    buffer = self._buffers[chunk.unit]
                    for piece, a, b in pieces(buffer, part.start, part.stop):
                        yield name, piece, states[name][a - part.start : b - part.start]

    @property
    def clock(self) -> int:
        """The steps that every place has finished."""
        return min(member.clock for member in self.desk.clocks.members.values())

    def run(self, corpus: Corpus, request: StopRequest, *, say: Say, tell: Tell) -> int:
        """Serves until all workers have finished, or a stop is asked for; returns the clock of the
        last checkpoint. Raises UserError if the last step is not saved.
        """
        job, told = self.job, perf_counter()
        saver = Saver(
            job.folder / "checkpoints",
            rank=self.number,
            world=job.layout.server,
            keep=job.train.keep_last,
            say=say,
        )
        saves = _Saves(self, saver, corpus)
        self.desk.after = saves.look
        try:
            while (saves.done < job.train.steps or self.desk.clocks.live) and not request.signal:
                self.host.look()
                if perf_counter() - told > TELL:
                    told = perf_counter()
                    tell(self.numbers())
                    self._write_ledger()
        finally:
            saver.wait()
            tell(self.numbers())
            self.host.close()
            self._write_ledger()
        if saver.failed and not request.signal:
            raise UserError(f"step {saves.done} is not saved: {saver.failed}")
        return saves.done

    def numbers(self) -> dict[str, object]:
        """What is observed: counts since the start, how old weights were, who waits."""
        clocks = self.desk.clocks
        return {
            "server": self.number,
            **self.host.counts,
            "strangers": self.host.strangers,
            "waiting": len(self.desk.wishes),
            "stale": dict(sorted(clocks.stale.items())),
            "clocks": {place: one.clock for place, one in sorted(clocks.members.items())},
        }

    def _write_ledger(self) -> None:
        """Appends what was applied and answered since the last time to the run's ledger."""
        events: list[Event] = []

        def take(desk: Desk) -> None:
            events.extend(desk.ledger)
            desk.ledger.clear()

        self.host.do(take)
        path = self.job.folder / "ledgers" / f"server-{self.number}-from-{self.start.step}"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.writelines(f"{event}\n" for event in events)


class _Saves:
    """Saves a server's pieces when the workers have come to a step that is due: under bsp all live
    ones, at the moment between two steps; otherwise the slowest place.

    done  the last step that was given to the saver
    """

    def __init__(self, server: Server, saver: Saver, corpus: Corpus) -> None:
        self._server, self._saver, self._corpus = server, saver, corpus
        self._pace = pace_of(server.job, server.start)
        self.done = server.start.step

    def due(self, least: int = 0) -> int:
        """The next step to be saved, of those from `least` on."""
        every, steps = self._server.job.train.save_every, self._server.job.train.steps
        last = max(self.done, least - 1)
        return min((last // every + 1) * every if every else steps, steps)

    def look(self, clock: int | None) -> None:
        """Updates of clocks up to `clock` were applied; None: a worker has joined, begun or left.
        Under bsp no key goes on before all have come to a step, so none of them is passed over.
        """
        server, clocks = self._server, self._server.desk.clocks
        if clock is not None and clock + 1 < self.due():
            return
        first, last = clocks.reached if clocks.barrier else (0, 0)
        step = self.due(first)
        come = first == last == step if clocks.barrier else server.clock >= step
        if come and step > self.done:
            about = about_run(server.job, self._corpus, samples=self._pace.first(step), best=None)
            self._saver.save(step=step, entries=server.entries(), about=about)
            self.done = step


# -- a worker ----------------------------------------------------------------------


def work(job: Job, place: int, way: Way, *, start: Start, corpus: Corpus, tell: Tell) -> int:
    """Trains in a place until the run's last step; returns the clock.

    tell  is called after every step
    """
    chunks = chunks_for(job)
    clients: list[Client] = []

    def connect(made: Mapping[str, FlatUnit]) -> Client:
        clients.append(Client(way, place, chunks, made))
        return clients[0]

    with connect_mesh(replace(job.layout, server=0), SingleRank(), torch.device("cpu")) as mesh:
        placed = apply(job.plan, mesh=mesh, fill=start.fill, connect=connect)
        context = StepContext(placed, mesh, job.method, job.seed)
        client, clock = clients[0], clients[0].join()
        order = order_of(corpus, sequence=job.data.sequence_length, seed=job.seed)
        pace, micro = pace_of(job, start), job.plan.micro_batch
        rows = Rows(micro, sync_of(job).workers, place)
        for step in range(clock, job.train.steps):
            batch = micros(corpus, order, rows, first=pace.first(step), size=pace.size(step))
            tell(_step(context, client, batch, step))
        client.drain()
        client.close()
    return max(clock, job.train.steps)


def _step(context: StepContext, client: Client, batch: list[Micro], step: int) -> dict[str, object]:
    """Pulls, computes and pushes one step; what is told of it."""
    began, waited = perf_counter(), context.mesh.waited.seconds
    client.clock, client.tokens = step, float(count_tokens(batch))
    gatherer = context.placed.gatherer
    assert isinstance(gatherer, PulledWeights)
    gatherer.updated()
    total = float(accumulate(context, batch, step=step, tokens=1.0))
    return {
        "step": step + 1,
        "loss": total,
        "tokens": client.tokens,
        "seconds": perf_counter() - began,
        "waited": context.mesh.waited.seconds - waited,
        "queue": client.deepest,
        "came_back": client.came_back,
    }
