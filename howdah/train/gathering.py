"""The coordinator of a run whose servers and workers join from anywhere: `howdah train --listen`.

    howdah train RECIPE --listen node0:29400     the run folder, the log, checkpoints, no training
    howdah server --join node0:29400 RECIPE      on any machine, as many as the layout has servers
    howdah worker --join node0:29400 RECIPE      as many as method.sync.workers, when they like

It gives each its number, tells servers and workers where they find each other, and ends when all
steps are saved. What workers push and pull does not pass through it. Members need no folder in
common: servers send it their parts of checkpoints, and get the one from which the run goes on.
"""

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from queue import Empty, Queue
from typing import Any
from zlib import crc32

from howdah.base.errors import UserError
from howdah.base.signals import StopRequest, listen
from howdah.checkpoint.folders import draft_folder, step_folder
from howdah.checkpoint.load import open_checkpoint
from howdah.comm.handshake import Door
from howdah.comm.meeting import version_here
from howdah.comm.tls import sealing
from howdah.server.addresses import spell
from howdah.server.line import Line
from howdah.text.tokens import Corpus
from howdah.train.console import Say
from howdah.train.crew import Crew, Member, ServerDied
from howdah.train.job import Job
from howdah.train.metrics import LOG, append
from howdah.train.parcels import Parcels
from howdah.train.run_folder import lock
from howdah.train.said import require_sound
from howdah.train.served import sync_of
from howdah.train.serving import corpus_of, found_start

LOOK = 0.05  # seconds between looks at the door
Said = dict[str, Any]
SERVER, WORKER = "server", "worker"
REFUSED = "refused"  # why a member ends that says what none does


def member_hello(job: Job, corpus: Corpus) -> Said:
    """What all members of a run must have in common."""
    text = corpus.fingerprint, list(corpus.checksums)

    def sum_of(what: object) -> int:
        return crc32(repr(what).encode())

    return {
        "version of howdah": version_here(),
        "run": job.name,
        "model": sum_of(job.shape),
        "method": sum_of((job.method, job.init_from is None)),
        "layout": str(job.layout),
        "comm.server_shares": list(job.plan.comm.server_shares),
        "comm.push_chunk": job.plan.comm.push_chunk,
        "batch": sum_of((job.batch, job.plan.sequence)),
        "number of steps": job.train.steps,
        "train.save_every": job.train.save_every,
        "seed": job.seed,
        "text": sum_of(text),
    }


def train_gathered(
    job: Job, *, at: tuple[str, int], secret: bytes, show: Say, restarts: int = 0
) -> int:
    """Sees to a run whose members join at an address; returns the exit code.

    at        host and port; port 0: a free one, which is said
    restarts  how often a run that has lost a server is begun again, by members that join again

    Raises UserError for an address that is none of this machine.
    """

    def say(line: str) -> None:
        show(line)
        with suppress(OSError):
            append(job.folder / LOG, line)

    corpus = corpus_of(job)
    with listen(patient=True) as request, lock(job.folder), listening(at) as listener:
        told = spell(listener.getsockname()[:2])
        say(
            f"listening at {told}: howdah server --join {told} and howdah worker --join {told}, "
            f"{job.layout.server} and up to {sync_of(job).workers} of them"
        )
        for left in range(restarts, -1, -1):
            run = Gathering(
                job,
                request,
                say,
                listener=listener,
                secret=secret,
                corpus=corpus,
                step=found_start(job, say),
            )
            why = ""
            try:
                return run.see_through()
            except ServerDied as died:
                why = str(died)
                say(f"{why}{'; waiting for members again' if left else ''}")
            finally:
                run.close(why)
    return 1


