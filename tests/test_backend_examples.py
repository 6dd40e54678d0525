"""The examples of the torch backend, before and after the one line: the same numbers."""

import os
import subprocess
import sys

import pytest
from run_examples import ROOT, load
from torch_ranks import ranks_of


def trained(rank):
    return load("examples/plain_ddp.py").train()


def test_plain_ddp_gives_the_numbers_of_gloo(workers, tmp_path):
    ours, theirs = (ranks_of(workers, tmp_path, name)(trained) for name in ("howdah", "gloo"))
    assert ours == theirs
    assert ours[0] == ours[1]
    assert ours[0][-1] < ours[0][0] / 4


@pytest.mark.slow
def test_the_trainer_of_transformers_runs_on_it():
    """Accelerate takes the group that is there. The name is that of `dist.get_backend()`, because
    Accelerate calls every group on CPUs gloo's.
    """
    every = [by_torchrun("examples/trainer.py", name) for name in ("howdah", "gloo")]
    said = [one.splitlines()[-1] for one in every]  # behind what libraries print
    assert said[0].startswith("howdah, 2 ranks: loss ")
    assert said[1].startswith("gloo, 2 ranks: loss ")
    assert said[0].split()[1:] == said[1].split()[1:]


def by_torchrun(script, *words):
    """What a script prints on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, script, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
