"""BSP, SSP and ASP over random schedules: what every pull contains, how far workers are apart.

A schedule is one run of a few workers and one or two servers, of which somebody at random does the
next thing: a worker joins a server, pulls a key, pushes one, repeats an old push, is killed, or
comes back; a server hears that it is gone, or answers. Instead of weights a server has the list of
the updates that it has applied, so a pull's answer says what it contains.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from howdah.plan.method import Sync
from howdah.server.clocks import Clocks, Refused, Update
from howdah.server.desk import Desk
from howdah.server.ledger import twice

RULES = [("bsp", 0), ("ssp", 0), ("ssp", 1), ("ssp", 3), ("asp", 0)]
STEPS = 5
PATIENCE = 50_000  # things that may happen until all have finished
ACTIONS = ["join", "pull", "early", "push", "push", "again", "hear", "answer"]


class Applied:
    """In the place of weights: by key, the updates that were applied, in order."""

    def __init__(self, keys):
        self.applied = [[] for _ in range(keys)]

    def apply(self, one, terms):
        assert [terms[update.worker] for update in one.updates] == [*map(str, one.updates)]
        self.applied[one.updates[0].key] += [(u.worker, u.clock) for u in one.updates]

    def pulled(self, worker, key):
        return tuple(self.applied[key])


@dataclass
class Worker:
    """A process in a place.

    todo     what it does next, in some order, before anything else: calls
    begun    the clock at which it began, once it has joined all servers
    wanted   keys (server, key) that it has not pulled; asked: and has not asked for
    unsent   keys that it has not pushed, some of which it may have asked for again: pulls are short
    ahead    those; early: that were answered
    """

    place: int
    incarnations: list[int]
    joins: list[int]
    told: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    begun: int = -1
    clock: int = -1
    wanted: set = field(default_factory=set)
    asked: set = field(default_factory=set)
    unsent: set = field(default_factory=set)
    ahead: set = field(default_factory=set)
    early: set = field(default_factory=set)
    sent: list = field(default_factory=list)


class Play:
    """One schedule."""

    def __init__(self, seed, kind, bound, *, kills=2):
        self.random = Random(seed)
        self.sync = Sync(kind, bound, workers=self.random.randint(1, 4))
        self.kills = self.random.choice([0, kills])
        keys = [self.random.randint(1, 3) for _ in range(self.random.randint(1, 2))]
        self.desks = [Desk(Clocks(self.sync, n), Applied(n), fifo=seed % 2 == 0) for n in keys]
        self.keys = {(s, key) for s, n in enumerate(keys) for key in range(n)}
        self.live, self.departed, self.finished, self.begun = {}, [], set(), {}
        self.bound = 0 if kind == "bsp" else bound

    def run(self):
        for _ in range(PATIENCE):
            if len(self.finished) == self.sync.workers and not self.departed:
                return self
            name = self.random.choice(ACTIONS)
            getattr(self, name)()
            if self.kills and self.random.random() < 0.01:
                self.kill()
        raise AssertionError(f"stuck: {self.live}, {[d.clocks.members for d in self.desks]}")

    def pick(self, chosen=lambda worker: True):
        some = [worker for _, worker in sorted(self.live.items()) if chosen(worker)]
        return self.random.choice(some) if some else None

    def join(self):
        free = sorted(set(range(self.sync.workers)) - self.live.keys() - self.finished)
        if free and self.random.random() < 0.5:
            place, servers = self.random.choice(free), [*range(len(self.desks))]
            self.random.shuffle(servers)
            self.live[place] = Worker(place, [0] * len(servers), servers, begins=servers.copy())
        if (worker := self.pick(lambda worker: worker.begins)) is None:
            return
        if worker.joins:
            server = worker.joins.pop()
            incarnation, clock = self.desks[server].join(worker.place)
            worker.incarnations[server] = incarnation
            worker.told.append(clock)
            return
        server = worker.begins.pop()
        at = self.sync.begins(worker.told)
        self.desks[server].begin(worker.place, worker.incarnations[server], at)
        if not worker.begins:
            worker.begun = worker.clock = self.begun[worker.place] = at
            self.next_step(worker)

    def next_step(self, worker):
        worker.wanted, worker.asked = self.keys - worker.early, self.keys - worker.ahead
        worker.ahead, worker.early = set(), set()
        worker.unsent = set() if worker.wanted else set(self.keys)
        self.check_spread()
        if worker.clock >= STEPS:
            self.finished.add(worker.place)
            self.end(worker, finished=True)

    def end(self, worker, *, finished=False):
        del self.live[worker.place]
        numbers = enumerate(worker.incarnations)
        self.departed += [(s, worker.place, n, finished) for s, n in numbers if n]

    def kill(self):
        if worker := self.pick():
            self.kills -= 1
            self.end(worker)

    def hear(self):
        if self.departed:
            index = self.random.randrange(len(self.departed))
            server, place, incarnation, finished = self.departed.pop(index)
            self.desks[server].leave(place, incarnation, finished=finished)

    def pull(self):
        if worker := self.pick(lambda worker: worker.begun >= 0 and worker.asked):
            server, key = self.random.choice(sorted(worker.asked))
            worker.asked.discard((server, key))
            number = worker.incarnations[server]
            self.desks[server].pull(worker.place, number, clock=worker.clock, key=key)

    def early(self):
        """A pull overtakes a push of the step before it."""
        if worker := self.pick(lambda worker: worker.unsent - worker.ahead):
            server, key = at = self.random.choice(sorted(worker.unsent - worker.ahead))
            if worker.clock + 1 < STEPS:
                worker.ahead.add(at)
                number = worker.incarnations[server]
                self.desks[server].pull(worker.place, number, clock=worker.clock + 1, key=key)

    def push(self):
        if worker := self.pick(lambda worker: worker.unsent):
            server, key = self.random.choice(sorted(worker.unsent))
            worker.unsent.discard((server, key))
            update = Update(worker.place, worker.incarnations[server], worker.clock, key)
            self.desks[server].push(update, str(update))
            if self.sync.kind == "asp":
                assert (worker.place, worker.clock) in self.desks[server].shard.applied[key], "late"
            worker.sent.append((server, update))
            if not worker.unsent:
                worker.clock += 1
                self.next_step(worker)

    def again(self):
        if worker := self.pick(lambda worker: worker.sent):
            server, update = self.random.choice(worker.sent)
            before = [*self.desks[server].shard.applied[update.key]]
            assert not self.desks[server].push(update, str(update))
            assert self.desks[server].shard.applied[update.key] == before

    def answer(self):
        server = self.random.randrange(len(self.desks))
        for answer in self.desks[server].answers():
            worker, at = self.live.get(answer.worker), (server, answer.key)
            if worker and answer.clock == worker.clock and at in worker.wanted:
                self.check_pull(server, worker, answer)
                worker.wanted.discard(at)
                if not worker.wanted:
                    worker.unsent = set(self.keys)
            elif worker and answer.clock == worker.clock + 1 and at in worker.ahead:
                self.check_pull(server, worker, answer)
                worker.early.add(at)
        if self.sync.kind == "asp":
            members = self.desks[server].clocks.members
            for wish in self.desks[server].wishes:
                own = members[wish.worker].done[wish.key]
                assert own < wish.clock, "a pull of asp waits for others"

    # -- what must hold

    def check_pull(self, server, worker, answer):
        has, at = set(answer.weights), answer.clock
        due = at - self.bound if self.sync.kind != "asp" else 0
        for one in self.live.values():
            if one.begun < 0:
                continue
            upto = at if one is worker else due
            awaited = {(one.place, clock) for clock in range(one.begun, upto)}
            assert awaited <= has, f"a pull at clock {at} lacks {awaited - has}"
        if self.desks[server].clocks.sync.barrier:
            newer = {(place, clock) for place, clock in has if clock >= at}
            assert not newer, f"a pull at clock {at} has {newer}"

    def check_spread(self):
        """A step of which a dead predecessor has pushed the rest is finished, too."""
        there = [worker for worker in self.live.values() if worker.begun >= 0]
        if self.sync.kind != "asp" and there:
            done = [min(d.clocks.members[one.place].clock for d in self.desks) for one in there]
            slowest = min(max(one.clock, n) for one, n in zip(there, done, strict=True))
            assert max(one.clock for one in there) - slowest <= self.bound + 1


def play(seeds, kind, bound):
    """Plays schedules; returns how often an update was repeated, and how many places had kills."""
    repeated = kills = 0
    for seed in seeds:
        one = Play(seed, kind, bound).run()
        for desk in one.desks:
            assert twice(desk.ledger) == []
            clocks = desk.clocks
            assert not desk.wishes and not desk._terms and not any(clocks._rounds)
            repeated += clocks.repeated
            kills += sum(member.incarnation - 1 for member in clocks.members.values())
            if kind == "asp":  # whoever was killed, and wherever
                every = {(p, c): 1 for p in one.begun for c in range(STEPS)}
                assert all(Counter(applied) == every for applied in desk.shard.applied)
            elif all(member.incarnation == 1 for member in clocks.members.values()):
                every = {(p, c): 1 for p, first in one.begun.items() for c in range(first, STEPS)}
                assert all(Counter(applied) == every for applied in desk.shard.applied)
    return repeated, kills


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("kind", "bound"), RULES)
def test_what_pulls_contain_over_random_schedules(kind, bound):
    repeated, kills = play(range(100), kind, bound)
    assert repeated > 100 and kills > 20


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("kind", "bound"), RULES)
def test_what_pulls_contain_over_ten_thousand_random_schedules(kind, bound, part):
    play(range(1000 + 500 * part, 1500 + 500 * part), kind, bound)


# -- the schedules notice


def broken(monkeypatch, name, replacement):
    monkeypatch.setattr(Clocks, name, replacement)


def test_a_pull_that_waits_for_too_little_is_noticed(monkeypatch):
    kept = Clocks.may_pull

    def earlier(self, *place, clock, key):
        return kept(self, *place, clock=max(clock - 1, 0), key=key)

    broken(monkeypatch, "may_pull", earlier)
    for kind, bound in RULES[:-1]:
        with pytest.raises(AssertionError, match=r"lacks|assert"):
            play(range(100), kind, bound)


def test_an_update_that_is_applied_twice_is_noticed(monkeypatch):
    def forgetful(self, update):
        self.members[update.worker].done[update.key] = update.clock
        return [self._applied(update.key, [update])]

    broken(monkeypatch, "push", forgetful)
    with pytest.raises(AssertionError):
        play(range(20), "asp", 0)


def test_a_round_that_is_applied_before_all_have_pushed_is_noticed(monkeypatch):
    broken(monkeypatch, "live", property(lambda self: []))
    with pytest.raises(AssertionError):
        play(range(20), "bsp", 0)


@pytest.mark.parametrize("what", ["push", "pull"])
def test_asp_that_waits_is_noticed(what, monkeypatch):
    push = Clocks.push

    def applied_later(self, update):
        held, self.held = getattr(self, "held", []), push(self, update)
        return held

    def answered_later(self, worker, incarnation, *, clock, key):
        self._member(worker, incarnation, key)
        return all(self.members[one].done[key] >= clock for one in self.live)

    name, late = ("push", applied_later) if what == "push" else ("may_pull", answered_later)
    broken(monkeypatch, name, late)
    with pytest.raises(AssertionError, match="late" if what == "push" else "a pull of asp waits"):
        play(range(20), "asp", 0)


# -- single rules


def joined(kind, bound=0, *, workers=2, keys=1):
    clocks = Clocks(Sync(kind, bound, workers), keys)
    for worker in range(workers):
        assert clocks.join(worker) == (1, 0)
    return clocks


def test_bsp_adds_a_round_in_the_order_of_the_workers():
    clocks = joined("bsp", workers=3)
    first, second, third = (Update(worker, 1, 0, 0) for worker in range(3))
    assert clocks.push(third) == [] and clocks.push(first) == []
    (one,) = clocks.push(second)
    assert one.updates == (first, second, third) and clocks.versions == [1]


def test_a_round_of_bsp_is_complete_when_the_one_that_it_awaits_has_left():
    clocks = joined("bsp", workers=2)
    clocks.push(Update(0, 1, 0, 0))
    (one,) = clocks.leave(1, 1)
    assert one.updates == (Update(0, 1, 0, 0),)


def test_what_a_dead_worker_pushed_of_an_open_round_is_dropped():
    clocks = joined("bsp", workers=2)
    clocks.push(Update(0, 1, 0, 0))
    assert clocks.leave(0, 1) == []
    (one,) = clocks.push(Update(1, 1, 0, 0))
    assert one.updates == (Update(1, 1, 0, 0),)


def test_a_frozen_worker_stops_the_others_at_exactly_the_bound():
    clocks = joined("ssp", 2, workers=2)
    for clock in range(9):
        if not clocks.may_pull(0, 1, clock=clock, key=0):
            break
        clocks.push(Update(0, 1, clock, 0))
    assert clock == 3  # it has finished three steps, and the frozen worker none


def test_how_old_weights_were_is_counted():
    clocks = joined("asp", workers=3)
    for worker in range(3):
        clocks.pulled(worker, 0)
    for worker in range(3):
        clocks.push(Update(worker, 1, 0, 0))
    assert clocks.ages == {0: {0: 1}, 1: {1: 1}, 2: {2: 1}}


def test_a_successor_completes_the_unfinished_step():
    clocks = joined("asp", workers=2, keys=2)
    clocks.push(Update(0, 1, 0, 1))
    clocks.leave(0, 1)
    assert clocks.join(0) == (2, 0)
    assert clocks.push(Update(0, 2, 0, 1)) == [] and clocks.repeated == 1
    assert len(clocks.push(Update(0, 2, 0, 0))) == 1


def test_a_successor_under_bsp_begins_where_no_key_is_ahead_although_a_key_has_missed_a_round():
    """Rounds were counted, and a key that had missed one was taken to be a clock behind: the
    successor pulled weights that had an update of its own clock. A random schedule found it.
    """
    clocks = joined("bsp", workers=1, keys=2)
    clocks.push(Update(0, 1, 0, 0))
    clocks.leave(0, 1)
    assert clocks.join(0) == (2, 1)  # key 1 misses the round of clock 0
    for clock, key in ((1, 0), (1, 1), (2, 1)):
        assert clocks.push(Update(0, 2, clock, key))
    clocks.leave(0, 2)
    assert clocks.join(0) == (3, 3)


def test_the_successor_of_one_that_has_finished_does_not_undo_its_last_update():
    """It was acknowledged, and waited in its round for a slower worker; the round was then made
    without it.
    """
    clocks = joined("bsp")
    last, other = Update(0, 1, 0, 0), Update(1, 1, 0, 0)
    assert clocks.push(last) == []
    clocks.leave(0, 1, finished=True)
    assert clocks.join(0) == (2, 1) and clocks.missed == 0
    (one,) = clocks.push(other)
    assert one.updates == (last, other) and clocks.members[0].done == [1]
    assert clocks.push(Update(0, 2, 1, 0)) == []
    (two,) = clocks.push(Update(1, 1, 1, 0))
    assert two.updates == (Update(0, 2, 1, 0), Update(1, 1, 1, 0))


def test_a_successor_that_dies_takes_its_own_updates_alone():
    clocks = joined("bsp")
    last = Update(0, 1, 0, 0)
    clocks.push(last)
    clocks.leave(0, 1, finished=True)
    clocks.join(0)
    clocks.leave(0, 2)
    (one,) = clocks.push(Update(1, 1, 0, 0))
    assert one.updates == (last, Update(1, 1, 0, 0))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (lambda c: c.push(Update(7, 1, 0, 0)), "worker 7 has not joined"),
        (lambda c: c.push(Update(0, 2, 0, 0)), "incarnation 2 of worker 0 is over"),
        (lambda c: c.push(Update(0, 1, 0, 9)), "key 9 is not one of 1"),
        (lambda c: c.push(Update(0, 1, 0, -1)), "key -1 is not one of 1"),
        (lambda c: c.push(Update(0, 1, 3, 0)), "pushes clock 3 of key 0 before 0"),
        (lambda c: c.may_pull(0, 1, clock=5, key=0), "pulls key 0 at clock 5, and is at 0"),
        (lambda c: c.join(2), "worker 2 has no place among 2"),
        (lambda c: c.join(0, 1), "incarnation 1 of worker 0 is over"),
    ],
)
def test_what_no_sound_worker_sends_is_refused(message, why):
    with pytest.raises(Refused, match=why):
        message(joined("asp"))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda clocks: clocks.begin(0, 1, 9), "clock 9 is not one of 2 to 8"),
        (lambda clocks: clocks.begin(0, 1, 1), "clock 1 is not one of 2 to 8"),
        (lambda clocks: clocks.join(0, 1 << 62), "is no incarnation"),
        (lambda clocks: clocks.join(0, -1), "-1 is no incarnation"),
        (lambda clocks: clocks.push(Update(0, 1, -3, 0)), "clock -3, and 2 is the first"),
        (lambda clocks: clocks.may_pull(0, 1, clock=-3, key=0), "at clock -3, and is at 2"),
        (lambda clocks: clocks.may_pull(0, 1, clock=4, key=0), "at clock 4, and is at 2"),
    ],
)
def test_numbers_that_no_sound_worker_says_are_refused(call, told):
    clocks = Clocks(Sync("asp", workers=1), 1, 2, 8)
    assert clocks.join(0) == (1, 2)
    with pytest.raises(Refused, match=told):
        call(clocks)


def test_a_push_looks_at_the_pulls_of_its_key_alone(monkeypatch):
    """With a thousand keys the others took seconds of each step."""
    desk = Desk(Clocks(Sync("bsp", workers=2), 50), Applied(50))
    for worker in (0, 1):
        desk.join(worker)
    for key in range(50):
        desk.push(update := Update(0, 1, 0, key), str(update))
        desk.pull(0, 1, clock=1, key=key)
    assert [*desk.answers()] == [] and len(desk.wishes) == 50
    looked, kept = [], Clocks.may_pull

    def noted(self, worker, incarnation, *, clock, key):
        looked.append(key)
        return kept(self, worker, incarnation, clock=clock, key=key)

    monkeypatch.setattr(Clocks, "may_pull", noted)
    desk.push(update := Update(1, 1, 0, 7), str(update))
    assert [answer.key for answer in desk.answers()] == [7] and looked == [7]
    desk.leave(1, 1)
    assert len([*desk.answers()]) == 49 and len(looked) == 50  # all, without it
