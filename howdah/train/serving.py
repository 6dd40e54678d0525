"""Starts the servers and workers of a run on this machine, and sees it to its end.

    howdah train ── fork server ──┬── server 0 ──┐ address
                                  ├── server 1 ──┤ of each
                                  ├── worker 0 ──┘ to the workers
                                  └── worker 1

They meet at Unix sockets without ports and files, by a secret that only they have. A worker that
dies is replaced by another in its place, which does the unfinished step again. A server that dies
is replaced by its replica; without one the run ends, and goes on from its last checkpoint with the
same command. Members that join from other machines are in `gathering.py`.
"""

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist

from howdah.base.errors import UserError, pasted
from howdah.base.signals import StopRequest, listen, name_of
from howdah.checkpoint.folders import step_folder
from howdah.checkpoint.load import open_checkpoint
from howdah.checkpoint.save import Saver
from howdah.comm import rendezvous
from howdah.comm.fork_server import KILLED, Child, ForkServer, ServerLost
from howdah.comm.frames import FrameError
from howdah.comm.launch import WAY, Failure, explain, killed
from howdah.comm.transport import PeerLost
from howdah.parallel.flat_params import random_init
from howdah.server.way import ServerAway, Way
from howdah.shapes.weights import weights
from howdah.text.labelled import labels_of
from howdah.text.tokenizer import extra_tokens
from howdah.text.tokens import Corpus, prepare
from howdah.train.console import Say
from howdah.train.crew import Crew, Member, ServerDied
from howdah.train.job import Job
from howdah.train.metrics import LOG, append
from howdah.train.resume import Start, check_match, choose, read_folder, read_weights
from howdah.train.run_folder import clean_run, lock
from howdah.train.served import sync_of
from howdah.train.served_trace import writer
from howdah.train.served_worker import work
from howdah.train.shards import Shards

LOOK = 0.1  # seconds between looks at the processes
TRIES = 5  # times that a worker is started again in a place without a step in between
TELLING = Lock()
PRELOAD = ("torch", "torch.distributed", "howdah.train.serving")


@dataclass(frozen=True)
class Meeting:
    """What every process of a run is told.

    step  of the checkpoint with which it starts; -1: none
    way   to the servers, for workers
    rank  among the ranks of a worker, which was started as the `process`-th of all
    """

    job: Job
    number: int
    step: int
    secret: bytes
    way: Way | None = None
    rank: int = 0
    process: int = 0


@dataclass
class Process(Member):
    """A server or worker on this machine: a process, or one for each rank of a worker.

    tries   how often it was started again since its place has last finished a step
    failed  the first of its processes that has failed: then the others are ended
    dead    numbers of those that others of it have seen die
    """

    children: Sequence[Child] = ()
    tries: int = 0
    failed: Child | None = None
    dead: set[int] = field(default_factory=set)

    @property
    def status(self) -> int | None:
        """Its exit status; None while any of its processes runs."""
        runs = any(child.status is None for child in self.children)
        return None if runs else self.failed.status if self.failed else 0

    def look(self) -> None:
        """Ends what is left of it when one of its processes has failed."""
        ended = [child for child in self.children if child.status]
        if any(child.status is None and child.pid in self.dead for child in self.children):
            return  # who has seen it die may be known to have ended before it is
        if ended and not self.failed:  # one that was killed did not fail by another's end
            self.failed = min(ended, key=lambda child: child.status or 0)
            self.end()


def train_served(job: Job, *, show: Say, restarts: int = 0) -> int:
    """Trains on this machine; returns the exit code.

    restarts  how often a run that has lost a server is started again, from its last checkpoint

    Raises UserError for a mistake that a process finds, and if this machine cannot start them.
    """

    def say(line: str) -> None:
        show(line)
        with suppress(OSError):
            append(job.folder / LOG, line)

    if job.train.evaluate_every:
        say("note        under method.sync a run is evaluated at its end, not between its steps")
    with listen(patient=True) as request, lock(job.folder):
        for left in range(restarts, -1, -1):
            try:
                return _once(job, request, say)
            except ServerDied as died:
                say(f"{died}{'; starting it again' if left else ''}")
            except ServerLost as lost:
                raise UserError(f"{lost}; {WAY}") from None
    return 1


def _once(job: Job, request: StopRequest, say: Say) -> int:
    run = _Run(job, request, say)
    try:
        return run.see_through()
    finally:
        run.server.close(kill=True)
        with suppress(OSError):  # nobody writes any more
            clean_run(job.folder)


