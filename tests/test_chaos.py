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


@pytest.mark.slow
def test_kills_at_any_moment_leave_nothing_and_change_no_bit(chaos, monkeypatch, tmp_path):
    import kills

    monkeypatch.setattr(kills, "STEPS", 80)
    monkeypatch.setattr(kills, "TARGETS", [t for t in kills.TARGETS if "stopped" not in t])
    rows = list(kills.kills(tmp_path, each=1, layouts=("dp2 zero1",), seed=5))
    assert [row["left"] for row in rows[:-1]] == [[]]
    assert all(row["ended"] >= 0 and "Traceback" not in row["said"] for row in rows[:-1])
    assert rows[-1] == {"kind": "end", "layout": "dp2 zero1", "code": 0, "equal": True}


@pytest.mark.slow
def test_a_launcher_or_a_server_that_is_stopped_ends_a_run(chaos, monkeypatch, tmp_path):
    """Which takes five seconds to be noticed."""
    import kills

    assert {"launcher, stopped", "fork server, stopped"} <= {*kills.TARGETS}
    monkeypatch.setattr(kills, "STEPS", 80)
    monkeypatch.setattr(kills, "WITHIN", 600.0)
    for seed, target in enumerate(("launcher, stopped", "fork server, stopped")):
        monkeypatch.setattr(kills, "TARGETS", (target,))
        rows = list(kills.kills(tmp_path / str(seed), each=1, layouts=("dp2",), seed=seed))
        assert rows[0]["survived"], rows[0]
        assert rows[1] == {"kind": "end", "layout": "dp2", "code": 0, "equal": True}


@pytest.mark.slow
def test_killed_workers_and_servers_lose_no_update_and_repeat_none(chaos, tmp_path):
    """The loss is the benchmark's to judge: this run is short."""
    import served

    row = served.one_run(tmp_path, 1, seconds=0.0, steps=100, pause=(1.0, 2.0))
    assert row["applied"] and (row["lost"], row["twice"], row["left"]) == (0, 0, [])
    assert row["workers"] + row["servers"] > 0 and abs(row["loss"] / row["alone"] - 1) < 0.2


def test_a_ledger_tells_what_is_lost_and_what_was_applied_twice(chaos, tmp_path):
    import served

    (tmp_path / "ledgers").mkdir()
    whole = [f"push {w} 1 {c} {k} 1" for w in range(3) for c in range(2) for k in range(2)]
    for shard, lines in enumerate((whole, whole[1:], [*whole, whole[4]])):
        name = tmp_path / "ledgers" / f"server-{shard}-from-0"
        name.write_text("\n".join(["pull 0 1 0 0 1", *lines]))
    assert served.audit(tmp_path, [2]) == (36, 1, 1)
    rows = [{"lost": 0, "twice": 0, "left": [], "loss": 2.0, "alone": 2.03}]
    assert served.verdict(rows)["survived"]
    for wrong in ({"loss": 1.98}, {"lost": 1}, {"twice": 1}, {"left": ["its lock"]}):
        assert not served.verdict([{**rows[0], **wrong}])["survived"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["ranks", pytest.param("held out", marks=pytest.mark.slow)])
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


CUT = {
    "what": "cut",
    "begun": True,
    "aborted": False,
    "told": [12.0, 12.3],
    "ended": [13.0, 13.3],
    "codes": [1, 1],
}
STOPPED = CUT | {"what": "stopped", "told": [20.0, 41.0], "ended": [21.0, 42.0]}
SLOW = CUT | {"what": "slow", "told": [-1.0, -1.0], "codes": [0, 0], "equal": True}


@pytest.mark.parametrize(
    ("row", "fine"),
    [
        *((CUT, True), (STOPPED, True), (SLOW, True)),
        (CUT | {"begun": False}, False),  # ranks that never met have no link to lose
        (SLOW | {"begun": False}, False),
        (CUT | {"told": [12.0, -1.0]}, False),
        (CUT | {"codes": [1, 0]}, False),
        (CUT | {"codes": [0, 0]}, False),  # it had finished when the cable was cut
        (CUT | {"codes": [1, -6]}, False),
        (CUT | {"aborted": True}, False),
        (CUT | {"ended": [13.0, -1.0]}, False),
        (CUT | {"ended": [13.0, 31.0]}, False),
        (STOPPED | {"ended": [21.0, 52.0]}, False),  # it was continued after 21 s
        (SLOW | {"codes": [0, 1]}, False),
        (SLOW | {"equal": False}, False),
    ],
)
def test_what_two_hosts_must_do(chaos, row, fine):
    """A run that had not begun, or told nothing, once counted as one that survived."""
    import hosts

    assert hosts.survived(row) is fine


@pytest.mark.parametrize(
    ("said", "what", "hosts_told"),
    [
        ("a warning\nhowdah: rank 1 has not been heard of for 20 s, as", "stopped", [True, True]),
        ("howdah: rank 0 ended, or its link is down, as rank 1 saw;", "stopped", [False, True]),
        ("howdah: rank 0 does not answer: its link is down, or its", "cut", [False, True]),
        ("howdah: rank 1 does not answer: its link is down, or its", "cut", [True, False]),
        ("howdah: rank 0 ended, or its link is down", "killed after a step", [False, True]),
        ("ranks on several machines talk without; local_rank: 0 lost its link", "cut", [False] * 2),
        ("howdah: the ranks cannot meet", "cut", [False, False]),
    ],
)
def test_what_counts_as_telling(chaos, said, what, hosts_told):
    """Any rank once did, also the one that tells, or one that was never struck."""
    import hosts

    assert [hosts.is_told(said, what, host) for host in (0, 1)] == hosts_told


@pytest.mark.parametrize(
    ("place", "state", "code"),
    [
        pytest.param(
            *("checkpoints", "full", 1),
            marks=[
                pytest.mark.slow,
                pytest.mark.root,
                pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk: takes root"),
            ],
        ),
        pytest.param("best.json", "read-only", 0, marks=pytest.mark.slow),
        pytest.param("sample", "gone", 0, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_never_ends_training(chaos, monkeypatch, tmp_path, place, state, code):  # noqa: PLR0917
    import disks

    monkeypatch.setattr(disks, "PLACES", (place,))
    monkeypatch.setattr(disks, "STATES", (state,))
    (row,) = disks.disks(tmp_path)
    assert row["survived"] and row["code"] == code, row
    if place == "best.json":  # a folder that stands there from the start
        told = (tmp_path / "disk0" / "run" / "log.txt").read_text()
        assert told.count("is saved, but tidying up after it failed: Is a directory") == 1
        assert told.count("best.json is damaged; ") == 1
