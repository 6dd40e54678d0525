"""What a parameter server applies when, and which pulls it answers: BSP, SSP and ASP as clocks.

A worker p has a *clock* c_p, the number of steps that it has finished. In step c it pulls every key
(a chunk of weights), computes, and pushes a gradient for every key: the update (p, c, key).

    bsp      a pull at clock c contains exactly the updates with clocks below c of all live workers.
             The updates of a clock are applied together, added in the order of the workers
    asp      an update is applied when it arrives; a pull gets what is there, once all of its own is
    ssp(s)   as asp, but a pull at clock c contains at least all updates with clocks up to c - s - 1
             of all live workers, and all of its own (Ho et al. 2013,
             https://papers.nips.cc/paper/4894)

Under ssp a worker starts clock c only if c - min_q c_q <= s. That follows from its pulls: it cannot
compute a layer before the pull of that layer's keys is answered, so nobody has to know all clocks.
Two live workers are at most s + 1 steps apart. ssp(0) is run as bsp, which is what it means.

An update is applied at most once, however often it is sent: by a retry after a lost connection, or
by the successor of a killed worker (its next *incarnation*), which computes that step again.
Only the keys that lack the update take it. At the start of a run all places are waited for; a
worker that has left holds nobody up. What a dead worker has pushed of an incomplete round of bsp is
dropped; what one has pushed that has finished stays.

This is the state of one server, for its own keys. It has no weights, knows no time, sends nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from howdah.plan.method import Sync

INCARNATIONS = 1 << 62  # and less is one of them: it has a field of a message


class Update(NamedTuple):
    """The identity of a push: the worker's place and incarnation, its clock, and the key."""

    worker: int
    incarnation: int
    clock: int
    key: int


class Round(NamedTuple):
    """Updates that are added, in this order, and applied as one.

    stale  how many versions old the weights were on which the oldest of them was computed
    """

    updates: tuple[Update, ...]
    stale: int


class Refused(Exception):
    """A message that no sound worker sends: its place, incarnation, clock or key is wrong."""


@dataclass
class Member:
    """A worker's place.

    incarnation  of the process that has the place, counted from 1; 0: the first is waited for
    live         whether a process has it, or the first is waited for
    bye          whether its last process has left in good order
    done         by key, the clock of the update that is expected next
    pulled       by key, the version that its latest pull got
    """

    incarnation: int
    live: bool
    done: list[int]
    pulled: list[int]
    bye: bool = False

    def __post_init__(self) -> None:
        self._at = Counter(self.done)  # keys, by the clock that they expect

    @property
    def clock(self) -> int:
        """The number of steps whose updates are all there."""
        return min(self._at)

    def expect(self, key: int, clock: int) -> None:
        """The update of a key that is expected next."""
        self._at[self.done[key]] -= 1
        if not self._at[self.done[key]]:
            del self._at[self.done[key]]
        self.done[key] = clock
        self._at[clock] += 1


