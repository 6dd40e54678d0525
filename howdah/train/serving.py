"""Starts the servers and workers of a run on this machine, and sees it to its end.

    howdah train ── fork server ──┬── server 0 ──┐ address
                                  ├── server 1 ──┤ of each
                                  ├── worker 0 ──┘ to the workers
                                  └── worker 1

They meet at sockets of 127.0.0.1, by a secret that only these processes have. A worker that dies is
replaced by another in its place, which does the unfinished step again; a server that dies ends the
run, which goes on from its last checkpoint with the same command.
"""

import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.base.signals import StopRequest, listen, name_of
from howdah.checkpoint.folders import clean, step_folder
from howdah.checkpoint.load import open_checkpoint
from howdah.comm.fork_server import Child, ForkServer
from howdah.comm.frames import FrameError
from howdah.comm.launch import Failure, explain, killed
from howdah.parallel.flat_params import random_init
from howdah.server.client import Address, ServerAway, Way
from howdah.shapes.weights import weights
from howdah.text.tokens import Corpus, prepare
from howdah.train.console import Say
from howdah.train.job import Job
from howdah.train.metrics import LOG, METRICS, append
from howdah.train.resume import Start, check_match, choose, read_folder, read_weights
from howdah.train.run_folder import lock
from howdah.train.served import Server, run_hello, sync_of, work

LOOK = 0.1  # seconds between looks at the processes
TRIES = 5  # times that a worker is started again in a place without a step in between
TELLING = Lock()
PRELOAD = ("torch", "torch.distributed", "howdah.train.serving")


@dataclass(frozen=True)
class Meeting:
    """What every process of a run is told.

    step       of the checkpoint with which it starts; -1: none
    addresses  of the servers, for workers
    """

    job: Job
    number: int
    step: int
    secret: bytes
    addresses: Sequence[Address] = ()


@dataclass
class Process:
    """A server or worker.

    told   why it has failed, as it says itself: a kind of `comm/launch.py`, and a text
    tries  how often it was started again since its place has last finished a step
    """

    role: str
    number: int
    child: Child
    told: tuple[str, str] = ("", "")
    tries: int = 0

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


@dataclass
class Watch:
    """What a run is seen to do: the latest reports of its processes.

    steps  by worker, its last report; servers: by server
    """

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    servers: dict[int, dict[str, Any]] = field(default_factory=dict)


class ServerDied(Exception):
    """A server has ended; the message says why, and how the run goes on."""


def train_served(job: Job, *, show: Say, restarts: int = 0) -> int:
    """Trains on this machine; returns the exit code.

    restarts  how often a run that has lost a server is started again, from its last checkpoint

    Raises UserError for a mistake that a process finds.
    """

    def say(line: str) -> None:
        show(line)
        with suppress(OSError):
            append(job.folder / LOG, line)

    if job.train.evaluate_every:
        say("note        under method.sync a run is evaluated at its end, not between its steps")
    with listen(patient=True) as request, lock(job.folder):
        for left in range(restarts, -1, -1):
            run = _Run(job, request, say)
            try:
                return run.see_through()
            except ServerDied as died:
                say(f"{died}{'; starting it again' if left else ''}")
            finally:
                run.server.close(kill=True)
    return 1


