"""The process of a server: the shard that it serves, and the replicas that it keeps of others'.

    replicas 0     shard n: workers come to its door
    replicas 1     shard n, and a replica of shard n - 1, whose door opens when server n - 1 dies

What it is told by the process that sees to the run:

    {"chains": …}             where the replicas of its shards are; then it begins
    {"promote": s}            the server of shard s is dead: its replica here serves
    {"drop": s, "dead": …}    a replica of shard s is dead, and where it was
    {"moved": …}              a shard is served elsewhere: what was saved of it last is in doubt
    {"end": …}                all shards have saved the last step
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from time import perf_counter
from typing import Any

from howdah.base.errors import Unfinished
from howdah.base.signals import StopRequest
from howdah.server.addresses import Address, address_in, address_of, bound
from howdah.server.chain import Follower
from howdah.server.host import GLANCE
from howdah.server.roll import Roll
from howdah.text.tokens import Corpus
from howdah.train.job import Job
from howdah.train.optional import OptionalOutput
from howdah.train.resume import Start
from howdah.train.served import LEDGERS, Saves, SaveSteps, Server, run_hello, sync_of
from howdah.train.served_trace import Keep, served
from howdah.train.served_worker import Tell

TELL = 1.0  # seconds between what a server reports
Said = dict[str, Any]


class Ended(Exception):
    """The run has ended, for a reason that is not this process's; the message says which."""


