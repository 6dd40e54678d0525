"""The average of the weights: on every layout, saved, resumed, evaluated and exported."""

import pytest
import torch
from safetensors.torch import load_file
from small_runs import assert_same_bits, copy_until, losses, metrics, tensors, train_on

from howdah.base.errors import UserError
from howdah.train.finished_run import open_run

FLOAT64 = ("method.precision=float64", "train.steps=6", "train.save_every=3")
AVERAGE = "method.optimizer.average=0.3"
QUICK = ["dp2 zero1", "tp2 sp", "dp2 zero3 optimizer=disk"]
OTHERS = [
    *("dp2", "dp3 zero2", "dp2 zero3", "pp2", "dp2 server1"),
    *("single x3 optimizer=host", "pp2 weights=host optimizer=host"),
]


def averages(folder, step):
    return {name: one for (kind, name), one in tensors(folder, step).items() if kind == "average"}


def apart(first, second):
    assert first.keys() == second.keys() and first
    return max(float((first[n] - second[n]).norm() / second[n].norm()) for n in first)


def test_the_average_is_the_formula_of_the_weights(workers, make_job, tmp_path):
    """From the weights of every step, in float64."""
    every = (*FLOAT64, "train.save_every=1", "train.keep_last=9", "method.optimizer.average=0.3")
    train_on(workers, make_job("a", *every))
    expected = None
    for step in range(1, 7):
        now = tensors(tmp_path / "a", step)
        now = {name: one for (kind, name), one in now.items() if kind == "weight"}
        if expected:  # of step 1 the start is not saved
            c = min(0.3, step / (9 + step))
            expected = {n: c * old + (1 - c) * now[n] for n, old in expected.items()}
            assert apart(averages(tmp_path / "a", step), expected) < 1e-13
        expected = averages(tmp_path / "a", step)


@pytest.mark.parametrize("layouts", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_every_layout_has_the_average_of_one_device(workers, make_job, tmp_path, layouts):
    """And the same loss of it; memory and bytes are as predicted."""
    train_on(workers, make_job("one", *FLOAT64, AVERAGE))
    expected = averages(tmp_path / "one", 6)
    (loss,) = [row["average_loss"] for row in metrics(tmp_path / "one", "held_out_all").values()]
    for number, layout in enumerate(layouts):
        train_on(workers, make_job(f"{number}", *FLOAT64, AVERAGE, f"layout={layout}"))
        folder = tmp_path / f"{number}"
        assert apart(averages(folder, 6), expected) < 1e-10, layout
        (row,) = metrics(folder, "held_out_all").values()
        assert row["average_loss"] == pytest.approx(loss, rel=1e-10), layout
        log = (folder / "log.txt").read_text()
        assert "NOT EQUAL" not in log and "; of the average of the weights " in log


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("dp2 zero1", "float32"),
        *(
            pytest.param(layout, "bf16", marks=pytest.mark.slow)
            for layout in ("dp2 zero3", "dp2 zero1", "single x3 optimizer=host")
        ),
    ],
)
def test_evaluating_it_changes_no_bit_and_a_run_goes_on(
    workers, make_job, tmp_path, layout, precision
):
    """Resumed on the same layout it has equal bits; and a run without it, equal weights."""
    how = (AVERAGE, f"layout={layout}", f"method.precision={precision}", "train.steps=6")
    how = (*how, "train.save_every=3")
    train_on(workers, make_job("a", *how, "train.evaluate_every=1"), make_job("b", *how))
    assert_same_bits(tensors(tmp_path / "a", 6), tensors(tmp_path / "b", 6))
    copy_until(tmp_path / "a", tmp_path / "c", 3)
    train_on(workers, make_job("c", *how), make_job("plain", *how, "method.optimizer.average=0"))
    assert_same_bits(tensors(tmp_path / "a", 6), tensors(tmp_path / "c", 6))
    assert losses(tmp_path / "plain") == losses(tmp_path / "a")


def test_a_loss_of_an_average_that_forgets_at_once_is_that_of_the_weights(
    workers, make_job, tmp_path
):
    train_on(workers, make_job("a", *FLOAT64, "method.optimizer.average=1e-12"))
    (row,) = metrics(tmp_path / "a", "held_out_all").values()
    assert row["average_loss"] == pytest.approx(row["loss"], rel=1e-9)


def test_it_is_exported(workers, make_job, tmp_path):
    train_on(workers, make_job("a", *FLOAT64, AVERAGE, "layout=dp2 zero2"))
    folder = tmp_path / "a"
    open_run(folder, say=print, average=True).export(tmp_path / "x")
    open_run(folder, say=print).export(tmp_path / "y")
    x, y = (load_file(tmp_path / one / "model.safetensors") for one in "xy")
    expected = averages(folder, 6)["norm.weight"]
    name = "model.norm.weight"
    assert torch.equal(x[name], expected.to(x[name].dtype)) and not torch.equal(x[name], y[name])


def test_what_has_no_average_is_one_sentence(workers, make_job, tmp_path):
    train_on(workers, make_job("a", "train.steps=2"))
    with pytest.raises(UserError, match=r"has no average of the weights; train with method.optimi"):
        open_run(tmp_path / "a", say=print, average=True)
    with pytest.raises(UserError, match=r"under method.sync servers update their parts"):
        sync = 'method.sync={kind = "asp", workers = 2}'
        make_job("b", AVERAGE, sync, "layout=single server1", "method.grad_clip=0")
    from howdah.comm.transport import SingleRank
    from howdah.train.loop import train

    with pytest.raises(UserError, match=r"holds no average of adamw, which method.optimizer.aver"):
        train(make_job("a", "train.steps=4", AVERAGE), SingleRank())
    assert open_run(tmp_path / "a", say=print).checkpoint.step == 2
