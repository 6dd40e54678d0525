"""A server of a run whose workers do not wait for each other: its state, and when it is saved.

    server   its chunks of the weights ─ desk ─ door     saves when all workers have come so far
    worker   pull ─ forward, backward, push as it goes ─ pull …   (`served_worker.py`)

Every worker takes its own rows of each step's samples, so that a step of all workers is a global
batch of `method.sync.workers` times the recipe's. Checkpoints are those of every run: the servers
write the pieces that they keep, under the step that the slowest worker has finished. Under bsp that
is the state between two steps; otherwise faster workers have added to it already, and a run that is
resumed takes those of their samples again.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from socket import socket
from time import monotonic, perf_counter
from typing import Any, NamedTuple, Protocol, TypedDict
from zlib import crc32

import torch
from torch import Tensor

from howdah import __version__
from howdah.checkpoint.index import About
from howdah.checkpoint.snapshot import InMemory as Entry
from howdah.comm.handshake import Door
from howdah.comm.tls import sealing
from howdah.optim.learning_rate import learning_rate
from howdah.parallel.flat_params import DTYPES
from howdah.plan.boxes import Piece
from howdah.plan.comm import Tls
from howdah.plan.flat_buffers import Buffer, pieces
from howdah.plan.method import Sync
from howdah.plan.servers import server_shares
from howdah.plan.worker_ranks import served_ranges
from howdah.server.chain import Chain
from howdah.server.chunks import Chunk, chunks_of
from howdah.server.clocks import Clocks
from howdah.server.desk import Desk
from howdah.server.host import Host
from howdah.server.ledger import Event
from howdah.server.shard import Shard
from howdah.text.tokens import Corpus
from howdah.train.checkpointing import about_run
from howdah.train.job import Job
from howdah.train.resume import Start

LEDGERS = "ledgers"  # the folder of them in a run folder
KEPT = 1 << 20  # events that are kept for a disk that takes none
FREE = 60.0  # seconds in which a dead worker's place holds checkpoints up


class Pace(NamedTuple):
    """The samples of a run's steps: the first of a step, and how many it has, over all workers."""

    first: Callable[[int], int]
    size: Callable[[int], int]


def sync_of(job: Job) -> Sync:
    """The consistency of a run that has one."""
    assert job.method.sync is not None, "a run without method.sync has other loops"
    return job.method.sync


def run_hello(job: Job) -> dict[str, object]:
    """What workers and servers must have in common: version, model, method, batch, seed, and the
    ranges that are pushed. Text is compared by the coordinator.
    """
    plan = job.plan
    about = job.shape, job.method, plan.sequence, job.batch, job.seed, str(job.layout)
    cuts = plan.comm.server_shares, plan.comm.push_chunk
    settings = crc32(repr((about, cuts)).encode())
    return {"version": __version__, "run": job.name, "settings": settings}


class Links(TypedDict):
    """What `comm` says of a worker's links to servers; see `Way`."""

    window: int
    fifo: bool
    tls: Tls


def links_of(job: Job) -> Links:
    """What the recipe says of a worker's links to servers."""
    comm = job.plan.comm
    return Links(window=comm.push_window, fifo=comm.push_order == "fifo", tls=comm.tls)


def chunks_for(job: Job) -> list[list[Chunk]]:
    """By server, its chunks."""
    plan = job.plan
    sizes = server_shares(plan.layout, plan.comm)
    wide, most = plan.master_bytes, plan.comm.push_chunk
    return chunks_of(served_ranges(plan), sizes, element_bytes=wide, most=most)


def pace_of(job: Job, start: Start) -> Pace:
    """The samples of the steps from the start on."""
    workers, batch = sync_of(job).workers, job.batch

    def first(step: int) -> int:
        sizes = sum(batch.size(one) for one in range(start.step, step))
        return start.samples + workers * sizes

    return Pace(first, lambda step: workers * batch.size(step))


# -- a server ----------------------------------------------------------------------


