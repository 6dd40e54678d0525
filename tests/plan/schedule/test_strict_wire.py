"""The checker: what is lowered passes, on the strictest wire; whatever is broken in it is found."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_schedules import any_schedule, shipped, ways
from strict_wire import check, draw_stuck

from howdah.plan.schedule.lowering import Lowered, Verb, lower
from howdah.plan.schedule.registry import SCHEDULES, build


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_shipped_schedules_pass(name):
    for schedule in shipped(name):
        for lowered in ways(schedule):
            assert check(lowered) == []
            assert draw_stuck(lowered) == ""


@given(any_schedule(), st.booleans())
def test_whatever_can_run_passes(schedule, reduce_each):
    """The claim of the order of messages: it never gets stuck, for any schedule that can run."""
    assert check(lower(schedule, reduce_each=reduce_each)) == []


# -- what is broken is found ---------------------------------------------------


def changed(lowered, rank, program):
    programs = list(lowered.programs)
    programs[rank] = tuple(program)
    return lowered._replace(programs=tuple(programs))


SUBJECTS = {
    "tied": lower(build("interleaved", ranks=3, micros=3, virtual=2), tied=(0, 5)),
    "halved": lower(build("zb-h1", ranks=3, micros=3)),
    "sliced": lower(build("terapipe", ranks=2, micros=2, slices=2), reduce_each=True),
    "v": lower(build("zb-v", ranks=2, micros=3)),
}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_whatever_is_left_out(subject):
    lowered = SUBJECTS[subject]
    for rank, program in enumerate(lowered.programs):
        for n, left_out in enumerate(program):
            found = check(changed(lowered, rank, program[:n] + program[n + 1 :]))
            assert found, f"rank {rank} without '{left_out}'"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_two_messages_of_a_pair_posted_the_other_way_round(subject):
    """Whichever two: two receives, two sends, or one of each; both ends say another order then."""
    lowered = SUBJECTS[subject]
    for rank, program in enumerate(lowered.programs):
        for peer in {i.peer for i in program if i.peer is not None}:
            posts = [
                n
                for n, i in enumerate(program)
                if i.peer == peer and i.verb in (Verb.SEND, Verb.RECEIVE)
            ]
            for first, second in pairwise(posts):
                swapped = list(program)
                swapped[first], swapped[second] = program[second], program[first]
                found = check(changed(lowered, rank, swapped))
                assert found, f"rank {rank}: '{program[first]}', '{program[second]}'"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_two_neighbours_that_depend_on_each_other(subject):
    lowered = SUBJECTS[subject]
    for rank, program in enumerate(lowered.programs):
        for n, (one, next_) in enumerate(pairwise(program)):
            ends = next_.verb is Verb.WAIT and (next_.started, next_.action) == one[:2]
            kinds = (one.verb, next_.verb)
            sends = kinds == (Verb.COMPUTE, Verb.SEND)
            computes = kinds == (Verb.COMPUTE, Verb.COMPUTE)
            if ends or sends or computes:
                swapped = (*program[:n], next_, one, *program[n + 2 :])
                assert check(changed(lowered, rank, swapped)), f"rank {rank}: '{one}', '{next_}'"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_one_direction_reversed(subject):
    """All receives from a rank in reverse, in the places where they stood."""
    lowered = SUBJECTS[subject]
    for rank, program in enumerate(lowered.programs):
        for peer in {i.peer for i in program if i.verb is Verb.RECEIVE}:
            ours = [i for i in program if i.verb is Verb.RECEIVE and i.peer == peer]
            assert len(ours) > 1
            turned = [
                ours.pop() if i.verb is Verb.RECEIVE and i.peer == peer else i for i in program
            ]
            assert check(changed(lowered, rank, turned))


def test_a_receive_that_is_posted_too_early_is_stuck():
    """Why the two directions of a pair need one order, and a receive waits for its turn.

    Each rank posts its receive one action ahead, which seems harmless. On a wire that takes one
    post after the other, rank 0 does not get to send 0F1 before it has 1B0, and rank 1 does not
    get to send 1B0 before it has 0F1.
    """
    lowered = lower(build("1f1b", ranks=2, micros=2))
    first, second = (list(program) for program in lowered.programs)
    early = next(i for i in first if i.verb is Verb.RECEIVE)
    assert str(early) == "receive 1B0 from 1"
    first.remove(early)
    first.insert([str(i) for i in first].index("compute 0F1"), early)
    late = next(i for i in second if str(i) == "receive 0F1 from 0")
    assert second.index(late) < [str(i) for i in second].index("send 1B0 to 0")
    broken = lowered._replace(programs=(tuple(first), tuple(second)))
    assert check(broken) == [
        "ranks 0 and 1 disagree on message 1 between them: "
        "rank 0 posts 'receive 1B0 from 1', rank 1 'receive 0F1 from 0'",
        "rank 0 is stuck at 7, 'wait receive 1B0 from 1': rank 1 is at 'wait receive 0F1 from 0'",
        "rank 1 is stuck at 6, 'wait receive 0F1 from 0': rank 0 is at 'wait receive 1B0 from 1'",
    ]
    assert draw_stuck(broken).splitlines() == [
        "rank 0   0F0 0F1 | wait receive 1B0 from 1",
        "rank 1   1F0 1B0 | wait receive 0F1 from 0",
        "0 waits for 1, 1 waits for 0",
    ]


# -- sentences -----------------------------------------------------------------


def without(lowered, rank, *left_out):
    return changed(lowered, rank, [i for i in lowered.programs[rank] if str(i) not in left_out])


SENTENCES = [
    (["reduce 0B1"], "'wait reduce 0B1': nothing like it was started"),
    (["wait send 0F0 to 1"], "never waits for 'send 0F0 to 1'"),
    (
        ["wait receive 1B0 from 1"],
        "'compute 0B0': the gradient of stage 1, micro-batch 0 is not there",
    ),
    (["compute 0F1"], "computes 0B0 where the schedule says 0F1"),
    (["compute 0B1"], "computes nothing where the schedule says 0B1"),
    (["compute 0F1"], "'send 0F1 to 1': the activation of stage 0, micro-batch 1 is not there"),
    (
        ["reduce 0B1", "wait reduce 0B1"],
        "'tie 0U1 with 1': the gradients of stage 0 are not summed",
    ),
    (["wait tie 0U1 with 1"], "'update 0U1': the gradients of stage 0 are not summed"),
    (["update 0U1"], "never updates stage 0"),
]


@pytest.mark.parametrize(("left_out", "sentence"), SENTENCES)
def test_sentences_name_the_rank_the_instruction_and_the_lack(left_out, sentence):
    lowered = lower(build("gpipe", ranks=2, micros=2), tied=(0, 1))
    found = check(without(lowered, 0, *left_out))
    assert any(s.startswith("rank 0 ") and s.endswith(sentence) for s in found), found


def test_what_is_started_twice():
    (program,) = lower(build("gpipe", ranks=1, micros=1)).programs
    reduce = next(i for i in program if i.verb is Verb.REDUCE)
    n = program.index(reduce)
    twice = Lowered(build("gpipe", ranks=1, micros=1), ((*program[:n], reduce, *program[n:]),))
    (sentence,) = check(twice)
    assert sentence.endswith("'reduce 0B0': it was started before and not waited for")


def test_a_rank_that_stops_leaves_the_other_waiting():
    lowered = lower(build("gpipe", ranks=2, micros=2))
    n = next(n for n, i in enumerate(lowered.programs[1]) if i.verb is Verb.SEND)
    stopped = changed(lowered, 1, lowered.programs[1][:n])
    assert check(stopped)[-1] == (
        "rank 0 is stuck at 8, 'wait receive 1B0 from 1': rank 1 has finished"
    )
    assert draw_stuck(stopped).splitlines() == [
        "rank 0   0F0 0F1     | wait receive 1B0 from 1",
        "rank 1   1F0 1F1 1B0 | done",
        "0 waits for 1",
    ]


def test_both_ends_of_a_tie_must_come():
    lowered = lower(build("gpipe", ranks=2, micros=1), tied=(0, 1))
    assert check(lowered) == []
    alone = without(lowered, 1, "tie 1U0 with 0", "wait tie 1U0 with 0")
    assert check(alone) == ["rank 0 is stuck at 9, 'wait tie 0U0 with 1': rank 1 has finished"]
