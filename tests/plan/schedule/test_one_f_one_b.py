"""1F1B: the picture, GPipe's bubble, and p - r micro-batches on rank r."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import SIZES, draw, shows, total

from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.held import peak_held
from howdah.plan.schedule.one_f_one_b import alternate, each_micro, one_f_one_b

PICTURE = """\
F0 F1 F2             B0··· F3 B1···    B2···    B3···
   F0 F1       B0··· F2 B1··· F3 B2···    B3···
      F0 B0··· F1 B1··· F2 B2··· F3 B3···"""


def test_picture():
    assert draw(one_f_one_b(3, 4)) == PICTURE
    assert shows(one_f_one_b, PICTURE)


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2, 3), (3, 1)])
def test_bubble(forward, backward):
    costs = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    for ranks, micros in SIZES:
        assert total(one_f_one_b(ranks, micros), costs) == (micros + ranks - 1) * sum(
            costs.values()
        )


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_memory(ranks, micros):
    schedule = one_f_one_b(ranks, micros)
    held = [peak_held(schedule, rank) for rank in range(ranks)]
    assert held == [min(ranks - rank, micros) for rank in range(ranks)]


@given(st.integers(0, 9), st.integers(0, 12))
def test_alternate_keeps_both_orders_and_leads_by_the_fill(micros, fill):
    forwards = each_micro(Kind.FORWARD, 0, micros)
    backwards = each_micro(Kind.BACKWARD, 0, micros)
    program = alternate(forwards, backwards, fill=fill)
    assert [a for a in program if a.kind is Kind.FORWARD] == forwards
    assert [a for a in program if a.kind is Kind.BACKWARD] == backwards
    for micro, action in enumerate(backwards):
        before = program[: program.index(action)]
        assert sum(a in forwards for a in before) == min(micro + fill + 1, micros)