def listening(at: tuple[str, int]) -> socket.socket:
    """A socket at an address of this machine. Raises UserError."""
    try:
        family = socket.getaddrinfo(*at, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(at, family=family)
    except OSError as error:
        raise UserError(
            f"--listen {spell(at)}: this machine cannot listen there "
            f"({str(error.strerror or error).partition(' (while')[0]}); take an address of one of "
            "its interfaces, and a port that is free"
        ) from None


@dataclass
class Joined(Member):
    """A member that has joined.

    line  to it; None until it is let in
    """

    line: Line | None = None


class Gathering:
    """One run: its members, from the first that joins to the end.

    listener  at which they join
    step      of the checkpoint from which the run goes on; -1: none
    """

    def __init__(  # noqa: PLR0913 (facts that have nothing in common)
        self,
        job: Job,
        request: StopRequest,
        say: Say,
        *,
        listener: socket.socket,
        secret: bytes,
        corpus: Corpus,
        step: int,
    ) -> None:
        self._job, self._request, self._say, self._secret = job, request, say, secret
        self._hello, self._step = member_hello(job, corpus), step
        self._folder = job.folder / "checkpoints"
        self._crew = Crew(job, say, step=step, again="the same commands")
        keep, start = job.train.keep_last, max(step, 0)
        self._parcels = Parcels(self._folder, job.layout.server, keep=keep, say=say, start=start)
        seal = sealing(job.plan.comm.tls, calls=False)
        self._door = Door(listener, secret, json.dumps(self._hello).encode(), seal=seal)
        self._heard: Queue[tuple[Joined, Said]] = Queue()
        self._waiting: list[Joined] = []  # workers, until the servers are there
        self._lines: list[Line] = []
        self._count = count(1)
        self._came: set[int] = set()  # places that somebody has had
        self._samples = self._samples_at(step)

    def _samples_at(self, step: int) -> int:
        return open_checkpoint(step_folder(self._folder, step)).samples if step >= 0 else 0

    def see_through(self) -> int:
        """Lets members in, and waits until all steps are saved; returns the exit code. Raises
        ServerDied.
        """
        crew = self._crew
        while not crew.over:
            for sock, said in self._door.look(LOOK):
                self._let_in(sock, said)
            crew.strangers = self._door.strangers
            self._hear()
            if crew.arranged:
                waiting, self._waiting = self._waiting, []
                for one in waiting:
                    self._seat_worker(one)
            crew.end_stalled()
            if self._request.signal:
                self._say(
                    "stopped: what was trained since the last checkpoint is trained again by the "
                    "same commands"
                )
                self._tell_all({"refused": "the run was stopped"})
                return 128 + self._request.signal
        self._tell_all({"end": True})
        if (last := self._job.train.steps) > max(self._parcels.saved, self._step):
            why = self._parcels.failed or "not all of its parts have come"
            self._say(f"step {last} is not saved: {why}; mend that, and the same commands go on")
            return 1
        return 0

    def close(self, why: str = "") -> None:
        """Ends all lines."""
        if why:
            self._tell_all({"refused": why})
        for line in self._lines:
            line.finish()
        with suppress(Empty):
            while True:
                one, said = self._heard.get_nowait()
                if "trace" in said:  # the last word of a worker, or of a server
                    self._crew.hear(one, said)
        self._door.close()

    def _tell_all(self, said: Mapping[str, Any]) -> None:
        for one in [*self._crew.members.values(), *self._waiting]:
            one.tell(said)

    # -- who comes

    def _let_in(self, sock: socket.socket, said: bytes) -> None:
        theirs, folder = _read(said), None
        role = theirs.get("role")
        if role == SERVER:
            folder = self._folder
        one = Joined(str(role), -1, lambda said: None, lambda: None)

        def take(said: Said) -> None:
            self._heard.put((one, said))

        line = Line(sock, f"a {role}", take=take, folder=folder).start()
        one.line, one.tell, one.end = line, line.tell, line.end
        self._lines.append(line)
        if problem := self._problem(role, theirs):
            line.refuse(problem)
        elif role == WORKER:
            self._waiting.append(one)
        else:
            self._seat_server(one)

    def _problem(self, role: object, theirs: Said) -> str:
        """Why a member is refused; empty if it is not."""
        if role not in (SERVER, WORKER):
            return "the hello is none of a server or worker"
        for name, mine in self._hello.items():
            if theirs.get(name) != mine:
                shown = f" ({theirs.get(name)}, and here {mine})" if type(mine) is str else ""
                return (
                    f"the {name} of this {role} is not that of the run{shown}: start it with the "
                    "howdah, the recipe and the changes with which howdah train --listen was "
                    "started"
                )
        if role == SERVER and (self._crew.arranged or not self._free_servers()):
            return f"all {self._job.layout.server} servers of the run are there, or were"
        return ""

    def _free_servers(self) -> list[int]:
        taken = {one.number for one in self._crew.servers}
        return [number for number in range(self._job.layout.server) if number not in taken]

    def _seat_server(self, one: Joined) -> None:
        one.number = self._free_servers()[0]
        self._crew.members[one.name] = one
        folder = step_folder(self._folder, max(self._step, 0))
        files = sorted(folder.iterdir()) if self._step >= 0 else []
        one.tell({"seat": one.number, "step": self._step, "files": len(files)})
        assert one.line is not None
        for path in files:
            one.line.send_file(path, f"{draft_folder(self._folder, self._step).name}/{path.name}")
        self._say(f"server {one.number} has joined, of {self._job.layout.server}")

    def _seat_worker(self, one: Joined) -> None:
        """Gives a worker the first place that nobody has, and that has steps left."""
        crew, steps, workers = self._crew, self._job.train.steps, sync_of(self._job).workers
        taken = {member.number for member in crew.members.values() if member.role == WORKER}
        done = {place for place, said in crew.steps.items() if said["step"] >= steps}
        free = [place for place in range(workers) if place not in taken | done]
        assert one.line is not None
        if not free:
            one.line.refuse(
                f"all {workers} places of workers are taken, or have done their steps "
                "(method.sync.workers)"
            )
            return
        one.number = free[0]
        crew.members[one.name] = one
        one.process = next(self._count)
        way = crew.way(self._secret, one.process)
        one.tell(
            {
                "seat": one.number,
                "process": one.process,
                "step": max(self._step, 0),
                "samples": self._samples,
                "addresses": way.addresses,
                "others": way.others,
            }
        )
        self._came.add(one.number)
        there, kind = len(crew.members) - len(crew.servers), sync_of(self._job).kind
        waits = "" if kind == "asp" or len(self._came) == workers else f", of {workers} for {kind}"
        self._say(f"worker {one.number} has joined: {there} there{waits}")

    # -- what they say

    def _hear(self) -> None:
        with suppress(Empty):
            while True:
                one, said = self._heard.get_nowait()
                if "ended" in said:
                    self._ended(one, str(said["ended"]))
                elif "file" in said:
                    self._parcels.take(str(said["file"]))
                elif "unwritten" in said:
                    self._parcels.miss(str(said["unwritten"]), str(said["why"]))
                else:
                    self._take(one, said)

    def _take(self, one: Joined, said: Said) -> None:
        """Takes what a member says. One that says what no member does is told so; if it goes on,
        its line is ended.
        """
        assert one.line is not None
        if one.told[0] == REFUSED:
            one.end()
            return
        try:
            held, shards = self._crew.held_by(one), self._job.layout.server
            require_sound(one.role, said, shards, held, own=one.number)
        except ValueError as error:
            one.told, one.line.refused = (REFUSED, str(error)), True
            one.line.refuse(str(error))
            return
        self._crew.hear(one, said)

    def _ended(self, one: Joined, why: str) -> None:
        """A member has ended. Raises ServerDied if nobody can take its place."""
        if one.line:
            self._crew.refused += one.line.refused
            one.line.close()
            self._lines.remove(one.line)
        if one in self._waiting:
            self._waiting.remove(one)
        if self._crew.members.get(one.name) is not one:
            return
        del self._crew.members[one.name]
        told = one.told[1]
        if one.role == SERVER:
            reason = told or f"server {one.number} has ended ({why})"
            if self._crew.arranged:
                self._crew.server_died(one, reason)
            else:
                self._say(f"{reason}; another may join")
            return
        steps = self._crew.steps.get(one.number, {}).get("step", 0)
        if steps >= self._job.train.steps:
            self._say(f"worker {one.number} has finished")
            return
        self._say(  # servers that are gone end their own lines: a worker may be cut off alone
            f"worker {one.number} has left after step {steps} ({told or why}): another may take "
            "its place"
        )


def _read(said: bytes) -> Said:
    try:
        theirs = json.loads(said)
    except (ValueError, RecursionError):
        return {}
    return theirs if isinstance(theirs, dict) else {}
