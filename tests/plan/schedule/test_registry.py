"""Every schedule by its name: complete, free of deadlock, drawn on the page of the forms."""

import re
from inspect import getdoc
from pathlib import Path

import pytest
from reference import SIZES, shows, spans

from howdah.base.errors import UserError
from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.check import check_schedule
from howdah.plan.schedule.registry import SCHEDULES, build

NUMBERS = [
    (name, {family.takes: number} if family.takes else {})
    for name, family in SCHEDULES.items()
    for number in ((2, 3, 4) if family.takes else (1,))
]
PAGE = Path(__file__).parents[3] / "docs" / "forms" / "schedules.md"


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("name", "numbers"), NUMBERS)
def test_every_part_goes_forward_and_back_once_and_nobody_waits_for_ever(name, numbers):
    for ranks, micros in SIZES:
        schedule = build(name, ranks=ranks, micros=micros, **numbers)
        assert (schedule.name, schedule.micros) == (name, micros)
        assert len(schedule.programs) == ranks
        parts = [
            (stage, micro, part)
            for stage in range(schedule.stages)
            for micro in range(micros)
            for part in range(schedule.slices)
        ]
        actions = sorted(a for p in schedule.programs for a in p if a.kind is not Kind.UPDATE)
        halves = "IW" if name.startswith("zb") else "B"
        assert actions == sorted((kind, *part) for kind in "F" + halves for part in parts)
        assert len(spans(schedule)) == sum(map(len, schedule.programs))
        assert check_schedule(schedule) == []


@pytest.mark.parametrize(("name", "numbers"), NUMBERS)
def test_gradients_are_added_up_in_the_order_of_one_device(name, numbers):
    for ranks, micros in SIZES:
        schedule = build(name, ranks=ranks, micros=micros, **numbers)
        adds = [
            [a.micro for a in program if a.kind in "BW" and a.stage == stage]
            for program in schedule.programs
            for stage in range(schedule.stages)
        ]
        assert all(order == sorted(order) for order in adds)


def test_names():
    assert list(SCHEDULES) == [
        *("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "terapipe"),
        *("pipedream", "pipedream-2bw"),
    ]
    assert [name for name, family in SCHEDULES.items() if not family.keeps] == [
        *("pipedream", "pipedream-2bw")
    ]


def test_the_two_stages_of_the_v_may_be_said():
    v = build("zb-v", ranks=2, micros=3)
    assert build("zb-v", ranks=2, micros=3, virtual=2) == v


@pytest.mark.parametrize(
    ("name", "numbers", "sentence"),
    [
        ("1f1", {}, "schedule '1f1' is unknown; did you mean '1f1b'?"),
        ("gpipe", {"ranks": 0}, "schedule gpipe: ranks is 0; it must be at least 1"),
        ("gpipe", {"micros": -1}, "schedule gpipe: micros is -1; it must be at least 1"),
        (
            "1f1b",
            {"ranks": 999_999, "micros": 999_999},
            "schedule 1f1b: 999,999 stages with 999,999 micro-batches have 999,998,000,001 "
            "forwards, and 131,072 are the most; use fewer of them",
        ),
        (
            "terapipe",
            {"slices": 1 << 20},
            "schedule terapipe: 4 stages with 8 micro-batches of 1,048,576 slices have 33,554,432 "
            "forwards, and 131,072 are the most; use fewer of them",
        ),
        (  # laid out with as many micro-batches as fill it
            "zb-v",
            {"ranks": 300, "micros": 1},
            "schedule zb-v: 600 stages with 599 micro-batches have 359,400 forwards, and 131,072 "
            "are the most; use fewer of them",
        ),
        (
            "1f1b",
            {"virtual": 2},
            "schedule 1f1b does not take virtual=2: use virtual=1, or schedule interleaved, "
            "which has several stages on each rank",
        ),
        (
            "zb-v",
            {"virtual": 3},
            "schedule zb-v does not take virtual=3: use virtual=1, or schedule interleaved, "
            "which has several stages on each rank",
        ),
        (
            "zb-h1",
            {"slices": 2},
            "schedule zb-h1 does not take slices=2: use slices=1, or schedule terapipe, "
            "which has token slices of a micro-batch",
        ),
        (
            "interleaved",
            {},
            "schedule interleaved needs several stages on each rank: use virtual=2 or more, "
            "or schedule 1f1b",
        ),
        (
            "terapipe",
            {},
            "schedule terapipe needs token slices of a micro-batch: use slices=2 or more, "
            "or schedule 1f1b",
        ),
    ],
)
def test_refused(name, numbers, sentence):
    with pytest.raises(UserError) as refused:
        build(name, **{"ranks": 4, "micros": 8, **numbers})
    assert str(refused.value) == sentence


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_page_shows_the_picture_and_says_the_source(name):
    page = PAGE.read_text("utf-8")
    function = SCHEDULES[name].build
    section = page.partition(f"**`{name}`**")[2].partition("\n**")[0]
    assert shows(function, section.split("```")[1].strip("\n"))
    source = re.search(r"arxiv.org/abs/([\d.]+\d)", getdoc(function))[1]
    assert source in section
