"""A server or a worker that joins a run by the address of its coordinator (`gathering.py`)."""

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Lock
from time import monotonic, sleep
from typing import Any

from torch import Tensor
from torch.distributed import Store

from howdah.base.errors import Unfinished, UserError
from howdah.base.signals import StopRequest
from howdah.checkpoint.folders import draft_folder, step_folder
from howdah.checkpoint.load import open_checkpoint
from howdah.comm.announce import announced
from howdah.comm.frames import FrameError
from howdah.comm.handshake import CALLER, Stranger, greet
from howdah.comm.interface import address_of
from howdah.comm.launch import Seat, explain
from howdah.comm.tls import sealing
from howdah.comm.transport import PeerLost, SingleRank, Transport
from howdah.parallel.flat_params import random_init
from howdah.plan.boxes import Piece
from howdah.server.addresses import Address, connected, spell
from howdah.server.line import Line, Take
from howdah.server.way import ServerAway, ServerGone, Way
from howdah.shapes.weights import weights
from howdah.text.tokens import Corpus
from howdah.train.console import RunConsole
from howdah.train.gathering import SERVER, WORKER, member_hello
from howdah.train.job import Job
from howdah.train.parcels import Parcel
from howdah.train.resume import Start, check_match, read_folder, read_weights
from howdah.train.run_folder import server_folder
from howdah.train.served import links_of, run_hello
from howdah.train.served_trace import teller
from howdah.train.served_worker import work
from howdah.train.shards import Ended, Shards

PATIENCE = 60.0  # seconds until a coordinator that does not answer is given up
AGAIN = 0.2  # seconds between attempts
GLANCE = 0.1  # seconds between looks for a stop signal
MOVED = "moved"
UNBEGUN = "stopped before the run began here"
Said = dict[str, Any]


class Inbox:
    """What the coordinator says, until somebody takes it."""

    def __init__(self) -> None:
        self._queue: Queue[Said] = Queue()
        self._to: Take | None = None
        self._changing = Lock()
        self.ended = ""  # why the run is over for this member

    def take(self, said: Said) -> None:
        """Called by the line."""
        self.ended = self.ended or str(said.get("refused") or said.get("ended") or "")
        with self._changing:
            (self._to or self._queue.put)(said)

    def pass_to(self, to: Take) -> None:
        """From now on `to` is called, with what has come so far, too."""
        with self._changing:
            with suppress(Empty):
                while True:
                    to(self._queue.get_nowait())
            self._to = to

    def next(self, request: StopRequest) -> Said:
        """Waits for the next message. Raises UserError if the member is refused, Unfinished if the
        line, or a stop signal, ends the wait.
        """
        while not request.signal:
            with suppress(Empty):
                said = self._queue.get(timeout=GLANCE)
                if "refused" in said:
                    raise UserError(f"the run refuses: {said['refused']}")
                if "unwritten" in said:
                    why = f"{said['unwritten']} of the checkpoint was not written: {said['why']}"
                    raise Unfinished(why)
                if "ended" in said:
                    raise Unfinished(f"the line to the coordinator has ended: {said['ended']}")
                return said
        raise Unfinished(UNBEGUN)


class Moves:
    """The servers whose place others have taken: the coordinator tells the first rank of a worker,
    and that one the others.

    store  of the ranks of a worker; None: it is one
    """

    def __init__(self, store: Store | None) -> None:
        self._store, self._told = store, list[int]()

    def take(self, said: Said) -> None:
        """On the first rank: what the coordinator says."""
        if moved := said.get("moved"):
            self._told += moved
            if self._store:
                self._store.set(MOVED, json.dumps(self._told))

    def so_far(self) -> Sequence[int]:
        """The numbers of these servers; one is there once for each time that it has moved."""
        with suppress(RuntimeError):  # the first rank has ended, and its store with it
            if self._store and self._store.check([MOVED]):
                return list[int](json.loads(self._store.get(MOVED)))
        return self._told


def serve_there(
    job: Job, corpus: Corpus, request: StopRequest, *, at: Address, secret: bytes
) -> None:
    """Joins a run as a server, and serves until its end. Raises UserError, Unfinished."""
    with server_folder(job.folder) as scratch:
        inbox = Inbox()
        line, here = join(job, corpus, SERVER, inbox, at=at, secret=secret, folder=scratch)
        with closing(line):
            seat = inbox.next(request)
            _say(f"joined as server {seat['seat']} of {spell(at)}, whose log tells of the run")
            for _ in range(seat["files"]):
                inbox.next(request)
            try:
                shards = Shards(
                    job,
                    int(seat["seat"]),
                    start=_start(job, corpus, scratch, int(seat["step"])),
                    corpus=corpus,
                    secret=secret,
                    at=address_of(job.plan.comm.interface) if job.plan.comm.interface else here,
                    tell=line.tell,
                    saver=lambda shard: Parcel(scratch, shard, line.send_file),
                    keep=teller(job, line.tell),
                    awaits=True,
                )
                inbox.pass_to(shards.take)
                shards.run(request)
                _say("the run has ended" if not request.signal else "left")
            except (UserError, Unfinished) as error:
                line.tell({"failed": explain(error).kind, "told": str(error)})
                line.flush()
                raise
            except Ended as end:
                raise Unfinished(f"the run has ended: {end}") from None


