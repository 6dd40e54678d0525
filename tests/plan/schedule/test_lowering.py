"""Lowering: what is added to a schedule, where, and how often. That it never gets stuck is
proved in test_strict_wire."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_schedules import any_schedule, shipped, texts, ways

from howdah.base.errors import UserError
from howdah.plan.schedule.actions import Action, Kind, rank_of_stage
from howdah.plan.schedule.clock import Deadlock
from howdah.plan.schedule.lowering import Instruction, Verb, lower
from howdah.plan.schedule.pipedream import versions
from howdah.plan.schedule.registry import SCHEDULES, build


def test_a_whole_step_of_the_middle_rank():
    """The first lines are the picture of the docstring."""
    lowered = lower(build("1f1b", ranks=3, micros=2))
    assert texts(lowered.programs[1]) == [
        "receive 0F0 from 0",
        "receive 0F1 from 0",
        "wait receive 0F0 from 0",
        "compute 1F0",
        "send 1F0 to 2",
        "wait receive 0F1 from 0",
        "compute 1F1",
        "send 1F1 to 2",
        "receive 2B0 from 2",
        "receive 2B1 from 2",
        "wait send 1F0 to 2",
        "wait receive 2B0 from 2",
        "compute 1B0",
        "send 1B0 to 0",
        "wait send 1F1 to 2",
        "wait receive 2B1 from 2",
        "compute 1B1",
        "send 1B1 to 0",
        "reduce 1B1",
        "wait send 1B0 to 0",
        "wait send 1B1 to 0",
        "wait reduce 1B1",
        "update 1U1",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("micros", [1, 3, 8])
def test_how_often_gradients_are_summed(name, micros):
    """The A of the formulas: A sums for each stage, or one."""
    schedule = build(name, ranks=3, micros=micros)

    def per_stage(verb, **options):
        programs = lower(schedule, **options).programs
        return Counter(i.action.stage for p in programs for i in p if i.verb is verb)

    stages = range(schedule.stages)
    assert per_stage(Verb.REDUCE) == dict.fromkeys(stages, 1)
    assert per_stage(Verb.REDUCE, reduce_each=True) == dict.fromkeys(stages, micros)


def test_slices_of_a_micro_batch_are_summed_together():
    lowered = lower(build("terapipe", ranks=2, micros=2, slices=3), reduce_each=True)
    assert texts(lowered.programs[0], Verb.REDUCE) == ["reduce 0B0", "reduce 0B1"]


def test_without_flush_each_update_takes_its_own_sum():
    schedule = build("pipedream-2bw", ranks=2, micros=5)
    done = texts(lower(schedule).programs[0], Verb.REDUCE, Verb.UPDATE)
    assert done == [
        "reduce 0B1",
        "update 0U1",
        "reduce 0B3",
        "update 0U3",
        "reduce 0B4",
        "update 0U4",
    ]


def test_versions_of_weights():
    """Stashing on two ranks: 0F2 sees one update, but 0B1 goes back on the weights of 0F1."""
    schedule = build("pipedream", ranks=2, micros=3)
    lowered = lower(schedule, versions=versions(schedule, "stash"))
    assert texts(lowered.programs[0], Verb.COMPUTE, Verb.UPDATE, Verb.RELEASE) == [
        *("compute 0F0 v0", "compute 0F1 v0", "compute 0B0 v0", "update 0U0 v1"),
        *("compute 0F2 v1", "compute 0B1 v0", "release 0B1 v0", "update 0U1 v2"),
        *("compute 0B2 v1", "release 0B2 v1", "update 0U2 v3"),
    ]
    assert texts(lowered.programs[1], Verb.RELEASE) == []  # the last stage overwrites its weights


@pytest.mark.parametrize(
    ("name", "rule"), [("pipedream", "stash"), ("pipedream", "vertical"), ("pipedream-2bw", "2bw")]
)
@pytest.mark.parametrize(("ranks", "micros"), [(1, 3), (2, 5), (3, 9), (4, 6)])
def test_versions_that_stand_are_those_that_are_kept(name, rule, ranks, micros):
    """Kept are the latest version, and those that are used again, until their release."""
    schedule = build(name, ranks=ranks, micros=micros)
    used = versions(schedule, rule)
    for program in lower(schedule, versions=used).programs:
        standing, latest = {0}, 0
        for number, one in enumerate(program):
            later = {used[i.action] for i in program[number:] if i.verb is Verb.COMPUTE}
            if one.verb is Verb.UPDATE:
                assert one.version == latest + 1
                standing = {v for v in standing if v != latest or v in later} | {one.version}
                latest = one.version
            elif one.verb is Verb.RELEASE:
                standing.remove(one.version)
                assert one.version not in later
            elif one.verb is Verb.COMPUTE:
                assert one.version == used[one.action]
                assert one.version in standing
        assert standing == {latest}


def test_a_tied_embedding_is_summed_between_its_two_stages():
    first, middle, last = lower(build("1f1b", ranks=3, micros=2), tied=(0, 2)).programs
    assert texts(first)[-4:] == [
        "wait reduce 0B1",
        "tie 0U1 with 2",
        "wait tie 0U1 with 2",
        "update 0U1",
    ]
    assert texts(last)[-4:] == [
        "wait reduce 2B1",
        "tie 2U1 with 0",
        "wait tie 2U1 with 0",
        "update 2U1",
    ]
    assert not texts(middle, Verb.TIE)


def test_a_rank_that_has_both_stages_sums_by_itself():
    for program in lower(build("zb-v", ranks=2, micros=2), tied=(0, 3)).programs:
        assert not texts(program, Verb.TIE)


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_is_left_out_and_nothing_added(name):
    """The computation is the schedule's; each message leaves once and arrives once."""
    for schedule in shipped(name):
        home = rank_of_stage(schedule)
        for lowered in ways(schedule):
            sent, received = Counter(), Counter()
            for rank, program in enumerate(lowered.programs):
                done = [
                    i.action
                    for i in program
                    if i.action in schedule.programs[rank] and i.verb in (Verb.COMPUTE, Verb.UPDATE)
                ]
                assert tuple(done) == schedule.programs[rank]
                updates = [i.action.stage for i in program if i.verb is Verb.UPDATE]
                assert set(updates) == {a.stage for a in schedule.programs[rank]}
                for i in program:
                    if i.verb is Verb.SEND:
                        sent[i.action, rank, i.peer] += 1
                    elif i.verb is Verb.RECEIVE:
                        received[i.action, i.peer, rank] += 1
            away = sum(home[s] != home[s + 1] for s in range(schedule.stages - 1))
            assert sent == received
            assert sum(sent.values()) == 2 * away * schedule.micros * schedule.slices


