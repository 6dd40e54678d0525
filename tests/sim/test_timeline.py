"""Timelines: those of the slowest simulator, those of the papers' formulas, and by hand."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_schedules import any_schedule, shipped, ways

from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.clock import Deadlock, clock, units
from howdah.plan.schedule.lowering import Verb, lower
from howdah.plan.schedule.registry import SCHEDULES, build
from howdah.sim.timeline import Timeline, simulate

F, B = 3.0, 5.0  # seconds of a forward and a backward


def seconds(action):
    """Whole seconds that differ by kind and by stage."""
    base = {Kind.FORWARD: 3, Kind.BACKWARD: 5, Kind.INPUT: 3, Kind.WEIGHT: 2, Kind.UPDATE: 1}
    return base[action.kind] + action.stage % 2


def transfer(**durations):
    return lambda instruction: durations.get(instruction.verb, 0)


# -- the slowest simulator -----------------------------------------------------


class Ticks:
    """What happens on every lane, found by looking at every whole second.

    On a lane (computation, collectives, each direction of a pair) things happen in the order in
    which they were posted.
    """

    def __init__(self, lowered, seconds, transfer):
        self.programs, self.seconds, self.transfer = lowered.programs, seconds, transfer
        self.at = [0] * len(self.programs)
        self.until = [0] * len(self.programs)  # a rank computes
        self.queues, self.posted, self.free, self.over = {}, set(), {}, {}
        self.spans = Counter()

    def run(self):
        now = 0
        while any(at < len(p) for at, p in zip(self.at, self.programs, strict=True)):
            assert now < 10_000, "stuck"
            while self.ranks_move(now) or self.lanes_move(now):
                pass
            now += 1
        return self.spans

    def ranks_move(self, now):
        before = sum(self.at)
        for rank, program in enumerate(self.programs):
            while self.at[rank] < len(program) and self.until[rank] <= now:
                if not self.step(rank, program[self.at[rank]], now):
                    break
                self.at[rank] += 1
        return sum(self.at) > before

    def step(self, rank, one, now):
        if one.verb is Verb.WAIT:
            return self.over.get((rank, one.started, one.action), now + 1) <= now
        self.posted.add((rank, one.verb, one.action))
        if one.verb in (Verb.COMPUTE, Verb.UPDATE):
            self.until[rank] = now + self.seconds(one.action)
            self.spans[rank, str(one), now, self.until[rank]] += 1
        elif one.verb is Verb.SEND:
            self.queues.setdefault((rank, one.peer), []).append(one)
        elif one.verb not in (Verb.RECEIVE, Verb.RELEASE):
            self.queues.setdefault((rank, rank), []).append(one)
        return True

    def lanes_move(self, now):
        moved = False
        for (rank, to), queue in self.queues.items():
            if queue and self.free.get((rank, to), 0) <= now and self.both_ends(queue[0], to):
                one = queue.pop(0)
                end = self.free[rank, to] = now + self.transfer(one)
                self.over[rank, one.verb, one.action] = end
                self.over[to, Verb.RECEIVE, one.action] = end
                if end > now:
                    self.spans[rank, str(one), now, end] += 1
                moved = True
        return moved

    def both_ends(self, one, to):
        if one.verb is Verb.TIE:
            return any((one.peer, Verb.TIE) == posted[:2] for posted in self.posted)
        return one.verb is not Verb.SEND or (to, Verb.RECEIVE, one.action) in self.posted


def spans(timeline):
    return Counter(
        (rank, str(span.instruction), span.start, span.end)
        for rank, found in enumerate(timeline.spans)
        for span in found
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("costs", [{"send": 1}, {"send": 4, "reduce": 7}])
def test_as_the_slowest_simulator_has_it(name, costs):
    for schedule in shipped(name, ranks=(1, 3), micros=(2, 5)):
        for lowered in ways(schedule):
            expected = Ticks(lowered, seconds, transfer(**costs)).run()
            assert spans(simulate(lowered, seconds, transfer(**costs))) == expected


@given(any_schedule(), st.integers(0, 7), st.integers(0, 7), st.booleans())
def test_so_is_any_schedule(schedule, send, reduce, each):
    lowered = lower(schedule, reduce_each=each)
    costs = transfer(send=send, reduce=reduce)
    assert spans(simulate(lowered, seconds, costs)) == Ticks(lowered, seconds, costs).run()


# -- messages that cost nothing ------------------------------------------------


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_lowering_costs_no_time(name):
    """The order of messages, the receives and the waits keep no rank from its work."""
    for schedule in shipped(name):
        times = {str(action): tuple(run) for action, run in clock(schedule, seconds).items()}
        for timed in (simulate(schedule, seconds), *(simulate(w, seconds) for w in ways(schedule))):
            assert times == {
                str(action): (start, end)
                for found in timed.spans
                for (_, action, *_), start, end in found
                if str(action) in times
            }


@given(any_schedule())
def test_nor_does_that_of_any_schedule(schedule):
    plain, lowered = simulate(schedule, seconds), simulate(lower(schedule), seconds)
    assert spans(plain) <= spans(lowered)


# -- formulas ------------------------------------------------------------------

SIZES = [(1, 1), (1, 4), (2, 2), (4, 4), (4, 8), (8, 3), (3, 17)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_the_bubble_by_both_measures(name, ranks, micros):
    """(p - 1)/m of the ideal, https://arxiv.org/abs/2104.04473 section 2.2.1; of all time
    (p - 1)/(m + p - 1), https://arxiv.org/abs/1811.06965 section 2.3."""
    timeline = simulate(build(name, ranks=ranks, micros=micros))
    assert timeline.makespan == 3 * (micros + ranks - 1)
    assert timeline.busy == (3 * micros,) * ranks
    assert timeline.bubble_to_ideal == pytest.approx((ranks - 1) / micros)
    assert timeline.bubble == pytest.approx((ranks - 1) / (micros + ranks - 1))