class _Run:
    """One run: its processes, from their start to their end."""

    def __init__(self, job: Job, request: StopRequest, say: Say) -> None:
        self._job, self._request, self._say = job, request, say
        checkpoints = job.folder / "checkpoints"
        if checkpoints.is_dir():
            clean(checkpoints)
        found = choose(checkpoints, say)
        self._step, self._secret = found.step if found else -1, os.urandom(32)
        if found:
            say(f"going on from step {found.step}, saved on {found.layout}")
        self.server = ForkServer(farewell=signal.SIGKILL, grace=0, preload=PRELOAD, main=False)
        self._watch, self._said = Watch(), self._step
        self._processes: dict[str, Process] = {}

    def see_through(self) -> int:
        """Starts all processes, and waits until the servers have ended."""
        job, workers = self._job, sync_of(self._job).workers
        for number in range(job.layout.server):
            self._start("server", number, serve_here)
        addresses = [self._address(number) for number in range(job.layout.server)]
        for number in range(workers):
            self._start("worker", number, work_here, addresses)
        servers = [one for one in self._processes.values() if one.role == "server"]
        while any(one.child.status is None for one in servers):
            self._look()
            if self._request.signal:
                self._say(
                    "stopped: what was trained since the last checkpoint is trained again by: "
                    f"howdah train {job.folder}"
                )
                return 128 + self._request.signal
            for one in [*self._processes.values()]:
                if one.child.status not in (None, 0):
                    self._ended(one, addresses)
        return 0

    def _start(
        self,
        role: str,
        number: int,
        function: Callable[..., int],
        addresses: Sequence[Address] = (),
    ) -> None:
        meeting = Meeting(self._job, number, self._step, self._secret, addresses)
        child = self.server.fork(function, meeting)
        before = self._processes.get(f"{role} {number}")
        tries = before.tries + 1 if before else 0
        self._processes[f"{role} {number}"] = Process(role, number, child, tries=tries)

    def _address(self, number: int) -> Address:
        """Waits until a server tells where it listens."""
        one = self._processes[f"server {number}"]
        while number not in self._watch.servers:
            self._look()
            if one.child.status is not None:
                self._ended(one, ())
        host, port = self._watch.servers[number]["address"]
        return str(host), int(port)

    def _look(self) -> None:
        """Reads what the processes report, and how they end."""
        pipes = {one.child.pipe: one for one in self._processes.values()}
        live = [pipe for pipe, one in pipes.items() if one.child.status is None]
        for ready in wait([*live, self.server.control], timeout=LOOK):
            if isinstance(ready, Connection):
                self._hear(pipes[ready])
        self.server.look()
        for one in self._processes.values():
            if one.child.status is not None:
                self._hear(one)

    def _hear(self, one: Process) -> None:
        with suppress(EOFError, OSError, ValueError):
            while one.child.pipe.poll():
                said = json.loads(one.child.pipe.recv_bytes(1 << 20))
                if "failed" in said:
                    one.told = said["failed"], said["told"]
                elif "said" in said:
                    self._say(said["said"])
                elif one.role == "server":
                    self._watch.servers.setdefault(one.number, {}).update(said)
                else:
                    one.tries = 0
                    self._watch.steps[one.number] = said
                    self._report()
            return
        if one.child.status is None and one.child.pipe.poll():
            self.server.status_of(one.child)

    def _ended(self, one: Process, addresses: Sequence[Address]) -> None:
        """A process has failed: a worker is replaced, anything else ends the run."""
        kind, told = one.told
        status = one.child.status or 0
        if status < 0:
            told = killed(f"{one.name} (process {one.child.pid})", status)
        if kind == "early":
            told = f"{one.name} was stopped by {name_of(int(told))}"
        if kind == "mistake":
            raise UserError(told)
        if one.role == "server" or kind == "away":
            folder = self._job.folder
            raise ServerDied(
                f"{told or one.name + ' has failed'}; what it had since the last checkpoint is "
                f"lost: go on with howdah train {folder}"
            )
        if one.tries >= TRIES:
            raise UserError(f"{one.name} fails again and again: {told}")
        self._say(f"{told or one.name + ' has failed'}; another one takes its place")
        self._start("worker", one.number, work_here, addresses)

    def _report(self) -> None:
        """A line, and a row of metrics.jsonl, when all workers have come so far."""
        every, there = self._job.train.log_every, self._watch.steps
        if len(there) < sync_of(self._job).workers:
            return
        step = min(said["step"] for said in there.values())
        if step <= self._said or (step % every and step != self._job.train.steps):
            return
        self._said = step
        row = measured(there, self._watch.servers)
        with suppress(OSError):
            append(self._job.folder / METRICS, json.dumps({"kind": "served", "step": step, **row}))
        self._say(
            f"step: {step:2d}  loss: {row['loss']:8.5f}  tps: {row['tps']:,.0f}  "
            f"stale: {row['stale']:.2f} (at most {row['oldest']})  apart: {row['apart']}  "
            f"slowest: worker {row['slowest']}  queue: {row['queue']}"
        )