class Shards:
    """What one process has of the servers of a run.

    number  of the process
    at      the address at which it listens; empty: names of this machine
    tell    reports to the process that sees to the run
    saver   makes what saves the pieces of a shard
    keep    takes what its servers did last, for `howdah trace`
    awaits  whether it ends when it is told, not by itself
    """

    def __init__(  # noqa: PLR0913 (facts that have nothing in common)
        self,
        job: Job,
        number: int,
        *,
        start: Start,
        corpus: Corpus,
        secret: bytes,
        at: str,
        tell: Tell,
        saver: Callable[[int], Saves],
        keep: Keep,
        awaits: bool = False,
    ) -> None:
        replicas, hello = sync_of(job).replicas, run_hello(job)
        self.job, self._number, self._corpus, self._tell = job, number, corpus, tell
        self._saver, self._awaits, self._keep = saver, awaits or replicas > 0, keep
        self._beside = OptionalOutput(lambda line: tell({"said": line}))
        self._told: Queue[Said] = Queue()
        self._serving: dict[int, SaveSteps] = {}
        self._servers: dict[int, Server] = {}
        self._followers: dict[int, Follower] = {}
        self._doors: dict[int, socket.socket] = {}
        self.addresses: dict[int, Address] = {}
        self.feeds: dict[int, Address] = {}
        self._done: set[int] = set()
        self._in_doubt = False  # whether a save may have failed because a server has died
        for shard in Roll(job.layout.server, replicas).held_by(number):
            door = self._doors[shard] = bound(at)
            self.addresses[shard] = address_of(door)
            server = self._servers[shard] = Server(
                job, shard, start=start, listener=door, secret=secret, replicated=replicas > 0
            )
            if shard != number and server.chain:
                feed = bound(at)
                feed.listen()
                self.feeds[shard] = address_of(feed)
                told = {**hello, "shard": shard}
                self._followers[shard] = Follower(server.host, server.chain, feed, secret, told)
                server.ledger = server.ledger.with_name(f"{server.ledger.name}-on-{number}")

    def take(self, said: Said) -> None:
        """Takes a message; from any thread. A save that awaits a dead server is given up at once,
        for the process may wait for it.
        """
        if "moved" in said:
            self._in_doubt = True
            for saves in [*self._serving.values()]:
                saves.saver.cancel()
        self._told.put(said)

    def run(self, request: StopRequest) -> None:
        """Serves until the last step is saved, and a stop is not asked for. Raises Unfinished if it
        cannot be saved, Ended if the run has ended elsewhere.
        """
        reported = 0.0
        self._tell({"addresses": self.addresses, "feeds": self.feeds})
        try:
            while not request.signal and self._do():
                for saves in self._serving.values():
                    saves.server.host.look(GLANCE / len(self._serving))
                for server in self._servers.values():
                    server.host.heed()
                if perf_counter() - reported > TELL:
                    reported = perf_counter()
                    self._report()
                self._finish()
                if not self._awaits and self._done:
                    return
        finally:
            self._close()

    def _do(self) -> bool:
        """Does what was told since the last time; whether to go on."""
        with suppress(Empty):
            while said := self._told.get(block=not self._serving, timeout=GLANCE):
                if "end" in said:
                    return False
                if "ended" in said or "refused" in said:
                    raise Ended(str(said.get("refused") or said["ended"]))
                if "chains" in said:
                    for shard, behind in said["chains"].items():
                        self._begin(int(shard), [*map(address_in, behind)])
                if "promote" in said:
                    self._promote(int(said["promote"]))
                if "drop" in said and (chain := self._servers[int(said["drop"])].chain):
                    chain.drop(address_in(said["dead"]))
                if "moved" in said:
                    self._save_again()
                if "unreached" in said:  # by a chain of this process
                    self._tell(said)
        return True

    def _begin(self, shard: int, behind: list[Address]) -> None:
        server = self._servers[shard]
        if server.chain:
            server.chain.lost = partial(self._told.put, {"unreached": shard})
            server.chain.follow(behind)
        if shard == self._number:
            self._serve(shard)

    def _serve(self, shard: int) -> SaveSteps:
        server = self._servers[shard]
        saves = SaveSteps(server, self._saver(shard), self._corpus)
        server.desk.after = saves.look
        self._doors[shard].listen()
        self._serving[shard] = saves
        return saves

    def _promote(self, shard: int) -> None:
        """Serves a shard of which there was a replica here: first it hears its server no more."""
        server = self._servers[shard]
        self._followers.pop(shard).close()
        if server.chain:
            server.chain.told = server.host.release
        server.host.take_over()
        self._write_ledger(server)
        name = server.ledger.name.removesuffix(f"-on-{self._number}")
        with self._beside.writing(LEDGERS):
            server.ledger = server.ledger.replace(server.ledger.with_name(name))
        saves = self._serve(shard)
        server.host.do(saves.again)

    def _save_again(self) -> None:
        """The last step, of which a file may be missing, is saved by all once more."""
        self._in_doubt = False
        for shard, saves in self._serving.items():
            if saves.done >= self.job.train.steps:
                saves.saver.wait()
                self._done.discard(shard)
                saves.server.host.do(saves.again)

    def _finish(self) -> None:
        """Tells of the shards whose last step is saved."""
        for shard, saves in self._serving.items():
            if shard in self._done or not saves.over or saves.saver.busy:
                continue
            saves.saver.wait()
            if self._in_doubt:
                return
            if why := saves.saver.failed:
                raise Unfinished(f"step {saves.done} is not saved: {why}")
            self._done.add(shard)
            self._keep_trace(saves.server)
            self._tell(self._numbers(saves.server))
            self._tell({"done": shard})

    def _keep_trace(self, server: Server) -> None:
        if steps := served([*server.host.recent]):
            self._keep(f"server-{server.number}", steps)

    def _write_ledger(self, server: Server) -> None:
        with self._beside.writing(LEDGERS):
            server.write_ledger()

    def _report(self) -> None:
        for shard, server in self._servers.items():
            self._write_ledger(server)
            if shard in self._serving:
                self._tell(self._numbers(server))

    def _numbers(self, server: Server) -> dict[str, object]:
        """What a server has observed; this process's own, with what replicas here have refused."""
        found = server.numbers()
        if server.number == self._number:
            replicas = [self._servers[shard].host for shard in self._followers]
            for name in ("refused", "strangers"):
                found[name] += sum(host.counts[name] for host in replicas)
        return found

    def _close(self) -> None:
        for saves in self._serving.values():
            saves.saver.cancel()
            saves.saver.wait()
            self._keep_trace(saves.server)
        self._report()
        for follower in self._followers.values():
            follower.close()
        for shard, server in self._servers.items():
            server.host.close()
            if server.chain:
                server.chain.close()
            self._doors[shard].close()
        for server in self._servers.values():
            self._write_ledger(server)