@given(any_schedule(), st.booleans())
def test_what_is_started_is_waited_for_later(schedule, reduce_each):
    for program in lower(schedule, reduce_each=reduce_each).programs:
        texts_so_far = texts(program)
        for number, one in enumerate(program):
            if one.verb is Verb.WAIT:
                started = Instruction(one.started, one.action, one.peer)
                assert str(started) in texts_so_far[:number]
        waits = sum(i.verb is Verb.WAIT for i in program)
        begun = (Verb.SEND, Verb.RECEIVE, Verb.REDUCE)
        assert waits == sum(i.verb in begun for i in program)


def test_how_an_instruction_is_spelled():
    action = Action(Kind.FORWARD, 2, 0, 1)
    assert str(Instruction(Verb.COMPUTE, action, version=3)) == "compute 2F0.1 v3"
    assert str(Instruction(Verb.WAIT, action, 1, started=Verb.SEND)) == "wait send 2F0.1 to 1"


def test_what_does_not_go_together_is_refused():
    schedule = build("pipedream", ranks=2, micros=2)
    with pytest.raises(UserError, match="stages 0 and 1 cannot share an embedding; untie it"):
        lower(schedule, tied=(0, 1))


def test_a_schedule_that_is_stuck_is_not_lowered():
    schedule = build("1f1b", ranks=2, micros=2)
    first, second = schedule.programs
    with pytest.raises(Deadlock, match="rank 1 waits at 1B1"):
        lower(schedule._replace(programs=(first, second[::-1])))