def work_there(  # noqa: PLR0913 (facts that have nothing in common)
    job: Job,
    corpus: Corpus,
    request: StopRequest,
    *,
    at: Address,
    secret: bytes,
    seat: Seat | None = None,
    meet: Callable[[], Transport] = SingleRank,
) -> None:
    """Joins a run as a worker, and trains until its end, or a stop signal. Raises UserError,
    Unfinished.

    seat, meet  of a rank of several: where it meets the others, and how; the first joins for all
    """
    inbox, first = Inbox(), seat is None or seat.rank == 0
    with ExitStack() as after:

        def take_place() -> str:
            line, _ = join(job, corpus, WORKER, inbox, at=at, secret=secret, folder=None)
            after.enter_context(closing(line))
            lines.append(line)
            place = inbox.next(request)
            _say(f"joined as worker {place['seat']} of {spell(at)}, whose log tells of the run")
            return json.dumps(place)

        def heed() -> None:
            if request.signal:
                raise Unfinished(UNBEGUN)

        lines = list[Line]()
        told = json.loads(
            announced(seat.store, take_place, first=first, heed=heed) if seat else take_place()
        )
        transport = after.enter_context(closing(meet()))
        _work_in(
            *(told, job, corpus, request, inbox),
            secret=secret,
            transport=transport,
            line=lines[0] if first else None,
            moves=Moves(seat.store if seat else None),
        )


def _work_in(  # noqa: PLR0913
    told: Said,
    job: Job,
    corpus: Corpus,
    request: StopRequest,
    inbox: Inbox,
    *,
    secret: bytes,
    transport: Transport,
    line: Line | None,
    moves: Moves,
) -> None:
    """Trains in a place that the coordinator has told.

    line  to the coordinator; None: another rank of the worker has it
    """
    if line:
        inbox.pass_to(moves.take)

    def tell(said: Mapping[str, Any]) -> None:
        if line:
            line.tell(said)

    def flush() -> None:
        if line:
            line.flush()

    start = Start(_nothing, None, int(told["step"]), int(told["samples"]))
    way = Way(
        [_address(one) for one in told["addresses"]],
        secret,
        {**run_hello(job), "process": int(told["process"])},
        others=[[_address(one) for one in every] for every in told["others"]],
        over=lambda: inbox.ended,
        leave=lambda: request.signal,
        moved=moves.so_far,
        **links_of(job),
    )
    try:
        step = work(
            job,
            int(told["seat"]),
            way,
            start=start,
            corpus=corpus,
            tell=tell,
            keep=teller(job, tell),
            leave=lambda: request.signal or inbox.ended,
            transport=transport,
        )
    except PeerLost as lost:
        tell({"failed": "lost", "told": str(lost)})
        flush()
        raise
    except ServerGone as gone:
        kind = "away" if isinstance(gone, ServerAway) else "lost"
        tell({"failed": kind, "told": str(gone)})
        why = inbox.ended
        flush()
        raise Unfinished(f"the run has ended: {why}" if why else str(gone)) from None
    why = inbox.ended
    flush()
    if line and not why:
        _say(f"{'finished' if step >= job.train.steps else 'left after'} step {step}")
    if step < job.train.steps and why:
        raise Unfinished(f"the run has ended: {why}")


def join(  # noqa: PLR0913 (facts that have nothing in common)
    job: Job,
    corpus: Corpus,
    role: str,
    inbox: Inbox,
    *,
    at: Address,
    secret: bytes,
    folder: Path | None,
) -> tuple[Line, str]:
    """Connects to a coordinator, which may not have begun yet; returns the line, and the address of
    this machine that leads there. Raises UserError.
    """
    hello = json.dumps({**member_hello(job, corpus), "role": role}).encode()
    until, why = monotonic() + PATIENCE, ""
    while monotonic() < until:
        sock: socket.socket | None = None
        try:
            sock = connected(at, sealing(job.plan.comm.tls, calls=True))
            greet(sock, secret, hello, role=CALLER)
        except (OSError, Stranger, FrameError) as error:
            why = str(error)
            if sock:
                sock.close()
            sleep(AGAIN)
            continue
        here = str(sock.getsockname()[0])
        return Line(sock, "the coordinator", take=inbox.take, folder=folder).start(), here
    raise UserError(
        f"--join: nobody at {spell(at)} let this {role} in for {PATIENCE:g} s ({why}); check that "
        "howdah train --listen runs there, that this machine reaches it, and that both have the "
        "same secret (HOWDAH_SECRET_FILE)"
    )


def _start(job: Job, corpus: Corpus, scratch: Path, step: int) -> Start:
    """The start of a server, whose checkpoint has come into `scratch`, if there is one."""
    if step < 0:
        fill = read_folder(job.init_from, job.shape) if job.init_from else None
        return Start(fill or random_init(weights(job.shape), job.seed), None, 0, 0)
    there = step_folder(scratch, step)
    draft_folder(scratch, step).rename(there)
    checkpoint = open_checkpoint(there)
    check_match(checkpoint, job, corpus)
    return Start(read_weights(checkpoint, job), checkpoint, checkpoint.step, checkpoint.samples)


def _nothing(piece: Piece, out: Tensor) -> None:
    """Fills no weights: a worker pulls them before it uses them."""
    out.zero_()


def _address(said: Any) -> tuple[str, int]:
    return str(said[0]), int(said[1])


def _say(line: str) -> None:
    RunConsole(0).say(line)