@pytest.mark.parametrize("hop", [0.0, 0.5, 3.0])
@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_gpipe_pays_each_hop_once_each_way(ranks, micros, hop):
    """While a message takes no longer than a forward, all but the first hide behind the next."""
    by_kind = {Kind.FORWARD: F, Kind.BACKWARD: B, Kind.UPDATE: 0.0}
    timeline = simulate(
        lower(build("gpipe", ranks=ranks, micros=micros)),
        lambda action: by_kind[action.kind],
        transfer(send=hop),
    )
    assert timeline.makespan == (micros + ranks - 1) * (F + B) + 2 * (ranks - 1) * hop


def test_a_slow_link_sets_the_pace():
    """A forward, ten messages one after the other, the last forward; and so back."""
    schedule = build("gpipe", ranks=2, micros=10)
    timeline = simulate(lower(schedule), lambda a: a.kind is not Kind.UPDATE, transfer(send=10))
    assert timeline.makespan == 2 * (1 + 10 * 10 + 1)


def test_sums_hide_behind_the_next_backward_and_the_last_does_not():
    once = lower(build("gpipe", ranks=1, micros=4))
    each = lower(build("gpipe", ranks=1, micros=4), reduce_each=True)
    assert simulate(once, units, transfer(reduce=2)).makespan == 12 + 2
    assert simulate(each, units, transfer(reduce=2)).makespan == 12 + 2
    assert simulate(each, units, transfer(reduce=3)).makespan == 4 + 2 + 4 * 3


def test_a_tie_waits_for_both_ends():
    """Rank 1 has its sum at 6 and rank 0 at 8; then the tie takes both until 12."""
    lowered = lower(build("gpipe", ranks=2, micros=1), tied=(0, 1))
    timeline = simulate(lowered, units, transfer(reduce=2, tie=4))
    assert timeline.makespan == 6 + 2 + 4
    for found in timeline.spans:
        (tie,) = (span for span in found if span.instruction.verb is Verb.TIE)
        assert (tie.start, tie.end, tie.lane) == (8, 12, "collectives")


def test_updates_take_time():
    by_kind = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.UPDATE: 7}
    timeline = simulate(lower(build("1f1b", ranks=2, micros=2)), lambda a: by_kind[a.kind])
    assert timeline.busy == (13, 13)
    assert timeline.makespan == 9 + 7


# -- the rest ------------------------------------------------------------------


def test_nothing_on_a_lane_overlaps():
    for lowered in ways(build("interleaved", ranks=3, micros=4, virtual=2)):
        timeline = simulate(lowered, seconds, transfer(send=2, reduce=4, tie=5))
        for found in timeline.spans:
            ends = {}
            assert [span.start for span in found] == sorted(span.start for span in found)
            for span in found:
                assert span.start >= ends.get(span.lane, 0)
                ends[span.lane] = span.end
        assert "to 1" in {span.lane for span in timeline.spans[0]}


def test_nothing_takes_no_time():
    empty = Timeline(build("gpipe", ranks=1, micros=1), ((),))
    assert (empty.makespan, empty.busy, empty.bubble, empty.bubble_to_ideal) == (0, (0,), 0, 0)


def test_a_deadlock_says_where_everyone_stands():
    schedule = build("1f1b", ranks=2, micros=2)
    with pytest.raises(Deadlock, match="rank 0 waits at 0B0 for the gradient of stage 1"):
        simulate(schedule._replace(programs=(schedule.programs[0], ())))
    lowered = lower(schedule)
    cut = lowered._replace(programs=(lowered.programs[0], ()))
    with pytest.raises(Deadlock, match=r"^rank 0 waits at 'wait send 0F0 to 1'$"):
        simulate(cut)
