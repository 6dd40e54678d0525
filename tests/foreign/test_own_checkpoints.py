"""Checkpoints of foreign models: what one layout writes, every other one resumes."""

import json
from pathlib import Path

import pytest
import torch
from foreign_models import BUFFERS, job_of, optimizer_of, pictures, plain, reader
from torch import nn

import howdah
from howdah.base.errors import Unfinished, UserError
from howdah.checkpoint.load import open_checkpoint

SLOW = pytest.mark.slow


def saved(transport, folder, layout, model, more):
    """For workers: two steps, and a checkpoint; then the losses of two steps more."""
    job, loss_of, batch_of = job_of(transport, model, layout, **more)
    for step in range(2):
        job.step(loss_of, batch_of(step))
    path = job.save(folder, extra={"epoch": 3})
    job.step(loss_of, batch_of(2))
    job.save(folder)
    losses = [job.step(loss_of, batch_of(3))]
    job.close()
    return path.name, losses


def resumed(transport, folder, layout, model, more):
    """For workers: what a new job returns from `load`, and the losses of two steps."""
    job, loss_of, batch_of = job_of(transport, model, layout, **more)
    extra = job.load(Path(folder) / "step-00000002")
    losses = [job.step(loss_of, batch_of(step)) for step in (2, 3)]
    told = extra, job.steps, job.seen, job.laid.states.facts()[0]["settings"]["lr"]
    job.close()
    return told, losses


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("reader", {"kind": "AdamW"}),
        pytest.param("reader", {"kind": "SGD", "momentum": 0.9}, marks=SLOW),
        pytest.param("reader", {"kind": "NAdam"}, marks=SLOW),
        pytest.param("reader", {"kind": "ASGD"}, marks=SLOW),
    ],
)
def test_every_layout_resumes_what_another_has_written(workers, tmp_path, model, more):
    losses, _ = plain(model, 4, **more)
    told = workers.run(saved, tmp_path, "dp2 zero3", model, more, ranks=2)
    assert [name for name, _ in told] == ["step-00000002"] * 2
    assert told[0][1] == pytest.approx(losses[3:], rel=1e-10)
    for layout in ("single", "dp3 zero1", "dp2 zero2 x2"):
        ranks = 1 if layout == "single" else int(layout[2])
        for facts, found in workers.run(resumed, tmp_path, layout, model, more, ranks=ranks):
            assert facts == ({"epoch": 3}, 4, 40, 0.03)
            assert found == pytest.approx(losses[2:], rel=1e-10), layout


def test_two_checkpoints_stay_and_the_newest_is_taken(workers, tmp_path):
    workers.run(saved, tmp_path, "dp2", "reader", {}, ranks=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    net = reader()
    job = howdah.distribute(net, optimizer_of("AdamW", net), "single")
    assert job.load(tmp_path) is None
    assert job.steps == 3
    assert "fixed.weight" in open_checkpoint(tmp_path / "step-00000003").names("weight")


def test_a_folder_of_another_run_is_not_written_to(tmp_path):
    net = reader()
    of(net).save(tmp_path)
    with pytest.raises(UserError, match=r"has checkpoints of another run \(step 0\); go on from"):
        of(reader()).save(tmp_path)


def test_a_step_is_written_again_after_going_back(tmp_path):
    """A whole checkpoint of the same step was taken for this one once."""
    job, loss_of, batch_of = job_of(None, "reader", "single")
    first = job.save(tmp_path)
    job.step(loss_of, batch_of(0))
    second = job.save(tmp_path)
    before = job.state()
    job.load(first)
    job.step(loss_of, batch_of(5))
    after = job.state()
    assert job.save(tmp_path) == second
    job.load(second)
    name = "blocks.0.up.weight"
    assert torch.equal(job.state()[name], after[name])
    assert not torch.equal(after[name], before[name])


def local_statistics(transport, folder, layout, load):
    """For workers: the running mean of this process, saved or read."""
    net = pictures()
    rules = {**BUFFERS, "*running_mean": "local"}
    job = howdah.distribute(
        net, torch.optim.SGD(net.parameters()), layout, buffers=rules, transport=transport
    )
    if load:
        job.load(folder)
    else:
        net.first[1].running_mean += 1.0 + job.rank
        job.save(folder)
    job.close()
    return net.first[1].running_mean.tolist()


def test_local_buffers_go_on_where_there_are_as_many_processes(workers, tmp_path):
    one, two = workers.run(local_statistics, tmp_path, "dp2", False, ranks=2)
    assert (one[0], two[0]) == (1.0, 2.0)
    assert workers.run(local_statistics, tmp_path, "dp2 zero1", True, ranks=2) == [one, two]
    assert local_statistics(None, tmp_path, "single", True) == one


def of(net, **more):
    kind = more.pop("kind", "AdamW")
    return howdah.distribute(net, optimizer_of(kind, net, **more), "single", buffers=more)


def refused(job, folder):
    before = {name: x.clone() for name, x in job.state().items()}
    with pytest.raises(UserError) as told:
        job.load(folder)
    for name, tensor in job.state().items():
        assert torch.equal(tensor, before[name])
    return str(told.value)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path):
    net = reader()
    of(net).save(tmp_path / "good")
    assert "no sound checkpoint is in" in refused(of(reader()), tmp_path / "nothing")
    other = reader()
    other.more = nn.Linear(2, 2).double()
    assert "it has no weight of 'more.weight'" in refused(of(other), tmp_path / "good")
    less = reader()
    del less.fixed
    assert "has 'fixed.bias', which is not here" in refused(of(less), tmp_path / "good")
    wide = reader()
    wide.fixed = nn.Linear(8, 9).double()
    assert "fixed.weight is [8, 8] there and [9, 8] here" in refused(of(wide), tmp_path / "good")
    sgd = refused(of(reader(), kind="SGD"), tmp_path / "good")
    assert "has states of AdamW with 2 groups and this optimizer is SGD with 2" in sgd
    statistics = reader()
    statistics.norm = nn.BatchNorm1d(3, affine=False).double()
    job = howdah.distribute(
        statistics, optimizer_of("AdamW", statistics), "single", buffers={"*": "mean"}
    )
    assert "it has no buffer 'norm.running_mean'" in refused(job, tmp_path / "good")
    assert "JSON cannot hold" in refused_save(of(reader()), tmp_path / "good", {1j})
    (tmp_path / "file").write_text("")
    assert "choose another folder" in refused_save(of(reader()), tmp_path / "file", None)
    none = "job.save takes the name of a folder, and got None"
    assert none in refused_save(of(reader()), None, None)
    assert "job.load takes the name of a folder, and got 3" in refused(of(reader()), 3)
    index = tmp_path / "good" / "step-00000000" / "index.json"
    file = index.with_name("rank-00000.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "is damaged" in refused(of(reader()), index.parent)
    file.write_bytes(whole)
    told = json.loads(index.read_text())
    told["meta"]["kind"] = "changed"
    index.write_text(json.dumps(told))
    assert "no sound checkpoint" in refused(of(reader()), tmp_path / "good")


def refused_save(job, folder, extra):
    with pytest.raises((UserError, Unfinished)) as told:
        job.save(folder, extra=extra)
    return str(told.value)
