"""Each thing that can be wrong with a schedule is found, with the action and the rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import spans

from howdah.plan.schedule.actions import Schedule
from howdah.plan.schedule.check import check_schedule
from howdah.plan.schedule.one_f_one_b import one_f_one_b
from howdah.plan.schedule.terapipe import terapipe
from howdah.plan.schedule.text import parse_schedule
from howdah.plan.schedule.zero_bubble import zero_bubble_h1


def check_text(*programs, stages=2, micros=2, slices=1):
    lines = [f"mine stages {stages} micros {micros} slices {slices}"]
    lines += [f"rank {rank}: {program}" for rank, program in enumerate(programs)]
    return check_schedule(parse_schedule("\n".join(lines)))


def test_halves_and_wholes_may_be_mixed():
    assert check_text("0F0 0F1 0B0 0I1 0W1", "1F0 1F1 1I0 1B1 1W0") == []


@pytest.mark.parametrize(
    ("programs", "problems"),
    [
        (("0F0 0F1 0B0 0B1 0F0", "1F0 1F1 1B0 1B1"), ["rank 0 runs 0F0 2 times; once is right"]),
        (("0F0 0F1 0B0", "1F0 1F1 1B0 1B1"), ["rank 0 leaves out 0B1"]),
        (("0F0 0F1 0B0 0I1", "1F0 1F1 1B0 1B1"), ["rank 0 leaves out 0W1"]),
        (("0F0 0F1 0B0 0B1",), ["all ranks leave out 1F0 1B0 1F1 1B1"]),
        (("", "1F0 1F1 1B0 1B1"), ["all ranks leave out 0F0 0B0 0F1 0B1"]),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1F1 1I0 1W0 1B0 1B1"),
            [
                "rank 1 runs 1B0 and 1I0; a backward is either B, or I and then W",
                "rank 1 runs 1B0 and 1W0; a backward is either B, or I and then W",
            ],
        ),
        (
            ("0F0 0F1 0B0 1B1 0B1", "1F0 1F1 1B0"),
            ["stage 1 is on rank 0 (1B1) and rank 1 (1F0); a stage lives on one rank"],
        ),
        (("0B0 0F0 0F1 0B1", "1F0 1F1 1B0 1B1"), ["rank 0 runs 0B0 before 0F0; swap them"]),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1W0 1I0 1B1"), ["rank 1 runs 1W0 before 1I0; swap them"]),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            [
                "deadlock: rank 0 waits with 0B0 for 1B0 of rank 1, "
                "rank 1 waits with 1F1 for 0F1 of rank 0; reorder one of them"
            ],
        ),
    ],
)
def test_what_is_wrong_is_said(programs, problems):
    assert check_text(*programs) == problems


def test_many_that_are_left_out_are_counted():
    assert check_text("", stages=1, micros=9) == ["all ranks leave out 0F0 0B0 0F1 0B1 and 14 more"]


def test_slices_go_back_from_the_last():
    assert check_text("0F0 0F0.1 0B0 0B0.1", stages=1, micros=1, slices=2) == [
        "rank 0 runs 0B0 before 0B0.1; swap them"
    ]


def test_stages_of_one_rank_have_an_order_too():
    assert check_text("1F0 0F0 1B0 0B0", micros=1) == ["rank 0 runs 1F0 before 0F0; swap them"]


def test_an_update_comes_after_its_backward():
    assert check_text("0F0 0U0 0B0", stages=1, micros=1) == [
        "rank 0 runs 0U0 before 0B0; swap them"
    ]


def test_numbers_that_do_not_exist():
    schedule = one_f_one_b(2, 3)._replace(micros=2)
    assert check_schedule(schedule) == [
        f"rank {rank} runs {rank}{kind}2: there is no micro-batch 2; the last is 1"
        for rank in (0, 1)
        for kind in "FB"
    ]


def test_only_the_ranks_of_the_circle_are_named():
    """Ranks 0 and 3 wait too, for a circle that they are not part of."""
    assert check_text(
        "0F0 0F1 0B0 0B1",
        "1F0 1B0 1F1 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3F1 3B0 3B1",
        stages=4,
    ) == [
        "deadlock: rank 1 waits with 1B0 for 2B0 of rank 2, "
        "rank 2 waits with 2F1 for 1F1 of rank 1; reorder one of them"
    ]


def can_run(schedule):
    try:
        spans(schedule)
    except AssertionError:
        return False
    return True


SCHEDULES = [one_f_one_b(3, 4), terapipe(2, 2, 3), zero_bubble_h1(3, 3)]


@given(st.sampled_from(SCHEDULES), st.data())
def test_a_shuffled_schedule_is_refused_just_when_it_cannot_run(schedule, data):
    """Two actions of one rank swapped, a few times."""
    programs = [list(program) for program in schedule.programs]
    for _ in range(data.draw(st.integers(1, 3))):
        program = data.draw(st.sampled_from(programs))
        i, j = (data.draw(st.integers(0, len(program) - 1)) for _ in range(2))
        program[i], program[j] = program[j], program[i]
    shuffled = schedule._replace(programs=tuple(map(tuple, programs)))
    assert (check_schedule(shuffled) == []) == can_run(shuffled)


@given(st.sampled_from(SCHEDULES), st.data())
def test_an_action_left_out_is_missed(schedule, data):
    rank = data.draw(st.integers(0, len(schedule.programs) - 1))
    program = list(schedule.programs[rank])
    lost = program.pop(data.draw(st.integers(0, len(program) - 1)))
    programs = (*schedule.programs[:rank], tuple(program), *schedule.programs[rank + 1 :])
    problems = check_schedule(Schedule(*schedule[:4], programs))
    assert any("leaves out" in p and f"rank {rank}" in p for p in problems)
    assert any(str(lost) in p or str(lost).replace("I", "B") in p for p in problems)
