"""Hosts in a box, measured: the doctor names a slow one, and a run chooses its algorithms."""

import json
import subprocess
import sys

import pytest
from small_runs import RECIPE

pytestmark = [pytest.mark.root, pytest.mark.slow]
SLOWED = "qdisc replace dev eth0 root tbf rate 10mbit burst 32768 latency 50ms"
PAIR_SLOWED = (
    "qdisc replace dev eth0 root handle 1: htb default 1",
    "class add dev eth0 parent 1: classid 1:1 htb rate 100mbit burst 32k",
    "class add dev eth0 parent 1: classid 1:2 htb rate 10mbit burst 32k",
    "filter add dev eth0 parent 1: protocol ip u32 match ip dst 10.77.0.4/32 flowid 1:2",
)


def on_all(cluster, seat, words, *, hosts=None):
    """Runs a command on every host as one rank each; what they said, and their exit codes."""
    runs = [
        cluster.start(
            host,
            [sys.executable, "-m", "howdah", *words],
            env={**seat(host, cluster.hosts), "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in (range(cluster.hosts) if hosts is None else hosts)
    ]
    said = [run.communicate()[0] for run in runs]
    return said, [run.returncode for run in runs]


def test_the_doctor_names_a_slow_card(box, modules):
    (prove,) = modules("prove")
    with box("edge-100m", 3) as cluster:
        said, codes = on_all(cluster, prove.seat, ["doctor", "--hosts"])
        assert codes == [0, 0, 0], said
        assert "hosts            3: host0 host1 host2; 1 rank each" in said[0].splitlines()
        assert "card of" not in said[1] + said[2], "rank 0 tells"

        cluster.tc(1, SLOWED)
        said, codes = on_all(cluster, prove.seat, ["doctor", "--hosts"])
        assert codes == [1, 0, 0], said
        lines = said[0].splitlines()
        (at,) = [n for n, line in enumerate(lines) if line.startswith("card of host1")]
        assert "times as slow as the others" in lines[at + 1]
        kept = [*cluster.file(0, "/tmp/cache/howdah/clusters").glob("hosts-*.json")]
        assert len(kept) == 1


def test_the_doctor_names_a_slow_link_of_fast_cards(box, modules):
    """Of four hosts, what host1 sends to host3 alone is slow."""
    (prove,) = modules("prove")
    with box("edge-100m", 4) as cluster:
        for line in PAIR_SLOWED:
            cluster.tc(1, line)
        said, codes = on_all(cluster, prove.seat, ["doctor", "--hosts"])
        assert codes == [1, 0, 0, 0], said
        lines = said[0].splitlines()
        (at,) = [n for n, line in enumerate(lines) if line.startswith("links")]
        assert lines[at].split() == ["links", "1", "slow"]
        assert "host1 to host3" in lines[at + 1] and "look at the switch" in lines[at + 1]
        assert not [line for line in lines if "times as slow as the others" in line]


def test_a_run_chooses_by_what_was_measured(box, modules, tmp_path):
    """All ranks take the choice of rank 0, whose bytes are predicted and counted."""
    (prove,) = modules("prove")
    with box("edge-100m", 3) as cluster:
        for host in range(3):
            (cluster.file(host, "/tmp/text")).mkdir()
            for name in range(8):
                lines = [f"{n} follows {n - 1}, says {name}" for n in range(name * 90, 400)]
                cluster.file(host, f"/tmp/text/{name}.txt").write_text("\n".join(lines))
            cluster.file(host, "/tmp/small.toml").write_text(RECIPE.format(text="/tmp/text"))
        words = ["train", "/tmp/small.toml", "folder=/tmp/run", "layout=dp3 zero1", "threads=1"]
        words += ["comm.algorithm=auto", "train.steps=3"]
        said, codes = on_all(cluster, prove.seat, words)
        assert codes == [0, 0, 0], said
        (line,) = [one for one in said[0].splitlines() if "chosen for 3 hosts, measured" in one]
        assert " 3x1: " in line
        log = cluster.file(0, "/tmp/run/log.txt").read_text()
        assert "NOT EQUAL" not in log
        recipe = cluster.file(0, "/tmp/run/run.toml").read_text()
        assert 'all_reduce = "auto"' not in recipe and "3x1: " in recipe
        (kept,) = cluster.file(0, "/tmp/cache/howdah/clusters").glob("hosts-*.json")
        assert json.loads(kept.read_text())["topology"]["hosts"] == ["host0", "host1", "host2"]


def test_algorithms_are_compared_between_hosts(box, modules):
    """Right results, a price beside each, and a star behind what `auto` takes."""
    (prove,) = modules("prove")
    words = ["bench", "collectives", "--hosts", "--op", "all_reduce,all_to_all", "--sizes", "4K,1M"]
    with box("edge-100m", 3) as cluster:
        said, codes = on_all(cluster, prove.seat, [*words, "--repeats", "2", "--gloo"])
        assert codes == [0, 0, 0], said
        assert said[1] == said[2] == "", "rank 0 tells"
        rows = [line.split() for line in said[0].splitlines() if line.startswith("all_")]
        assert {(row[0], row[1]) for row in rows} == {
            (op, size) for op in ("all_reduce", "all_to_all") for size in ("4096", "1048576")
        }
        assert all(row[-1] == "0" for row in rows), "no wrong element"
        assert sum("gloo" in row for row in rows) == sum("*" in row for row in rows) == 4
        reduced = [row[2] for row in rows if row[:2] == ["all_reduce", "1048576"]]
        assert "default" in reduced and len(reduced) >= 4