class Server:
    """One server of a run, or a replica of it.

    number      among the servers
    listener    the socket at which workers arrive
    replicated  whether its state is copied, so that what it answers awaits the copies
    """

    def __init__(
        self,
        job: Job,
        number: int,
        *,
        start: Start,
        listener: socket,
        secret: bytes,
        replicated: bool = False,
    ) -> None:
        self.job, self.number, self.start = job, number, start
        self._buffers = {(one.rank, one.buffer.unit): one.buffer for one in served_ranges(job.plan)}
        chunks = chunks_for(job)[number]
        masters = [self._filled(chunk) for chunk in chunks]
        rate, steps = job.method.lr, job.train.steps
        shard = Shard(
            chunks, masters, job.method, lambda clock: learning_rate(rate, step=clock, steps=steps)
        )
        fifo = job.plan.comm.push_order == "fifo"
        clocks = Clocks(sync_of(job), len(chunks), start.step, steps)
        self.desk = Desk(clocks, shard, fifo=fifo)
        self._restore(shard)
        hello = run_hello(job)
        tls = job.plan.comm.tls
        self.chain = Chain(secret, {**hello, "shard": number}, tls=tls) if replicated else None
        seal = sealing(tls, calls=False)
        door = Door(listener, secret, json.dumps(hello).encode(), seal=seal)
        self.host = Host(
            self.desk, door, hello, dtype=DTYPES[job.method.precision], copies=self.chain
        )
        self.host.ranks = job.layout.workers
        if self.chain:
            self.desk.record, self.chain.told = self.chain.record, self.host.release
        self.ledger = job.folder / LEDGERS / f"server-{number}-from-{start.step}"
        self._whole, self._unwritten = 0, list[Event]()  # bytes of the ledger; what is not there
        self._counted = perf_counter(), 0, 0

    def _filled(self, chunk: Chunk) -> Tensor:
        wide = torch.promote_types(DTYPES[self.job.method.precision], torch.float32)
        found = torch.zeros(chunk.length, dtype=wide)
        for piece, a, b in self._pieces(chunk):
            self.start.fill(piece, found[a:b])
        return found

    def _buffer(self, chunk: Chunk) -> Buffer:
        return self._buffers[chunk.rank, chunk.unit]

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[Piece, int, int]]:
        """The pieces of a chunk, and their places in it."""
        for piece, a, b in pieces(self._buffer(chunk), chunk.start, chunk.stop):
            yield piece, a - chunk.start, b - chunk.start

    def _restore(self, shard: Shard) -> None:
        checkpoint = self.start.checkpoint
        if checkpoint is None:
            return
        for kind, piece, tensor in self.entries():
            if kind != "weight":
                checkpoint.read(kind, piece, tensor)
        for optimizer in shard.optimizers:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"] = torch.full_like(state["step"], float(self.start.updates))

    @property
    def updates(self) -> int:
        """How many the optimizer's states have seen: of its keys, the mean."""
        versions = self.desk.clocks.versions
        return self.start.updates + round(sum(versions) / max(len(versions), 1))

    def entries(self) -> Iterator[Entry]:
        """What the server saves, as named pieces."""
        shard = self.desk.shard
        for key, chunk in enumerate(shard.chunks):
            for piece, a, b in self._pieces(chunk):
                yield "weight", piece, shard.masters[key][a:b]
            for part in shard.ranges[key]:
                states = shard.optimizers[key].state.get(part.master, {})
                for name in self.job.method.optimizer.states if part.master.numel() else ():
                    for piece, a, b in pieces(self._buffer(chunk), part.start, part.stop):
                        yield name, piece, states[name][a - part.start : b - part.start]

    @property
    def clock(self) -> int:
        """The steps that every place has finished, but for those that were left in good order;
        when all were, the steps of the furthest.
        """
        members = [*self.desk.clocks.members.values()]  # others may join meanwhile
        there = [member.clock for member in members if not member.bye]
        return min(there, default=max(member.clock for member in members))

    def numbers(self) -> dict[str, Any]:
        """What is observed: counts since the start, bytes per second since the last call, how old
        weights were, who waits.
        """
        clocks, counts, now = self.desk.clocks, self.host.counts, perf_counter()
        since, pushed, pulled = self._counted
        self._counted = now, counts["pushed bytes"], counts["pulled bytes"]
        seconds = max(now - since, 1e-9)
        return {
            "server": self.number,
            **counts,
            "refused": counts["refused"],
            "push_rate": (counts["pushed bytes"] - pushed) / seconds,
            "pull_rate": (counts["pulled bytes"] - pulled) / seconds,
            "strangers": self.host.strangers + counts["strangers"],
            "gone": dict(self.host.gone),
            "waiting": self.desk.waiting,
            "queue": self.host.queue,
            "queued": self.host.queued,
            "ages": {place: dict(sorted(ages.items())) for place, ages in [*clocks.ages.items()]},
            "missed": clocks.missed,
            "clocks": {place: one.clock for place, one in sorted(clocks.members.items())},
        }

    def write_ledger(self) -> None:
        """Appends what was applied and answered since the last time to the run's ledger, which
        begins empty: an earlier start that saved nothing has left one of the same name. What a full
        disk has not taken is kept, and written the next time.
        """

        def take(desk: Desk) -> None:
            self._unwritten += desk.ledger
            desk.ledger.clear()
            del self._unwritten[:-KEPT]

        self.host.do(take)
        self.ledger.parent.mkdir(parents=True, exist_ok=True)
        with self.ledger.open("ab" if self._whole else "wb") as file:
            file.truncate(min(file.tell(), self._whole))  # of a line that was cut
            file.write("".join(f"{event}\n" for event in self._unwritten).encode())
            file.flush()
            self._whole = file.tell()
        self._unwritten.clear()