def measured(
    steps: Mapping[int, Mapping[str, Any]], servers: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """What a row of metrics says of a moment of a run: loss and tokens per second of all workers'
    last steps, how old weights were in versions, how far workers are apart, who is slowest.
    """
    tokens = sum(said["tokens"] for said in steps.values())
    stale: Counter[int] = Counter()
    for said in servers.values():
        stale.update({int(age): count for age, count in said.get("stale", {}).items()})
    ages = sum(age * count for age, count in stale.items())
    clocks = [said["step"] for said in steps.values()]
    return {
        "loss": sum(said["loss"] for said in steps.values()) / max(tokens, 1),
        "tps": sum(said["tokens"] / max(said["seconds"], 1e-9) for said in steps.values()),
        "stale": ages / max(stale.total(), 1),
        "oldest": max(stale, default=0),
        "staleness": {str(age): count for age, count in sorted(stale.items())},
        "apart": max(clocks) - min(clocks),
        "slowest": max(steps, key=lambda place: steps[place]["seconds"] - steps[place]["waited"]),
        "queue": max(said["queue"] for said in steps.values()),
        "servers": [dict(said) for _, said in sorted(servers.items())],
    }


# -- in a process --------------------------------------------------------------------


def serve_here(pipe: Connection, store: dist.Store, meeting: Meeting) -> int:
    """A server's process."""

    def serve(request: StopRequest, start: Start, corpus: Corpus) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            one = Server(
                meeting.job,
                meeting.number,
                start=start,
                listener=listener,
                secret=meeting.secret,
            )
            _tell(pipe, {"address": listener.getsockname()})
            tell = partial(_tell, pipe)
            one.run(corpus, request, say=lambda line: tell({"said": line}), tell=tell)

    return _run(pipe, meeting, serve)


def work_here(pipe: Connection, store: dist.Store, meeting: Meeting) -> int:
    """A worker's process."""

    def train(request: StopRequest, start: Start, corpus: Corpus) -> None:
        way = Way(meeting.addresses, meeting.secret, run_hello(meeting.job))
        tell = partial(_tell, pipe)
        work(meeting.job, meeting.number, way, start=start, corpus=corpus, tell=tell)

    return _run(pipe, meeting, train)


def _run(
    pipe: Connection, meeting: Meeting, function: Callable[[StopRequest, Start, Corpus], None]
) -> int:
    """Runs a role; tells why it fails. Returns the exit code."""
    job = meeting.job
    try:
        with listen() as request:
            torch.set_num_threads(job.threads)
            corpus = prepare(
                job.data,
                vocab=job.shape.vocab,
                cache=job.cache,
                say=lambda line: None,
                pad=job.shape.first_position > 0,
            )
            function(request, start_of(job, meeting.step, corpus), corpus)
        return 0
    except BaseException as error:
        failure = explain(error)
        if isinstance(error, FrameError):
            kind = "away" if isinstance(error, ServerAway) else "lost"
            failure = Failure(kind, str(error))
        with suppress(OSError):
            _tell(pipe, {"failed": failure.kind, "told": failure.told[-4096:]})
        return failure.code


def start_of(job: Job, step: int, corpus: Corpus) -> Start:
    """The start of a run at a checkpoint of its folder, or without one (step -1)."""
    if step >= 0:
        there = open_checkpoint(step_folder(job.folder / "checkpoints", step))
        check_match(there, job, corpus)
        return Start(read_weights(there), there, there.step, there.samples)
    if job.init_from is not None:
        return Start(read_folder(job.init_from, job.shape), None, 0, 0)
    return Start(random_init(weights(job.shape), job.seed), None, 0, 0)


def _tell(pipe: Connection, said: Mapping[str, object]) -> None:
    with TELLING:  # checkpoints are written by a thread of their own
        pipe.send_bytes(json.dumps(said).encode())


def alone(job: Job) -> Job:
    """The job of one process that evaluates and reports what was trained."""
    layout, method = replace(job.layout, server=0), replace(job.method, sync=None)
    return replace(job, plan=replace(job.plan, layout=layout, method=method))
