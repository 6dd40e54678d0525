"""The members of a run with servers, as the process that sees to it knows them: who is there, what
they report, and what follows when one dies.

    servers tell where they listen  ──> each is told where the replicas of its shards are
    workers tell of every step      ──> a line of the log, a row of metrics.jsonl
    a server dies                   ──> a replica takes its place, or the run ends
    all shards are saved            ──> all are told to end

How members are started, and told things, is `serving.py` (processes of this machine) and
`gathering.py` (they join from anywhere).
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from howdah.base.quantities import spell
from howdah.server.addresses import Address, address_in
from howdah.server.roll import Roll
from howdah.server.way import Way
from howdah.train.console import Say
from howdah.train.job import Job
from howdah.train.metrics import BOARD, METRICS, append
from howdah.train.optional import OptionalOutput
from howdah.train.served import links_of, run_hello, sync_of
from howdah.train.served_metrics import SLOWER, histograms_of, measured, scalars_of
from howdah.train.served_trace import land
from howdah.train.tensorboard import Board

STALLED = 60.0  # seconds without a word of a server that has replicas, after which it is ended
Said = dict[str, Any]


@dataclass
class Member:
    """A server or worker.

    tell     sends it a message
    end      ends it: it is not heard of any more
    addresses, feeds  of a server: where each of its shards listens, for workers and as a replica
    process  its number among the workers that were started or seated
    told     why it has failed, as it says itself: a kind of `comm/launch.py`, and a text
    heard    when it last said something
    """

    role: str
    number: int
    tell: Callable[[Mapping[str, Any]], None]
    end: Callable[[], None]
    addresses: dict[int, Address] = field(default_factory=dict)
    feeds: dict[int, Address] = field(default_factory=dict)
    process: int = 0
    told: tuple[str, str] = ("", "")
    heard: float = field(default_factory=monotonic)

    @property
    def name(self) -> str:
        """As sentences name it."""
        return f"{self.role} {self.number}"


class ServerDied(Exception):
    """A server has ended; the message says why, and how the run goes on."""


class Crew:
    """The members of one run.

    members  by name, those that are live
    steps    by worker, its last report; shards: by shard, that of its server
    again    what makes the run go on, as sentences say it
    strangers  connections to the coordinator that did not prove that they know the secret
    refused    those that sent what no member sends
    """

    def __init__(self, job: Job, say: Say, *, step: int, again: str) -> None:
        self.job, self.say, self.again = job, say, again
        self.members: dict[str, Member] = {}
        self.steps: dict[int, Said] = {}
        self.shards: dict[int, Said] = {}
        self.done: set[int] = set()
        self.arranged, self.strangers, self.refused = False, 0, 0
        self._roll = Roll(job.layout.server, sync_of(job).replicas)
        self._said, self._beside = step, OptionalOutput(say)
        self._board = Board(job.folder / BOARD, step=max(step, 0))

    @property
    def servers(self) -> list[Member]:
        """The servers that are live."""
        return [one for one in self.members.values() if one.role == "server"]

    @property
    def over(self) -> bool:
        """Whether all shards have saved the last step."""
        return len(self.done) == self.job.layout.server

    def held_by(self, one: Member) -> list[int]:
        """The shards that a member has."""
        return self._roll.held_by(one.number) if one.role == "server" else []

    def way(self, secret: bytes, process: int) -> Way:
        """How a worker reaches the servers; `process` is its number."""
        every = {one.number: one for one in self.servers}
        found: list[list[Address]] = [
            [every[process].addresses[shard] for process in chain]
            for shard, chain in sorted(self._roll.holders.items())
        ]
        first, others = [one[0] for one in found], [one[1:] for one in found]
        hello = {**run_hello(self.job), "process": process}
        return Way(first, secret, hello, others=others, **links_of(self.job))

    def hear(self, one: Member, said: Said) -> None:
        """Takes what a member says."""
        one.heard = monotonic()
        if "failed" in said:
            if said["failed"] != "lost" or not one.told[0]:  # a rank of it has lost another
                one.told = str(said["failed"]), str(said["told"])
        elif "said" in said:
            self.say(str(said["said"]))
        elif "addresses" in said:
            one.addresses = _read(said["addresses"])
            one.feeds = _read(said["feeds"])
            self._arrange()
        elif "trace" in said:
            shards = [f"server-{shard}" for shard in one.addresses]
            land(self.job, said, [f"worker-{one.number}"] if one.role == "worker" else shards)
        elif "done" in said:
            self.done.add(int(said["done"]))
        elif "unreached" in said:
            self._end_unreached(one, int(said["unreached"]))
        elif one.role == "server":
            self.shards[int(said["server"])] = said
            self._end_frozen(one, said.get("gone", {}))
        else:
            self.steps[one.number] = said
            self._report()

    def _arrange(self) -> None:
        """Tells all servers who copies whom, when all have told where they listen."""
        every = {one.number: one for one in self.servers if one.addresses}
        if self.arranged or len(every) < self.job.layout.server:
            return
        self.arranged = True
        for number, one in every.items():
            one.heard = monotonic()  # it had nothing to say while it waited for the others
            chains = {}
            for shard in self._roll.held_by(number):
                holders = self._roll.holders[shard]
                behind = holders[holders.index(number) + 1 :]
                chains[shard] = [every[process].feeds[shard] for process in behind]
            one.tell({"chains": chains})

    def lost(self, why: str) -> ServerDied:
        """What ends a run whose weights died with a server."""
        what = "what it had since the last checkpoint is lost"
        return ServerDied(f"{why}; {what}: go on with {self.again}")

    def server_died(self, one: Member, why: str) -> None:
        """A server has ended before the run: its replicas take its place. Raises ServerDied if it
        has none.
        """
        if not self.arranged:
            raise self.lost(why)
        orders, moved = self._roll.died(one.number), []
        if not self.done.issuperset(self._roll.lost):
            raise self.lost(why)
        for process, what, shard_number in orders:
            other = self.members.get(f"server {process}")
            if other and what == "drop":
                other.tell({"drop": shard_number, "dead": one.feeds[shard_number]})
            elif other and shard_number not in self.done:
                other.tell({"promote": shard_number})
                moved.append(shard_number)
        for shard_number in moved:
            to = self._roll.holders[shard_number][0]
            self.say(f"{why}; its replica on server {to} has taken its place: nothing is lost")
        if moved:
            for member in self.members.values():
                member.tell({"moved": moved})

    def _end_frozen(self, server: Member, gone: Mapping[str, int]) -> None:
        """Ends workers whose places a server has given up, by place their processes' numbers: they
        are frozen, or cut off, and would be refused if they came back.
        """
        for place, process in gone.items():
            one = self.members.get(f"worker {place}")
            if one and process and one.process == process and not one.told[0]:
                one.told = "stalled", f"{one.name} is frozen, or cut off from {server.name}"
                one.end()

    def _end_unreached(self, server: Member, shard: int) -> None:
        """Ends the server with the replica of a shard that the shard's server cannot reach, unless
        that one is about to end itself. All that was acknowledged is on both.
        """
        holders = self._roll.holders[shard]
        if server.told[0] or server.number not in holders[:-1]:
            return
        behind = holders[holders.index(server.number) + 1]
        if (one := self.members.get(f"server {behind}")) and not one.told[0]:
            one.told = (
                "stalled",
                f"{one.name} copies nothing of {server.name}, or is cut off from it",
            )
            one.end()

    def end_stalled(self) -> None:
        """Ends servers that have said nothing for too long, where replicas can take their place."""
        for one in self.servers if self.arranged and sync_of(self.job).replicas else ():
            if monotonic() - one.heard > STALLED:
                one.told = "stalled", f"{one.name} has said nothing for {STALLED:g} s"
                one.end()

    def _report(self) -> None:
        """A line, and a row of metrics.jsonl, when all workers that are there, or have done their
        steps, have come so far. Who joins later may be far behind: then the step is a lower one.
        """
        every, steps = self.job.train.log_every, self.job.train.steps
        places = {one.number for one in self.members.values() if one.role == "worker"}
        places |= {place for place, said in self.steps.items() if said["step"] >= steps}
        if not places or not places <= self.steps.keys():
            return
        there = {place: self.steps[place] for place in places}
        step = min(said["step"] for said in there.values())
        if step == self._said or (step % every and step != steps):
            return
        self._said = step
        row = measured(there, self.shards)
        row |= {"strangers": self.strangers, "refused": self.refused}
        with suppress(OSError):
            append(self.job.folder / METRICS, json.dumps({"kind": "served", "step": step, **row}))
        with self._beside.writing(BOARD):
            self._board.add(scalars_of(row), step, histograms_of(row))
        late = f" ({row['slower']:.1f} times the others)" if row["slower"] >= SLOWER else ""
        self.say(
            f"step: {step:2d}  loss: {row['loss']:8.5f}  tps: {row['tps']:,.0f}  "
            f"stale: {row['stale']:.2f} (at most {row['oldest']})  apart: {row['apart']}  "
            f"slowest: worker {row['slowest']}{late}  queue: {row['queue']}  "
            f"push: {spell(row['push_rate'], 'bytes/s')}  "
            f"pull: {spell(row['pull_rate'], 'bytes/s')}"
        )


def _read(said: Mapping[str, Any]) -> dict[int, Address]:
    """Addresses by shard, as JSON has them."""
    return {int(shard): address_in(at) for shard, at in said.items()}