class _Run:
    """One run: its processes, from their start to their end."""

    def __init__(self, job: Job, request: StopRequest, say: Say) -> None:
        self._job, self._request, self._say = job, request, say
        self._step, self._secret = found_start(job, say), os.urandom(32)
        self.server = ForkServer(farewell=signal.SIGKILL, grace=0, preload=PRELOAD, main=False)
        again = f"howdah train {pasted(job.folder)}"
        self._crew = Crew(job, say, step=self._step, again=again)
        self._processes: dict[str, Process] = {}
        self._count = count(1)

    def see_through(self) -> int:
        """Starts all processes, and waits until the servers have ended."""
        job, crew = self._job, self._crew
        for number in range(job.layout.server):
            self._start("server", number, serve_here)
        while not crew.arranged:
            if code := self._go_on():
                return code
        for number in range(sync_of(job).workers):
            self._start("worker", number, work_here)
        while any(one.role == "server" for one in self._processes.values()):
            if code := self._go_on():
                return code
        return 0

    def _go_on(self) -> int:
        """Looks at the processes once; a stop signal's exit code, or 0."""
        crew = self._crew
        self._look()
        if self.server.lost and not crew.over:  # the kernel has ended all that it had started
            raise crew.lost(KILLED)
        crew.end_stalled()
        if self._request.signal:
            self._say(
                "stopped: what was trained since the last checkpoint is trained again by: "
                f"howdah train {pasted(self._job.folder)}"
            )
            return 128 + self._request.signal
        for one in [*self._processes.values()]:
            if one.status is not None:
                del self._processes[one.name], crew.members[one.name]
                if one.status:
                    self._ended(one)
        if crew.over:
            for server in crew.servers:
                server.tell({"end": True})
        return 0

    def _start(self, role: str, number: int, function: Callable[..., int], tries: int = 0) -> None:
        process, works = next(self._count), role == "worker"
        way = self._crew.way(self._secret, process) if works else None
        meeting = Meeting(self._job, number, self._step, self._secret, way, process=process)
        ranks = range(self._job.layout.workers if works else 1)
        try:
            children = [self.server.fork(function, replace(meeting, rank=r)) for r in ranks]
        except ServerLost:
            if self.server.killed:
                raise self._crew.lost(KILLED) from None
            raise

        def end() -> None:
            for child in children:
                if child.status is None:
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)

        tell = partial(_tell_child, children[0])
        one = Process(role, number, tell, end, process=process, children=children, tries=tries)
        self._processes[one.name] = one
        self._crew.members[one.name] = one

    def _look(self) -> None:
        """Reads what the processes report, and how they end."""
        every = [(one, child) for one in self._processes.values() for child in one.children]
        pipes = {child.pipe: (one, child) for one, child in every if child.status is None}
        for ready in wait([*pipes, self.server.control], timeout=LOOK):
            if isinstance(ready, Connection):
                self._hear(*pipes[ready])
        self.server.look()
        for one, child in every:
            if child.status is not None:
                self._hear(one, child)
                one.look()

    def _hear(self, one: Process, child: Child) -> None:
        with suppress(EOFError, OSError, ValueError):
            while child.pipe.poll():
                said = json.loads(child.pipe.recv_bytes(1 << 20))
                if "step" in said:
                    one.tries = 0
                one.dead |= {int(said.get("dead", 0))}
                self._crew.hear(one, said)
            return
        if child.status is None and child.pipe.poll():
            self.server.status_of(child)

    def _ended(self, one: Process) -> None:
        """A process has failed: a worker is replaced, a server by a replica, or the run ends."""
        (kind, told), status = one.told, one.status or 0
        if status < 0 and kind != "stalled":
            pid = one.failed.pid if one.failed else 0
            told = killed(f"{one.name} (process {pid})", status)
        if kind == "early":
            told = f"{one.name} was stopped by {name_of(int(told))}"
        if kind == "mistake":
            raise UserError(told)
        told = told or f"{one.name} has failed"
        if one.role == "server":
            self._crew.server_died(one, told)
            return
        if kind == "away":
            raise self._crew.lost(told)
        if one.tries >= TRIES:
            raise UserError(f"{one.name} fails again and again: {told}")
        self._say(f"{told}; another one takes its place")
        self._start("worker", one.number, work_here, one.tries + 1)


