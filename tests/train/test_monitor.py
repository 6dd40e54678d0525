"""What a run measures of itself, stretch by stretch; of a card, as if torch had one."""

import json
from unittest.mock import patch

import pytest
from small_runs import metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from howdah.comm.transport import SingleRank
from howdah.host.measured import Used
from howdah.host.peak import Peak
from howdah.train import loop, monitor
from howdah.train.loop import train
from howdah.train.metrics import Busy


def test_the_peaks_of_a_card_are_those_of_each_stretch(make_job, tmp_path):
    """They were those of the whole run, start and saves included, and of reserved blocks alone."""
    heard, sizes = [], iter(range(1, 9))

    def peaks(device):
        heard.append("read")
        size = next(sizes) << 20
        return Used(size, 16 << 20, 2 * size)

    with (
        patch.object(monitor, "peak_memory", peaks),
        patch.object(monitor, "reset_peak", lambda device: heard.append("anew")),
    ):
        train(make_job("a", "train.log_every=5"), SingleRank())
    assert heard == ["anew", *["read", "anew"] * 4]
    found = metrics(tmp_path / "a")
    assert [row["memory"] >> 20 for row in found.values()] == [1, 2, 3, 4]
    assert [row["reserved"] >> 20 for row in found.values()] == [2, 4, 6, 8]
    assert found[20]["memory_share"] == 0.25
    lines = [x for x in (tmp_path / "a" / "log.txt").read_text().splitlines() if "step: " in x]
    assert "memory:  0.00GiB(25.00%)  tps: " in lines[3] and "  reserved: 0.01GiB  sent" in lines[3]
    board = EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload()
    drawn = [event.value for event in board.Scalars("memory/max_reserved(GiB)")]
    assert drawn == [2 * size / 1024 for size in (1, 2, 3, 4)]


def test_the_last_line_has_the_mfu_of_the_whole_run(make_job, tmp_path):
    """It had the rate of the run beside the mfu of its last stretch."""
    with patch.object(loop, "peak_of", lambda *given: Peak(1e6, "told")):
        train(make_job("a", "train.log_every=1", "train.steps=7"), SingleRank())
    rows = metrics(tmp_path / "a").values()
    log = (tmp_path / "a" / "log.txt").read_text()
    said = next(line for line in log.splitlines() if line.startswith("speed "))
    rate = float(said.split()[1].replace(",", ""))
    mfu = float(said.partition("mfu ")[2].partition("%")[0])
    for row in rows:  # one number of flops for each token, and one peak
        assert mfu == pytest.approx(100 * row["mfu"] / row["tps"] * rate, rel=0.05)


def test_a_cpu_has_no_reserved_memory(make_job, tmp_path):
    train(make_job("a", "train.steps=2"), SingleRank())
    rows = [json.loads(x) for x in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert "reserved" not in rows[0] and rows[0]["memory"] > 1 << 20
    assert "reserved: " not in (tmp_path / "a" / "log.txt").read_text()


def test_a_run_that_drops_over_half_of_the_choices_of_experts_says_so(make_job, capsys):
    shares = iter((0.5, 0.6))  # of two stretches
    with patch.object(monitor, "busy", lambda counts: Busy(0.1, 3.0, next(shares))):
        train(make_job("a", "train.steps=2"), SingleRank())
    said = [x for x in capsys.readouterr().out.splitlines() if "of the choices of experts" in x]
    raising = "raise method.routing.capacity or method.routing.balance_loss"
    assert said == [f"step 2 dropped 60% of the choices of experts: {raising}"]
