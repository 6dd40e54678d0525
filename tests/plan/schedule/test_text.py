"""Schedules as text: parsing reverses printing, and what is misspelt is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.base.errors import UserError
from howdah.plan.schedule.actions import Action, Kind, Schedule
from howdah.plan.schedule.one_f_one_b import one_f_one_b
from howdah.plan.schedule.terapipe import terapipe
from howdah.plan.schedule.text import format_schedule, parse_schedule, read_schedule

TEXT = """\
1f1b stages 2 micros 3 slices 1
rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
"""


def test_spelling():
    assert format_schedule(one_f_one_b(2, 3)) == TEXT
    assert parse_schedule(TEXT) == one_f_one_b(2, 3)
    assert "rank 1: 1F0 1F0.1 1B0.1 1B0" in format_schedule(terapipe(2, 1, 2))


@st.composite
def schedules(draw):
    """Anything that can be written down, sensible or not."""
    stages, micros, slices = (draw(st.integers(1, 12)) for _ in range(3))
    action = st.builds(
        Action,
        st.sampled_from(Kind),
        st.integers(0, stages - 1),
        st.integers(0, micros - 1),
        st.integers(0, slices - 1),
    )
    programs = draw(st.lists(st.lists(action, max_size=9).map(tuple), max_size=12))
    name = draw(st.from_regex(r"[a-z0-9_.+-]+", fullmatch=True))
    return Schedule(name, stages, micros, slices, tuple(programs))


@given(schedules())
def test_parsing_reverses_printing(schedule):
    assert parse_schedule(format_schedule(schedule)) == schedule


HEAD = "mine stages 2 micros 3 slices 1\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "schedule, line 1: '' is no header; write a name and numbers from 1 on, such as"),
        ("mine stages 2 micros 0 slices 1\n", "line 1: 'mine stages 2 micros 0 slices 1' is no"),
        ("stages 2 micros 3 slices 1\n", "line 1: 'stages 2 micros 3 slices 1' is no header"),
        (HEAD + "0F0 0B0\n", "schedule, line 2: '0F0 0B0' must begin with 'rank 0:'; write one"),
        (HEAD + "rank 0: 0F0\nrank 2: 1F0\n", "line 3: 'rank 2: 1F0' must begin with 'rank 1:'"),
        (HEAD + "rank 0: 0F0\n\n", "schedule, line 3: '' must begin with 'rank 1:'"),
        (HEAD + "rank 0: 0F0 0X0\n", "schedule, line 2: '0X0' is no action; write the stage, one"),
        (HEAD + "rank 0: F0\n", "schedule, line 2: 'F0' is no action"),
        (HEAD + "rank 0: 0F\n", "schedule, line 2: '0F' is no action"),
        (HEAD + "rank 0: 0F²\n", "schedule, line 2: '0F²' is no action"),
        (HEAD + "rank 0: 0F00\n", "schedule, line 2: '0F00' is spelled '0F0'"),
        (HEAD + "rank 0: 0F1.0\n", "schedule, line 2: '0F1.0' is spelled '0F1'"),
        (HEAD + "rank 0: 2F0\n", "schedule, line 2: '2F0': there is no stage 2; the last is 1"),
        (HEAD + "rank 0: 0F3\n", "line 2: '0F3': there is no micro-batch 3; the last is 2"),
        (HEAD + "rank 0: 0F2.1\n", "line 2: '0F2.1': there is no slice 1; the last is 0"),
        (HEAD + f"rank 0: 0F{'9' * 5000}\n", "is no action"),
        ("x" * 5000, "is no header"),
        (
            "mine stages 999999 micros 999999 slices 999999\n",
            "have 999,997,000,002,999,999 forwards",
        ),
        ("mine stages 1 micros 1 slices 1\n" + "rank\n" * 200_000, "131,072 are the most"),
    ],
)
def test_refused(text, sentence):
    with pytest.raises(UserError) as refused:
        parse_schedule(text)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_a_file_is_read_or_refused(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(HEAD + "rank 0: 0F0\n")
    assert read_schedule(path).programs == ((Action(Kind.FORWARD, 0, 0, 0),),)
    path.write_bytes(b"\0\xff")
    with pytest.raises(UserError, match=r"schedule .*mine\.txt is not UTF-8; give a text file"):
        read_schedule(path)
    path.write_bytes(b" " * (8 << 20) + b" ")
    with pytest.raises(UserError, match="cannot be read: it has more than the 8,388,608 bytes"):
        read_schedule(path)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_schedule(tmp_path)