def found_start(job: Job, say: Say) -> int:
    """The step of the checkpoint from which a run goes on, in its folder; -1: there is none."""
    clean_run(job.folder)
    found = choose(job.folder / "checkpoints", say)
    if found:
        say(f"going on from step {found.step}, saved on {found.layout}")
    return found.step if found else -1


# -- in a process --------------------------------------------------------------------


def serve_here(pipe: Connection, store: dist.Store, meeting: Meeting) -> int:
    """A server's process."""

    def serve(request: StopRequest, start: Start, corpus: Corpus) -> None:
        job, tell = meeting.job, partial(_tell, pipe)

        def saver(shard: int) -> Saver:
            return Saver(
                job.folder / "checkpoints",
                rank=shard,
                world=job.layout.server,
                keep=job.train.keep_last,
                say=lambda line: tell({"said": line}),
                start=start.step,
            )

        shards = Shards(
            job,
            meeting.number,
            start=start,
            corpus=corpus,
            secret=meeting.secret,
            at="",
            tell=tell,
            saver=saver,
            keep=writer(job),
        )
        Thread(target=_listen, args=(pipe, shards.take), daemon=True, name="told").start()
        shards.run(request)

    return _run(pipe, meeting, serve)


def _listen(pipe: Connection, take: Callable[[dict[str, Any]], None]) -> None:
    """Passes on what the run says to a server, until its end."""
    with suppress(EOFError, OSError, ValueError):
        while True:
            take(json.loads(pipe.recv_bytes(1 << 20)))


def work_here(pipe: Connection, store: dist.Store, meeting: Meeting) -> int:
    """A worker's process."""

    def train(request: StopRequest, start: Start, corpus: Corpus) -> None:
        assert meeting.way is not None
        own = dist.PrefixStore(f"worker{meeting.process}", store)
        ranks = meeting.job.layout.workers
        with closing(rendezvous.choose(own, rank=meeting.rank, size=ranks)) as transport:
            work(
                meeting.job,
                meeting.number,
                meeting.way,
                start=start,
                corpus=corpus,
                tell=partial(_tell, pipe),
                keep=writer(meeting.job),
                transport=transport,
            )

    return _run(pipe, meeting, train)


def _run(
    pipe: Connection, meeting: Meeting, function: Callable[[StopRequest, Start, Corpus], None]
) -> int:
    """Runs a role; tells why it fails. Returns the exit code."""
    job = meeting.job
    try:
        with listen() as request:
            torch.set_num_threads(job.threads)
            corpus = corpus_of(job)
            function(request, start_of(job, meeting.step, corpus), corpus)
        return 0
    except BaseException as error:
        failure = explain(error)
        if isinstance(error, FrameError):
            failure = Failure("away" if isinstance(error, ServerAway) else "lost", str(error))
        dead = error.dead if isinstance(error, PeerLost) else 0
        with suppress(OSError):
            _tell(pipe, {"failed": failure.kind, "told": failure.told[-4096:], "dead": dead})
        return failure.code


def corpus_of(job: Job) -> Corpus:
    """The tokens of a run, which are prepared already."""
    return prepare(
        job.data,
        vocab=job.shape.vocab,
        cache=job.cache,
        say=lambda line: None,
        extra=extra_tokens(job.shape),
        labels=labels_of(job.shape),
    )


def start_of(job: Job, step: int, corpus: Corpus) -> Start:
    """The start of a run at a checkpoint of its folder, or without one (step -1)."""
    if step >= 0:
        there = open_checkpoint(step_folder(job.folder / "checkpoints", step))
        check_match(there, job, corpus)
        return Start(read_weights(there, job), there, there.step, there.samples)
    if job.init_from is not None:
        return Start(read_folder(job.init_from, job.shape, job.seed), None, 0, 0)
    return Start(random_init(weights(job.shape), job.seed), None, 0, 0)


def _tell(pipe: Connection, said: Mapping[str, object]) -> None:
    with TELLING:  # checkpoints are written by a thread of their own
        pipe.send_bytes(json.dumps(said).encode())


def _tell_child(child: Child, said: Mapping[str, Any]) -> None:
    with suppress(OSError):  # it has ended
        child.pipe.send_bytes(json.dumps(said).encode())


def alone(job: Job) -> Job:
    """The job of one process that evaluates and reports what was trained."""
    layout = replace(job.layout, server=0, tp=1, sp=False, inputs="sliced")
    method = replace(job.method, sync=None)
    return replace(job, plan=replace(job.plan, layout=layout, method=method))
