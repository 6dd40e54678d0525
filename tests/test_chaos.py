"""The short form of bench/chaos: kills and stops at moments nobody chose, and what is left."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
CHAOS = Path(__file__).parents[1] / "bench" / "chaos"


@pytest.fixture
def chaos(monkeypatch):
    """The scripts, which import each other by name."""
    monkeypatch.syspath_prepend(str(CHAOS))


def test_kills_at_any_moment_leave_nothing_and_change_no_bit(chaos, monkeypatch, tmp_path):
    import kills

    monkeypatch.setattr(kills, "STEPS", 80)
    rows = list(kills.kills(tmp_path, each=2, layouts=("dp2 zero1",), seed=5))
    assert [row["left"] for row in rows[:-1]] == [[]] * 2
    assert all(row["ended"] >= 0 and "Traceback" not in row["said"] for row in rows[:-1])
    assert rows[-1] == {"kind": "end", "layout": "dp2 zero1", "code": 0, "equal": True}


@pytest.mark.parametrize("moment", ["ranks", "held out"])
def test_a_stop_at_any_moment_leaves_nothing(chaos, monkeypatch, tmp_path, moment):
    import signals

    monkeypatch.setattr(signals, "MOMENTS", (moment,))
    monkeypatch.setattr(signals, "SIGNALS", ("HUP",))
    monkeypatch.setattr(signals, "WITHIN", 600.0)  # how long it takes is the benchmark's to judge
    rows = list(signals.stops(tmp_path, ("dp2",)))
    assert [row["times"] for row in rows] == [1, 5]
    assert all(row["survived"] for row in rows), rows


def test_stops_cover_every_pair_of_layout_count_and_target(chaos):
    """The layout once decided how often a stop was sent."""
    from signals import TARGETS, target_of

    numbers = range(4 * 35)
    found = {(number // 2 % 2, number % 2, target_of(number, alone=False)) for number in numbers}
    assert {(times, target) for _, times, target in found} == {
        (times, target) for times in range(2) for target in TARGETS
    }


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="mounts a small disk, which takes root",
)
def test_a_full_disk_never_ends_training(chaos, monkeypatch, tmp_path):
    import disks

    monkeypatch.setattr(disks, "PLACES", ("checkpoints",))
    monkeypatch.setattr(disks, "STATES", ("full",))
    (row,) = disks.disks(tmp_path)
    assert row["survived"] and row["code"] == 1, row
