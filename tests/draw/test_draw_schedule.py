"""Pipelines as text: golden drawings, checked by eye against the papers' figures."""

import pytest

from howdah.draw.schedule import computations, draw
from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.lowering import lower
from howdah.plan.schedule.registry import build
from howdah.sim.timeline import Timeline, simulate

GOLDEN = [
    (
        ("naive", 3, 2, {}),
        """
naive: 3 ranks, 2 micro-batches
rank 0  F0            B0··F1            B1··
rank 1    F0      B0··      F1      B1··
rank 2      F0B0··            F1B1··
F forward, B backward
18 s, bubble 66.7% of all time, 200.0% of the ideal, held at most 1 1 1
""",
    ),
    (
        ("gpipe", 3, 4, {}),
        """
gpipe: 3 ranks, 4 micro-batches
rank 0  F0F1F2F3            B0··B1··B2··B3··
rank 1    F0F1F2F3      B0··B1··B2··B3··
rank 2      F0F1F2F3B0··B1··B2··B3··
F forward, B backward
18 s, bubble 33.3% of all time, 50.0% of the ideal, held at most 4 4 4
""",
    ),
    (
        ("1f1b", 3, 4, {}),
        """
1f1b: 3 ranks, 4 micro-batches
rank 0  F0F1F2        B0··F3B1··  B2··  B3··
rank 1    F0F1    B0··F2B1··F3B2··  B3··
rank 2      F0B0··F1B1··F2B2··F3B3··
F forward, B backward
18 s, bubble 33.3% of all time, 50.0% of the ideal, held at most 3 2 1
""",
    ),
    (
        ("interleaved", 2, 4, {"virtual": 2}),
        """
interleaved: 2 ranks of 2 stages, 4 micro-batches
rank 0  F0F1f0f1F2  b0··F3b1··f2B0··f3B1··  b2··  b3··B2··B3··
rank 1    F0F1f0b0··f1b1··F2B0··F3B1··f2b2··f3b3··B2··B3··
F forward, B backward, small letters: the rank's second stage
27 s, bubble 11.1% of all time, 12.5% of the ideal, held at most 5 3
""",
    ),
    (
        ("interleaved", 2, 2, {"virtual": 3}),
        """
interleaved: 2 ranks of 3 stages, 2 micro-batches
rank 0  0F0·0F1·2F0·2F1·4F0·4F1·        4B0·····    4B1·····2B0·····2B1·····0B0·····0B1·····
rank 1      1F0·1F1·3F0·3F1·5F0·5B0·····5F1·5B1·····3B0·····3B1·····1B0·····1B1·····
F forward, B backward
21 s, bubble 14.3% of all time, 16.7% of the ideal, held at most 6 5
""",
    ),
    (
        ("zb-h1", 3, 4, {}),
        """
zb-h1: 3 ranks, 4 micro-batches
rank 0  F0F1F2    I0W0F3I1W1I2W2I3W3
rank 1    F0F1  I0F2I1W0F3I2W1I3W2W3
rank 2      F0I0F1I1F2I2W0F3I3W1W2W3
F forward, I backward: input, W backward: weights
14 s, bubble 14.3% of all time, 16.7% of the ideal, held at most 3 3 3
""",
    ),
    (
        ("zb-v", 2, 4, {}),
        """
zb-v: 2 ranks of 2 stages, 4 micro-batches
rank 0  F0F1F2f0i0w0f1i1w1F3I0W0f2i2w2I1W1f3i3w3I2W2I3W3
rank 1    F0f0F1f1i0w0F2I0W0f2i1w1F3I1W1f3i2w2I2i3I3W2w3W3
F forward, I backward: input, W backward: weights, small letters: the rank's second stage
25 s, bubble 4.0% of all time, 4.2% of the ideal, held at most 4 4
""",
    ),
    (
        ("terapipe", 2, 2, {"slices": 2}),
        """
terapipe: 2 ranks, 2 micro-batches of 2 slices
rank 0  F0··F0.1F1··        B0.1····F1.1B0······    B1.1····B1······
rank 1      F0··F0.1B0.1····F1··B0······F1.1B1.1····B1······
F forward, B backward
15 s, bubble 20.0% of all time, 25.0% of the ideal, held at most 3 2
""",
    ),
]