@dataclass
class Clocks:
    """The clocks of all workers' places, and the versions of all keys.

    keys       number of keys of this server, which are numbered from 0
    start      the clock at which the run begins
    end        the clock at which it ends
    members    by place
    versions   by key, how often it was updated
    ages       by place, how many of its updates were computed on weights that were so many
               versions old
    repeated   updates that were sent again, and not applied again
    missed     steps that places have missed while nobody had them
    """

    sync: Sync
    keys: int
    start: int = 0
    end: int = 1 << 62
    members: dict[int, Member] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    ages: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    repeated: int = 0
    missed: int = 0

    def __post_init__(self) -> None:
        self.versions = [0] * self.keys
        awaited = (Member(0, True, [self.start] * self.keys, []) for _ in range(self.sync.workers))
        self.members = dict(enumerate(awaited))
        self._rounds: list[dict[int, Update]] = [{} for _ in range(self.keys)]  # bsp: by worker

    @property
    def live(self) -> list[int]:
        """The places that a process has, or that are waited for, in order."""
        return sorted(place for place, one in self.members.items() if one.live)

    @property
    def reached(self) -> tuple[int, int]:
        """Under bsp, the steps that are in the weights: of the keys with the fewest, and with the
        most. Dead places do not count; without live ones, the rounds that were applied do.
        """
        there = [self.members[place] for place in self.live]
        of = min if there else max
        there = there or [*self.members.values()]
        clocks = [of(one.done[key] for one in there) for key in range(self.keys)]
        return min(clocks), max(clocks)

    # -- members

    def join(self, worker: int, incarnation: int = 0) -> tuple[int, int]:
        """Gives the place `worker` to a new process; returns its incarnation, and the clock at
        which it goes on: that of the place. A successor must not hold others up (bsp, ssp): it goes
        on at least where the slowest live worker is.

        incarnation  that another server has given it; 0: the next one

        Raises Refused for a place that there is not, or an incarnation that is over.
        """
        if not 0 <= worker < self.sync.workers:
            raise Refused(f"worker {worker} has no place among {self.sync.workers}")
        if not 0 <= incarnation < INCARNATIONS:
            raise Refused(f"{incarnation} is no incarnation")
        old = self.members[worker]
        done = [self._made(worker, key) for key in range(self.keys)]
        if incarnation and incarnation <= old.incarnation:
            raise Refused(f"incarnation {incarnation} of worker {worker} is over")
        if old.incarnation and self.sync.kind != "asp":
            least = self._least(worker)
            self.missed += max(least - min(done), 0)
            done = [max(clock, least) for clock in done]
        incarnation = incarnation or old.incarnation + 1
        self.members[worker] = Member(incarnation, True, list(done), list(self.versions))
        if not old.bye:  # what one has pushed that has finished stays
            self._forget(worker, old.incarnation)
        return incarnation, min(done)

    def _made(self, worker: int, key: int) -> int:
        """The steps of a place of which a key's updates are applied, or stay in their round."""
        one, waits = self.members[worker], self._rounds[key].get(worker)
        return max(one.done[key], waits.clock + 1) if one.bye and waits else one.done[key]

    def _least(self, worker: int) -> int:
        """The clock at which a place goes on at least."""
        if self.sync.barrier:  # rounds that have begun do not await it
            rounds = [update.clock + 1 for awaited in self._rounds for update in awaited.values()]
            return max([*rounds, *(n for one in self.members.values() for n in one.done)])
        others = [one for place, one in self.members.items() if place != worker]
        if live := [one.clock for one in others if one.live]:
            return min(live)
        bound = self.sync.bound + 1 if self.sync.kind == "ssp" else 0
        return max([self.start, *(one.clock - bound for one in others)])

    def begin(self, worker: int, incarnation: int, clock: int) -> list[Round]:
        """A worker that has joined all servers begins at a clock (`Sync.begins` of theirs).
        Returns the rounds of bsp that are complete without it.
        """
        one = self._member(worker, incarnation, 0)
        if not self.start <= clock <= self.end:
            raise Refused(f"clock {clock} is not one of {self.start} to {self.end}")
        for key in range(self.keys):
            one.expect(key, max(one.done[key], clock))
        return [together for key in range(self.keys) for together in self._complete(key)]

    def leave(self, worker: int, incarnation: int, *, finished: bool = False) -> list[Round]:
        """The process of a place has ended. Returns the rounds of bsp that are complete without it.

        finished  it has pushed all that it wanted to: what waits of it stays in its rounds
        """
        one = self.members.get(worker)
        if one is None or not one.live or one.incarnation != incarnation:
            return []  # its successor has the place
        one.live, one.bye = False, finished
        if not finished:
            self._forget(worker, incarnation)
        return [together for key in range(self.keys) for together in self._complete(key)]

    def _forget(self, worker: int, incarnation: int) -> None:
        for awaited in self._rounds:
            if worker in awaited and awaited[worker].incarnation == incarnation:
                del awaited[worker]

    # -- pushes

    def push(self, update: Update) -> list[Round]:
        """Takes an update. Returns what is to be applied now; nothing if the update awaits others,
        or was applied before.

        Raises Refused.
        """
        worker, incarnation, clock, key = update
        done = self._member(worker, incarnation, key).done[key]
        if clock < self.start:
            raise Refused(f"worker {worker} pushes clock {clock}, and {self.start} is the first")
        if clock < done or worker in self._rounds[key]:
            self.repeated += 1
            return []
        if clock > done:
            raise Refused(f"worker {worker} pushes clock {clock} of key {key} before {done}")
        if not self.sync.barrier:
            return [self._applied(key, [update])]
        self._rounds[key][worker] = update
        return list(self._complete(key))

    def _complete(self, key: int) -> Iterator[Round]:
        """The round of bsp that a key awaits, if all live workers that belong to it have pushed."""
        awaited = self._rounds[key]
        if not awaited:
            return
        clock = min(update.clock for update in awaited.values())
        if all(one in awaited or self.members[one].done[key] > clock for one in self.live):
            together = [awaited.pop(worker) for worker in sorted(awaited)]
            yield self._applied(key, together)

    def _applied(self, key: int, together: list[Update]) -> Round:
        lags = [self.versions[key] - self.members[one.worker].pulled[key] for one in together]
        for update, lag in zip(together, lags, strict=True):
            member = self.members[update.worker]  # or its successor, which may be further
            member.expect(key, max(member.done[key], update.clock + 1))
            self.ages[update.worker][lag] += 1
        self.versions[key] += 1
        return Round(tuple(together), max(lags))

    # -- pulls

    def may_pull(self, worker: int, incarnation: int, *, clock: int, key: int) -> bool:
        """Whether a pull of a worker that is at `clock` can be answered now. Raises Refused."""
        own = self._member(worker, incarnation, key).done[key]
        if not self.start <= clock <= own + 1:
            raise Refused(f"worker {worker} pulls key {key} at clock {clock}, and is at {own}")
        if self.sync.kind == "asp":  # behind its own push, on whose weights it would not be
            return own >= clock
        bound = 0 if self.sync.barrier else self.sync.bound
        return own >= clock and all(
            self.members[one].done[key] >= clock - bound for one in self.live
        )

    def pulled(self, worker: int, key: int) -> int:
        """A pull was answered; returns the version that it got."""
        self.members[worker].pulled[key] = self.versions[key]
        return self.versions[key]

    def _member(self, worker: int, incarnation: int, key: int) -> Member:
        one = self.members.get(worker)
        if one is None or not one.live or not one.incarnation:
            raise Refused(f"worker {worker} has not joined")
        if incarnation != one.incarnation:
            raise Refused(f"incarnation {incarnation} of worker {worker} is over")
        if not 0 <= key < self.keys:
            raise Refused(f"key {key} is not one of {self.keys}")
        return one
