"""Trackers: Weights & Biases and MLflow for real where they are installed, and what a failure does.

The two bring some thirty packages, so they are no development dependencies: their tests are skipped
where they are not installed (`pip install wandb mlflow-skinny`). Nothing is sent over a network.
"""

import json
import struct
from importlib.util import find_spec

import pytest
from small_runs import losses

from howdah.base.errors import UserError
from howdah.cli.environment import TRACKERS
from howdah.comm.transport import SingleRank
from howdah.train.inputs import code_problems
from howdah.train.job import Training
from howdah.train.loop import train
from howdah.train.metrics import MetricsWriter
from howdah.train.trackers import INSTALLED_BY, tracker_problems, trackers

NEEDS = "is not installed: it brings many packages, and is tried by hand"


@pytest.fixture
def offline(monkeypatch):
    for name, value in TRACKERS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def trained_twice(make_job, tmp_path, name):
    """Five steps, and five more in another start. The steps that are logged, and their losses."""
    how = (f"train.tracker={name}", "train.save_every=5")
    train(make_job("a", *how, "train.steps=5"), SingleRank())
    ids = (tmp_path / "a" / "trackers.json").read_text()
    train(make_job("a", *how, "train.steps=10"), SingleRank())
    assert (tmp_path / "a" / "trackers.json").read_text() == ids
    assert not (tmp_path / "a" / "tensorboard").exists()
    return json.loads(ids)[name], losses(tmp_path / "a")


def wandb_records(data):
    """The records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    block, header = 1 << 15, struct.Struct("<IHB")  # checksum, length, and where in a record
    at, parts = 7, []
    while at + header.size <= len(data):
        if block - at % block < header.size:
            at += block - at % block
            continue
        _, length, kind = header.unpack_from(data, at)
        parts.append(data[at + header.size : at + header.size + length])
        at += header.size + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield b"".join(parts)
            parts = []


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(make_job, tmp_path, offline):
    if find_spec("wandb") is None:
        pytest.skip(f"wandb {NEEDS}")
    from wandb.proto import wandb_internal_pb2

    name, expected = trained_twice(make_job, tmp_path, "wandb")
    files = sorted((tmp_path / "a" / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    found = {}
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            row = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            if "loss_metrics/global_avg_loss" in row:
                found[row["step"]] = row["loss_metrics/global_avg_loss"]
    assert len(files) == 2 and found == expected and len(found) == 10


def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(make_job, tmp_path, offline):
    if find_spec("mlflow") is None:
        pytest.skip(f"mlflow {NEEDS}")
    import mlflow

    name, expected = trained_twice(make_job, tmp_path, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "a" / "mlruns").as_uri())
    rows = client.get_metric_history(name, "loss_metrics/global_avg_loss")
    assert {row.step: row.value for row in rows} == expected and len(expected) == 10
    run = client.get_run(name)
    assert run.info.status == "FINISHED" and run.data.params["model.width"] == "32"
    (experiment,) = client.search_experiments(filter_string="name = 'howdah'")
    assert len(client.search_runs([experiment.experiment_id])) == 1


@pytest.mark.parametrize("name", [*INSTALLED_BY])
def test_one_that_is_not_installed_is_one_sentence(make_job, name):
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    (problem,) = tracker_problems(["tensorboard", name])
    package = INSTALLED_BY[name]
    assert problem == (
        f"train.tracker has {name}, which is not installed: pip install {package}, or leave it out"
    )
    assert [*code_problems(Training(tracker=(name,)), make_job("a").method, ranks=1)] == [problem]


def test_a_word_that_is_no_tracker_is_one_sentence(make_job):
    with pytest.raises(UserError, match=r"train.tracker.* is 'wandbb'; it must be"):
        make_job("a", "train.tracker=wandbb")


class Broken:
    """A tracker whose server has gone."""

    calls = 0

    def add(self, scalars, step):
        """Fails."""
        self.calls += 1
        raise OSError("CommError: no route to host")

    def close(self):
        """Fails, too."""
        raise OSError("CommError: still none")


def test_one_that_fails_is_one_note(tmp_path):
    said, broken = [], Broken()
    records = MetricsWriter(tmp_path, step=0, say=said.append, trackers={"wandb": broken})
    for step in (1, 2):
        records.held_out(step=step, values={"loss": 1.0}, whole=False)
        records.own(step, {"ratio": 2.0})
    records.close()
    assert broken.calls == 4 and said == [
        "wandb can no longer be written (CommError: no route to host): training goes on without it"
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_none_several_and_the_same_twice(make_job, tmp_path):
    train(make_job("a", "train.tracker=[]", "train.steps=2"), SingleRank())
    assert not (tmp_path / "a" / "tensorboard").exists() and len(losses(tmp_path / "a")) == 2
    names = ["tensorboard", "wandb", "tensorboard"]
    made = trackers(names, tmp_path, run="a", step=0, keys={})
    assert [*made] == ["tensorboard", "wandb"] and not [*tmp_path.glob("wandb*")]
