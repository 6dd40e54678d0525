"""The example of docs/tasks/classification.md on two hosts that share nothing but the network: a
ring all-reduce between them, under torchrun.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_examples import ROOT, load
from small_runs import metrics

import howdah

pytestmark = [pytest.mark.root, pytest.mark.slow]
PAGE = ROOT / "docs" / "tasks" / "classification.md"
WORK = Path("/tmp", "work")  # in the /tmp that each host has of its own
FEW = ["train.steps=6", "threads=1"]


def page_words():
    """The page's torchrun, as words."""
    found = re.search(
        r"^(torchrun .* -m howdah train examples/classify\.toml)$", PAGE.read_text(), re.M
    )
    return shlex.split(found[1])


def words_of(host):
    """The page's line on one of two hosts, with a process on each."""
    words = page_words()
    changes = {"--nnodes": 2, "--node-rank": host, "--nproc-per-node": 1, "--master-addr": "host0"}
    for name, value in changes.items():
        words[words.index(name) + 1] = str(value)
    return [sys.executable, "-m", "torch.distributed.run", *words[1:], *FEW]


def test_two_hosts_sum_gradients_in_a_ring(box):
    with box("flat-10g", 2) as cluster:
        for host in range(2):
            work = cluster.file(host, WORK)
            work.mkdir()
            shutil.copytree(ROOT / "examples", work / "examples")
            source = Path(howdah.__file__).parent
            shutil.copytree(source, work / "howdah", ignore=shutil.ignore_patterns("__pycache__"))
            load("examples/labelled_rows.py").main(work / "rows")
        runs = []
        for host in range(2):
            shell = f"cd {WORK}; exec {shlex.join(words_of(host))}"
            env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            runs.append(cluster.start(host, ["sh", "-c", shell], env=env, **pipe))
        said = [run.communicate()[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0], said
        assert "dp2 x1" in said[0] and "algorithms  all_reduce ring" in said[0], said[0]
        assert ": equal" in said[0]
        assert 6 in metrics(cluster.file(0, WORK / "runs/classify"), "held_out_all")
        gradient = 2_748_000  # bytes of a sum, which each of two ranks of a ring sends once
        assert min(cluster.sent(host) for host in range(2)) > 6 * gradient
