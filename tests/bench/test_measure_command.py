"""`howdah measure`: the command, and what its ranks measure."""

import sys

import pytest
from test_measure import own, plan_on  # noqa: F401

from howdah.base.errors import UserError
from howdah.bench import machine, small_models
from howdah.bench.machine import (
    GROUPS,
    MODELS,
    PRECISIONS,
    PRODUCTS,
    STEPS,
    Wanted,
    group_round,
    round_of,
)
from howdah.bench.probes import PARTS, run_steps, take_round
from howdah.cli import main as cli
from howdah.cli import measure as command
from howdah.host.disk import disk_seconds
from howdah.host.facts import parse_busy
from howdah.machines.cluster_file import load_cluster
from howdah.sim.predict import predict

# -- the command -------------------------------------------------------------------------


def howdah(monkeypatch, capsys, *words, cache=None):
    monkeypatch.setattr(sys, "argv", ["howdah", *map(str, words)])
    if cache:
        monkeypatch.setenv("HOWDAH_CACHE", str(cache))
    code = cli.run()
    return code, capsys.readouterr()


def test_a_machine_that_was_not_measured_is_told_how(monkeypatch, capsys, tmp_path):
    code, said = howdah(monkeypatch, capsys, "plan", "laptop", "--cluster", "here", cache=tmp_path)
    assert code == 2
    assert "howdah measure" in said.err


def test_the_command_line_reads_what_was_measured(monkeypatch, capsys, own):  # noqa: F811
    plan = ("plan", "laptop", "--layout", "dp2", "--cluster")
    code, said = howdah(monkeypatch, capsys, *plan, "here", cache=own.parents[1])
    assert (code, "profile here" in said.out) == (0, True)
    code, said = howdah(monkeypatch, capsys, *plan, "herex3", cache=own.parents[1])
    assert (code, "howdah measure --ranks 3" in said.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--ranks", "65"), "1 to 64"),
        (("--ranks", "-1"), "1 to 64"),
        (("--out", "FILE"), "cannot be written"),
        (("--fast",), "--fast"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(monkeypatch, capsys, tmp_path, words, told):
    file = tmp_path / "file"
    file.write_text("")
    words = [str(file) if word == "FILE" else word for word in words]
    code, said = howdah(monkeypatch, capsys, "measure", *words, cache=tmp_path)
    assert code == 2
    assert told in said.err
    assert not said.out


def test_more_ranks_than_memory_holds_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "free_memory", lambda: 3 * command.RANK_BYTES)
    command._check(3, tmp_path, ours=True)
    with pytest.raises(UserError, match="use at most 3"):
        command._check(4, tmp_path, ours=True)


def test_a_disk_keeps_nothing_of_its_measurement(tmp_path):
    written, read = disk_seconds(tmp_path, 3 << 20)
    assert written > 0
    assert read > 0
    assert not [*tmp_path.iterdir()]


def test_what_is_not_idle_is_taken_by_others():
    stat = "cpu  {} 0 0 {} {} 0 0 {} 7 7\ncpu0 1\n"
    before, after = stat.format(100, 100, 0, 0), stat.format(110, 170, 10, 10)
    assert parse_busy(before, after) == pytest.approx(0.2)
    assert parse_busy(before, before) == 0
    assert parse_busy("", "") == 0


# -- on ranks ------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """Operations of microseconds."""
    monkeypatch.setattr(machine, "PRODUCTS", ((8, 8, 8), (8, 16, 8), (16, 8, 16)))
    monkeypatch.setattr(machine, "PAIRS", ((1, 2, 8, 4), (1, 2, 16, 4)))
    monkeypatch.setattr(machine, "MODELS", tuple((16, 2, 1, 24, 32, 1, n) for n in (8, 12, 16)))
    monkeypatch.setattr(machine, "STEPS", tuple((16, 2, 2, 24, 32, 1, 8, m) for m in (1, 2)))
    monkeypatch.setattr(small_models, "SHARED", ((16, 2, 2, 24, 32, 1, 8),))
    monkeypatch.setattr(machine, "MESSAGES", (64, 4096))
    monkeypatch.setattr(machine, "COPIED", 4096)


@pytest.mark.slow
def test_ranks_measure_and_the_files_can_be_planned_with(
    workers, tiny, monkeypatch, tmp_path, capsys
):
    """One rank, and two on each transport; a run's own step goes the same way."""
    wanted = Wanted((1, 2), 2, kinds=("engine", "torch"), rounds=1, seconds=0.0)
    asked = []

    def run(ranks, kind, function, *given):
        asked.append((ranks, kind, given[0].precision, given[0].threads))
        return workers.run(function, *given, ranks=ranks, transport=kind)[0]

    monkeypatch.setattr(command, "busy_share", lambda seconds: 0.0)
    monkeypatch.setattr(command, "WRITTEN", 1 << 10)
    command._measured(wanted, run, tmp_path)
    both = [(1, None, name, 2) for name in PRECISIONS] + [(2, None, name, 1) for name in PRECISIONS]
    assert asked == [*both, (2, "engine", "float32", 1), (2, "torch", "float32", 1)]
    said = capsys.readouterr().out
    assert "ranks 2" in said
    assert "torch: " in said
    for text, words in (("here", "dp2 x2"), ("herex1", "single")):
        cluster = load_cluster(text, own=tmp_path)
        for precision in PRECISIONS:
            time = predict(plan_on(words, precision), cluster).time
            assert time.seconds > 0
            assert all(cause >= 0 for cause in time.breakdown.values())
    assert len(workers.run(run_steps, plan_on("dp2 x2", micro=1), 1, 2, ranks=2)[0]) == 2


def test_a_round_has_all_that_was_asked(workers, tiny):
    (one,) = workers.run(take_round, round_of("bf16", 1, 0.0), ranks=1)
    phases = {name.split()[0]: len(seconds) for name, seconds in one.items()}
    parts = dict.fromkeys(PARTS, 2)
    assert phases == {"product": 3, "pairs": 2, "copy": 1, **parts, "steps": 1}
    first, second = workers.run(take_round, group_round(1, 0.0), ranks=2)
    assert first == second  # all ranks know the slowest
    assert len(first) == len(GROUPS) * 2


def test_models_and_sizes_differ_in_what_is_fitted():
    """With fewer of them than unknown values, many profiles would fit."""
    assert len(PRODUCTS) > 5
    assert len(MODELS) > 4
    assert len(STEPS) > 2
