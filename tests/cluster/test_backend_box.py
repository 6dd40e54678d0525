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
    words = [sys.executable, str(ROOT / "examples" / "plain_ddp.py"), backend]
    runs = started(cluster, words, {} if secret else {"HOWDAH_SECRET_FILE": ""})
    found = [run.communicate()[0] for run in runs]
    assert secret == (sum(run.returncode for run in runs) == 0), found
    return [one.strip().splitlines()[-1] if one.strip() else "" for one in found]


def started(cluster, words, environment=None):
    """Four ranks of a program, two on each host; each host has a secret."""
    runs = []
    for rank in range(4):
        facts = {"RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "host0", "MASTER_PORT": 29520}
        facts |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT, **(environment or {})}
        env = {name: str(value) for name, value in facts.items()}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        runs.append(cluster.start(rank // 2, words, env=env, **pipe))
    return runs


SENDS = """
import sys, torch, torch.distributed as dist
import howdah.comm.backend

length = int(sys.argv[1])
dist.init_process_group("howdah")
rank, ranks = dist.get_rank(), dist.get_world_size()
whole, part = torch.ones(length), torch.full((length // ranks,), float(rank))

def sent():
    dist.barrier()
    rows = open("/proc/net/dev").read().splitlines()
    return int(next(row for row in rows if row.strip().startswith("eth0:")).split()[9])

def counted(operation, *tensors):
    before = sent()
    operation(*tensors)
    return (sent() - before) / whole.nbytes

found = [counted(dist.all_gather_single, whole, part)]
assert whole.equal(torch.arange(float(ranks)).repeat_interleave(len(part)))
whole.fill_(rank)
found += [counted(dist.broadcast, whole, 0), counted(dist.all_reduce, whole.add_(1))]
assert whole.eq(ranks).all()
found += [counted(dist.reduce_scatter_single, part, whole)]
assert part.eq(ranks * ranks).all()
if rank == 0:
    print(*found)
dist.destroy_process_group()
"""
WHOLES = (0.5, 1, 1, 0.5)  # of an all-gather, a broadcast, an all-reduce, a reduce-scatter


def test_each_byte_goes_over_a_card_once(box):
    """Two ranks on each of two hosts. Directly, and over gloo, it is up to three times as much."""
    with box("flat-1g", 2) as cluster:
        runs = started(cluster, [sys.executable, "-c", SENDS, str(4 << 20)])
        ends = [run.communicate()[0] for run in runs]
    assert not any(run.returncode for run in runs), ends
    sent = map(float, ends[0].strip().splitlines()[-1].split())
    assert all(whole <= one < 1.1 * whole for whole, one in zip(WHOLES, sent, strict=True)), ends[0]
