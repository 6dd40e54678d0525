"""The order of messages: complete, agreed on, and such that every rank can post in it."""

import pytest
from hypothesis import given
from small_schedules import any_schedule, shipped

from howdah.plan.schedule.actions import makes, needs
from howdah.plan.schedule.clock import clock, units
from howdah.plan.schedule.messages import message_order, message_times
from howdah.plan.schedule.registry import SCHEDULES, build


def order(schedule, *pair):
    return " ".join(str(message.action) for message in message_order(schedule)[pair])


def test_the_example_of_the_docstring():
    assert order(build("1f1b", ranks=2, micros=3), 0, 1) == "0F0 0F1 1B0 0F2 1B1 1B2"


def test_of_two_made_at_once_the_lower_ranks_comes_first():
    schedule = build("1f1b", ranks=2, micros=3)
    ends = {str(action): run.end for action, run in clock(schedule, units).items()}
    assert ends["0F2"] == ends["1B1"]
    assert "0F2 1B1" in order(schedule, 0, 1)


def test_stages_on_one_rank_send_each_other_nothing():
    schedule = build("zb-v", ranks=1, micros=4)
    assert schedule.stages == 2
    assert message_order(schedule) == {}


def test_the_last_rank_sends_to_the_first_when_stages_go_round():
    pairs = message_order(build("interleaved", ranks=3, micros=3, virtual=2))
    assert set(pairs) == {(0, 1), (1, 2), (0, 2)}
    assert {str(m.action) for m in pairs[0, 2]} == {f"2F{m}" for m in range(3)} | {
        f"3B{m}" for m in range(3)
    }


def complete(schedule):
    """Every value that one rank makes and another needs is one message, in one queue."""
    found = {(m.action, m.source, m.target) for q in message_order(schedule).values() for m in q}
    maker = {makes(a): (a, rank) for rank, p in enumerate(schedule.programs) for a in p}
    expected = {
        (*maker[value], rank)
        for rank, program in enumerate(schedule.programs)
        for action in program
        for value in needs(action, schedule)
        if maker[value][1] != rank
    }
    return found == expected


def can_be_posted(schedule):
    """Each rank posts its side in the order, sends after they are made, receives before used."""
    for (low, high), queue in message_order(schedule).items():
        for rank in (low, high):
            program = schedule.programs[rank]
            posted = [(-1, 0)]
            for place in message_times(rank, program, queue):
                sends = place.message.source == rank
                assert place.start == place.message.made if sends else True
                assert place.start < place.wait if sends else place.start <= place.wait
                posted.append((place.start, int(sends)))  # receives stand before an action
            assert posted == sorted(posted)
    return True


@pytest.mark.parametrize("name", SCHEDULES)
def test_shipped_schedules(name):
    for schedule in shipped(name):
        assert complete(schedule)
        assert can_be_posted(schedule)


@given(any_schedule())
def test_any_schedule(schedule):
    assert complete(schedule)
    assert can_be_posted(schedule)


def test_a_receive_is_started_one_action_before_its_use():
    schedule = build("gpipe", ranks=2, micros=3)
    receives = list(message_times(1, schedule.programs[1], message_order(schedule)[0, 1]))[:3]
    assert [(p.start, p.wait) for p in receives] == [(0, 0), (0, 1), (1, 2)]


def test_updates_do_not_count_as_the_action_before():
    """1F1B without flush: …0F2 U 0B1…; behind an update nothing could hide."""
    schedule = build("pipedream", ranks=2, micros=3)
    names = [str(action) for action in schedule.programs[0]]
    assert names[-4:] == ["0B1", "0U1", "0B2", "0U2"]
    found = message_times(0, schedule.programs[0], message_order(schedule)[0, 1])
    (last,) = (place for place in found if str(place.message.action) == "1B2")
    assert (last.start, last.wait) == (names.index("0B1"), names.index("0B2"))


def test_a_send_is_waited_for_when_an_answer_is_there():
    """0F0 and 0F1 have been used when 1B0 comes back, for gpipe's 1B0 follows 1F1."""
    schedule = build("gpipe", ranks=2, micros=2)
    program = schedule.programs[0]
    sends = [
        p for p in message_times(0, program, message_order(schedule)[0, 1]) if p.message.source == 0
    ]
    assert [str(program[p.wait]) for p in sends] == ["0B0", "0B0"]
    back = message_times(1, schedule.programs[1], message_order(schedule)[0, 1])
    assert [p.wait for p in back if p.message.source == 1] == [4, 4]  # nothing answers: the end
