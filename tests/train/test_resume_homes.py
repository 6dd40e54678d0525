"""Checkpoints of states that are on the host or the disk: any layout goes on from them, with the
bits of a run that was never ended; and what is on the disk is not needed for it.
"""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_runs import (
    assert_same_bits,
    copy_until,
    forget,
    losses,
    metrics,
    opened,
    tensors,
    train_on,
)

from howdah.config.history import FREE, changes
from howdah.config.recipe import parse_run
from howdah.plan.method import Optimizer
from howdah.plan.storage import Storage
from howdah.train import resume

DISK = "weights=disk gradients=disk optimizer=disk activations=disk"
CHAOS = Path(__file__).parents[2] / "bench" / "chaos"


def test_a_run_on_the_disk_goes_on_with_equal_bits(workers, make_job, tmp_path):
    """And one in memory goes on on the disk, after it died on the way to step 20."""
    train_on(workers, make_job("memory", "layout=single x2", "batch.micro_batch=3"))
    there = tensors(tmp_path / "memory", 20)
    job = make_job("disk", f"layout=single x2 {DISK}", "batch.micro_batch=3")
    train_on(workers, job)
    assert_same_bits(tensors(tmp_path / "disk", 20), there)
    assert list((tmp_path / "disk" / "scratch").iterdir()) == []
    forget(tmp_path / "disk", 20)
    train_on(workers, job)
    assert_same_bits(tensors(tmp_path / "disk", 20), there)
    copy_until(tmp_path / "memory", tmp_path / "moved", 10)
    train_on(workers, make_job("moved", "layout=single x2 optimizer=disk", "batch.micro_batch=3"))
    assert_same_bits(tensors(tmp_path / "moved", 20), there)
    assert metrics(tmp_path / "moved")[20]["exposed"] > 0  # alone, a rank waits for its disk


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("homes", ["optimizer=host", DISK])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_what_is_frozen_at_home_is_saved_and_comes_back(
    workers, make_job, tmp_path, homes, precision
):
    """It has no states; and parts with rates of their own are updated as on the device."""
    words = "batch.micro_batch=3", f"method.precision={precision}"
    words += ('method.train=["layers.1.*", "norm.*=0.5"]',)
    job = make_job("home", f"layout=single x2 {homes}", *words)
    train_on(workers, job)
    there = tensors(tmp_path / "home", 20)
    if precision == "float32":  # in bf16 other operations sum the gradients of norms in memory
        train_on(workers, make_job("memory", "layout=single x2", *words))
        assert_same_bits(tensors(tmp_path / "memory", 20), there)
    forget(tmp_path / "home", 20)
    train_on(workers, job)
    assert_same_bits(tensors(tmp_path / "home", 20), there)


def test_the_gradient_that_waits_is_in_a_checkpoint(workers, make_job, tmp_path):
    """With an update that is one step late; one device goes on from two, too."""
    words = "batch.micro_batch=3", "method.optimizer.delay=true"
    job = make_job("late", "layout=single x2 optimizer=host", *words)
    train_on(workers, job)
    there = tensors(tmp_path / "late", 20)
    assert any("late_gradient" in str(name) for name in there)
    forget(tmp_path / "late", 20)
    train_on(workers, job)
    assert_same_bits(tensors(tmp_path / "late", 20), there)
    folder = copy_until(tmp_path / "late", tmp_path / "two", 10)
    train_on(workers, make_job("two", "layout=dp2 zero2 x1 gradients=host optimizer=host", *words))
    assert losses(folder) == pytest.approx(losses(tmp_path / "late"), rel=1e-6)
    folder = copy_until(tmp_path / "late", tmp_path / "in time", 10)
    train_on(workers, make_job("in time", "layout=single x2", "batch.micro_batch=3"))
    assert (
        "late_gradient is left out: this run has none, a step" in (folder / "log.txt").read_text()
    )


def test_a_checkpoint_without_a_gradient_that_waits_says_what_would_work():
    checkpoint = SimpleNamespace(kinds={"weight", "exp_avg", "exp_avg_sq"})
    (told,) = resume._of_optimizer(checkpoint, "adamw", Optimizer(delay=True))
    assert told.startswith("holds no late_gradient of adamw, which method.optimizer.delay needs;")
    assert "method.optimizer.delay=false" in told
    assert not list(resume._of_optimizer(checkpoint, "adamw", Optimizer()))


@pytest.mark.slow
def test_another_layout_goes_on_from_what_was_on_the_disk(workers, make_job, tmp_path):
    train_on(workers, make_job("a", f"layout=dp2 zero3 {DISK}"))
    never_changed = losses(tmp_path / "a")
    for layout in ("dp3 zero1 optimizer=host", "tp2 weights=host optimizer=disk", "single"):
        folder = copy_until(tmp_path / "a", tmp_path / layout, 10)
        train_on(workers, make_job(layout, f"layout={layout}"))
        assert losses(folder) == pytest.approx(never_changed, rel=1e-6)
        assert opened(folder, 20).samples == opened(tmp_path / "a", 20).samples


def test_a_run_ends_with_the_bytes_and_the_memory_that_were_predicted(workers, make_job, tmp_path):
    """An evaluation fetches weights too, and does not count."""
    job = make_job("a", f"layout=dp2 zero3 {DISK}", "train.evaluate_every=7")
    train_on(workers, job)
    told = (tmp_path / "a" / "log.txt").read_text()
    assert "by rank 0 and its homes" in told and ": equal" in told
    memory = next(line for line in told.splitlines() if line.startswith("memory "))
    assert "moments at disk" in memory and "staged at host" in memory
    for part in memory.split(": ", 1)[1].split(", "):
        found, predicted = part.rstrip(")").split(" (predicted ")
        assert found.split()[-1] == predicted, part


@pytest.mark.slow
def test_kills_at_any_moment_change_no_bit_of_states_on_the_disk(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(CHAOS))
    import kills

    monkeypatch.setattr(kills, "STEPS", 80)
    monkeypatch.setattr(kills, "TARGETS", [t for t in kills.TARGETS if "stopped" not in t])
    layout = f"dp2 zero3 {DISK}"
    rows = list(kills.kills(tmp_path, each=3, layouts=(layout,), seed=7))
    assert [row["left"] for row in rows[:-1]] == [[]] * 3
    assert rows[-1] == {"kind": "end", "layout": layout, "code": 0, "equal": True}


def test_storage_may_change_on_resume():
    """It says how states are kept, not what is computed."""
    before = parse_run({"name": "a", "model": {"preset": "laptop"}})
    after = replace(before, storage=Storage("/var/tmp", True, 2, "threads", 3, 1 << 30, 1e9, 1e9))
    found = changes(before, after)
    assert len(found) == len(fields(Storage)) and found.keys() <= FREE
