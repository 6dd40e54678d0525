"""Running small trainings, and reading what they leave behind."""

import json
import shutil
from itertools import chain
from pathlib import Path
from unittest.mock import patch
from zlib import crc32

import torch

from howdah.checkpoint.folders import step_folder
from howdah.checkpoint.load import open_checkpoint
from howdah.text.batches import NO_SAMPLE
from howdah.train import loop
from howdah.train.loop import train

RECIPE = """
layout = "single"
seed = 1
threads = 1

[model]
layers = 2
width = 32
heads = 2
ffn_size = 64
vocab = 300
context = 32

[data]
sources = ["{text}"]
sequence_length = 32
validation_share = 0.1

[batch]
global_batch = 6

[method.lr]
peak = 3e-3
warmup_steps = 3

[train]
steps = 20
log_every = 1
save_every = 10
evaluate_samples = 4
"""


def run_jobs(transport, jobs):
    """For workers: trains one job after another; their outcomes."""
    return [train(job, transport) for job in jobs]


def train_on(workers, *jobs):
    """Trains jobs of one layout on as many workers as it has ranks; rank 0's outcomes."""
    return workers.run(run_jobs, jobs, ranks=jobs[0].layout.world)[0]


def train_watched(transport, jobs):
    """For workers: trains one job after another; each step's samples on this rank, in order, with
    what they say, and the number of the samples' reader, which the ranks of cp, tp and pp share.
    """
    seen, step_of = [], loop.train_step

    def watched(context, batch, *, step, **rest):
        rows = [row for micro in batch for row in zip(micro.samples, micro.tokens, strict=True)]
        read = [(int(n), crc32(tokens.tobytes())) for n, tokens in rows if n != NO_SAMPLE]
        seen.append((step, context.mesh.index_of("dp"), read))
        return step_of(context, batch, step=step, **rest)

    with patch.object(loop, "train_step", watched):
        for job in jobs:
            loop.train(job, transport)
    return seen


def samples_of(ranks):
    """Each step's samples over all readers; the ranks of a reader must have read alike."""
    steps = {}
    for step, replica, read in (row for seen in ranks for row in seen):
        assert steps.setdefault(step, {}).setdefault(replica, read) == read
    return {step: sorted(chain(*by.values())) for step, by in steps.items()}


def opened(folder, step):
    return open_checkpoint(step_folder(Path(folder) / "checkpoints", step))


def tensors(folder, step):
    """Every weight and optimizer state of a checkpoint, whole."""
    checkpoint = opened(folder, step)
    return {
        (kind, name): checkpoint.tensor(kind, name)
        for kind in checkpoint.kinds
        for name in checkpoint.names(kind)
    }


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def metrics(folder, kind="train"):
    """The rows of metrics.jsonl by step; of a step that was trained twice, the last."""
    rows = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in rows if row["kind"] == kind}


def losses(folder):
    return {step: row["loss"] for step, row in metrics(folder).items()}


def forget(folder, step):
    """Leaves a run as it was when it died on the way to `step`."""
    shutil.rmtree(step_folder(Path(folder) / "checkpoints", step))


def copy_until(folder, to, step):
    """A copy of a run folder whose newest checkpoint is that of `step`."""
    shutil.copytree(folder, to)
    for path in (Path(to) / "checkpoints").iterdir():
        if path.name.startswith("step-") and path.name > step_folder(Path(), step).name:
            shutil.rmtree(path)
    return Path(to)
