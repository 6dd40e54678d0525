"""The torch backend between two hosts of a box: TCP, for ranks that have the run's secret."""

import subprocess
import sys

import pytest
from run_examples import ROOT

pytestmark = [pytest.mark.root, pytest.mark.slow]


def test_plain_ddp_on_two_hosts_gives_the_numbers_of_one(box):
    """Two ranks on each of two hosts. Without a secret, all of them are told so in a sentence."""
    with box("flat-1g", 2) as cluster:
        said = ran(cluster, "howdah", secret=True)
        other = ran(cluster, "gloo", secret=True)
        refused = ran(cluster, "howdah", secret=False)
    words, gloo = said[0].split(), other[0].split()
    assert words[:3] == ["howdah,", "4", "ranks:"]
    assert words[3:5] == gloo[3:5]  # the first loss; sums of four have no one order
    assert float(words[-1]) == pytest.approx(float(gloo[-1]), abs=2e-4)
    assert all("HOWDAH_SECRET_FILE" in one for one in refused), refused


def ran(cluster, backend, *, secret):
    """What each of four ranks printed."""
    runs = []
    for rank in range(4):
        host = rank // 2
        environment = {"RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "host0", "MASTER_PORT": 29520}
        environment |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
        if not secret:
            environment["HOWDAH_SECRET_FILE"] = ""  # each host of a box has one
        words = [sys.executable, str(ROOT / "examples" / "plain_ddp.py"), backend]
        env = {name: str(value) for name, value in environment.items()}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        runs.append(cluster.start(host, words, env=env, **pipe))
    found = [run.communicate()[0] for run in runs]
    assert secret == (sum(run.returncode for run in runs) == 0), found
    return [one.strip().splitlines()[-1] if one.strip() else "" for one in found]