@pytest.mark.parametrize(("what", "drawing"), GOLDEN, ids=lambda what: what[0])
def test_golden_drawings(what, drawing):
    name, ranks, micros, third = what
    schedule = build(name, ranks=ranks, micros=micros, **third)
    assert draw(simulate(schedule)) == drawing.strip("\n")


def test_the_width_may_be_given():
    """Boxes end where their time ends, whatever the width; what does not fit in them is cut."""
    timeline = simulate(build("gpipe", ranks=2, micros=1))
    rows = {width: draw(timeline, width=width).splitlines()[1:3] for width in (0.5, 1, 4)}
    assert rows[4] == ["rank 0  F0··            B0······", "rank 1      F0··B0······"]
    assert rows[1] == ["rank 0  F   B0", "rank 1   FB0"]
    assert [len(row) for row in rows[0.5]] == [8 + 3, 8 + 2]


def test_durations_are_drawn_to_scale_and_rounding_does_not_add_up():
    """A hundred boxes of a third of a character: the last ends at 33, not at 0 or 100.

    Ten tenths are a little less than one in floating point, and still ten boxes.
    """
    thirds = simulate(build("gpipe", ranks=1, micros=50), lambda action: 1 / 3)
    assert len(draw(thirds, width=1).splitlines()[1]) == len("rank 0  ") + 33
    tenths = simulate(build("gpipe", ranks=1, micros=5), lambda action: 0.1)
    assert draw(tenths, width=10).splitlines()[1] == "rank 0  FFFFFBBBBB"


def test_ten_micro_batches_need_wider_boxes():
    row = draw(simulate(build("gpipe", ranks=1, micros=11))).splitlines()[1]
    assert row.startswith("rank 0  F0·F1·F2·")
    assert "F9·F10B0····" in row


def test_updates_are_drawn_when_they_take_time():
    schedule = build("pipedream", ranks=1, micros=2)
    assert draw(simulate(schedule)).splitlines()[1] == "rank 0  F0B0··F1B1··"
    halves = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.UPDATE: 1.0}
    drawn = draw(simulate(schedule, lambda action: halves[action.kind]))
    assert drawn.splitlines()[1:3] == [
        "rank 0  F0B0··U0F1B1··U1",
        "F forward, B backward, U update",
    ]


def test_the_lowered_schedule_is_drawn_with_its_waiting():
    lowered = lower(build("gpipe", ranks=2, micros=1))
    drawn = draw(simulate(lowered, transfer=lambda instruction: instruction.verb == "send"))
    assert drawn.splitlines()[1:3] == ["rank 0  F0          B0··", "rank 1      F0B0··"]


def test_ranks_of_two_digits_stay_in_line():
    rows = draw(simulate(build("gpipe", ranks=11, micros=1))).splitlines()[1:12]
    assert rows[0].startswith("rank 0   F0")
    assert rows[10].startswith("rank 10  " + "  " * 10 + "F0")


def test_computations_know_their_place_among_the_stages_of_their_rank():
    timeline = simulate(build("zb-v", ranks=2, micros=1))
    found = {each.label: each for each in computations(timeline, 0)}
    assert found["F0"].action.stage == 0
    assert found["f0"].action.stage == 3
    assert [(each.turn, each.turns) for each in (found["F0"], found["f0"])] == [(0, 2), (1, 2)]


def test_an_empty_timeline():
    drawn = draw(Timeline(build("gpipe", ranks=1, micros=1), ((),)))
    assert drawn.splitlines()[:2] == ["gpipe: 1 rank, 1 micro-batch", "rank 0  "]