class Saves(Protocol):
    """Saves a server's pieces in the background: a `Saver`, or a `Parcel` of `parcels.py`."""

    @property
    def busy(self) -> bool: ...
    @property
    def failed(self) -> str | None: ...
    def save(self, *, step: int, entries: Iterable[Entry], about: About) -> None: ...
    def wait(self) -> None: ...
    def cancel(self) -> None: ...


class SaveSteps:
    """Saves a server's pieces when the workers have come to a step that is due: under bsp all live
    ones, at the moment between two steps; otherwise the slowest place. One whose worker has died,
    and that nobody has taken for a minute, holds up the last step alone.

    free  seconds of that minute
    done  the last step that was given to the saver
    """

    def __init__(self, server: Server, saver: Saves, corpus: Corpus, *, free: float = FREE) -> None:
        self.server, self.saver, self._corpus, self._free = server, saver, corpus, free
        self._since: dict[int, float] = {}  # by place that nobody has: since when
        self._pace = pace_of(server.job, server.start)
        self.done = server.start.step

    @property
    def over(self) -> bool:
        """Whether the last step was given to the saver, and all workers have finished."""
        return self.done >= self.server.job.train.steps and not self.server.desk.clocks.live

    def again(self, desk: Desk) -> None:
        """What others have saved of the shard is not counted on: saves the next step that is due
        from where the workers are, which may be the one that was saved last.
        """
        self.done = max(self.server.start.step, self.server.clock - 1)
        self.look(None)

    def due(self, least: int = 0) -> int:
        """The next step to be saved, of those from `least` on."""
        every, steps = self.server.job.train.save_every, self.server.job.train.steps
        last = max(self.done, least - 1)
        return min((last // every + 1) * every if every else steps, steps)

    def look(self, clock: int | None) -> None:
        """Updates of clocks up to `clock` were applied; None: a worker has joined, begun or left.
        Under bsp no key goes on before all have come to a step, so none of them is passed over.
        """
        server, clocks = self.server, self.server.desk.clocks
        if clock is None:
            empty = [at for at, one in clocks.members.items() if not (one.live or one.bye)]
            self._since = {place: self._since.get(place, monotonic()) for place in empty}
        if clock is not None and clock + 1 < self.due():
            return
        live = [clocks.members[place].clock for place in clocks.live]
        if clocks.sync.barrier and live and min(live) < self.due(min(live)):
            return  # some key lacks the step; to look at all of them takes long
        first, last = clocks.reached if clocks.sync.barrier else (0, 0)
        step = self.due(first)
        come = first == last == step if clocks.sync.barrier else self._come(step)
        if come and step > self.done:
            samples, updates = self._pace.first(step), server.updates
            about = about_run(server.job, self._corpus, samples=samples, updates=updates, best=None)
            self.saver.save(step=step, entries=server.entries(), about=about)
            self.done = step

    def _come(self, step: int) -> bool:
        """Whether the slowest place has come to a step; or, before the last one, the slowest of
        those that are not given up. Such a save awaits no earlier one: another server's part of it
        may come when the place is taken again.
        """
        if self.server.clock >= step:
            return True
        if self.saver.busy or step >= self.server.job.train.steps:
            return False
        gone = [at for at, since in self._since.items() if monotonic() - since >= self._free]
        members = self.server.desk.clocks.members.items()
        there = [one.clock for place, one in members if not one.bye and place not in gone]
        return min(there, default=0) >= step
