"""The pages docs/how-to/two-machines.md and rack.md, walked in a box: their own commands, on hosts
that share no folder, one of which has a clock that is five hours ahead.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from small_runs import RECIPE, losses

import howdah

pytestmark = [pytest.mark.root, pytest.mark.slow]
HERE = Path(__file__).parent
PACKAGE = Path(howdah.__file__).parent
PAGES = HERE.parents[1] / "docs" / "how-to"
PAGE = PAGES / "two-machines.md"
WORK = Path("/tmp", "work")  # in the /tmp that each host has of its own
FEW = ["train.save_every=3", "threads=1"]


@pytest.fixture
def clock(tmp_path):
    """A library that sets the clock of a process ahead, as a host sees it."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("needs a C compiler")
    made = tmp_path / "clock.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", made, HERE / "clock.c"], check=True, timeout=600
    )
    return made


def page_line(start, end="", page=PAGE):
    """The words of the page's first command that begins and ends so."""
    pattern = rf"^\$ ({re.escape(start)}.*{re.escape(end)})$"
    found = re.search(pattern, page.read_text("utf-8"), re.M)
    assert found, f"the page has no command {start} ... {end}"
    return shlex.split(found[1])


class Hosts:
    """Hosts with a recipe, and what the page says is the same everywhere: text below one path."""

    def __init__(self, box, clock):
        self.box = box
        for host in range(box.hosts):
            work = box.file(host, WORK)
            (work / "text").mkdir(parents=True)
            for name in range(8):
                lines = [f"{n} follows {n - 1}, says {name}" for n in range(name * 90, 400)]
                (work / "text" / f"{name}.txt").write_text("\n".join(lines))
            (work / "small.toml").write_text(RECIPE.format(text="text"))
            shutil.copy(clock, box.file(host, "/tmp/clock.so"))
            # A clone of its own: the folder of a command comes first.
            source = box.file(0, WORK / "howdah") if host else PACKAGE
            shutil.copytree(source, work / "howdah", ignore=shutil.ignore_patterns("__pycache__"))

    def start(self, host, words):
        ahead = "export LD_PRELOAD=/tmp/clock.so; " if host == 1 else ""
        shell = f"cd {WORK}; {ahead}exec {shlex.join(map(str, words))}"
        env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return self.box.start(host, ["sh", "-c", shell], env=env, **pipe)

    def howdah(self, host, *words):
        """A command of howdah on one host: exit code, and what it said."""
        run = self.start(host, [sys.executable, "-m", "howdah", *words])
        return run.communicate()[0], run.returncode

    def torchrun(self, hosts, line, *changes, ranks, few=FEW):
        """The page's line on these hosts, the first of which is HOST; what each said, and codes."""
        names = {"HOST": f"host{hosts[0]}", "recipes/laptop.toml": "small.toml"}
        runs = []
        for node, host in enumerate(hosts):
            words = [names.get(word, word) for word in line]
            words[words.index("--node-rank") + 1] = node
            words[words.index("--nproc-per-node") + 1] = ranks
            torchrun = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
            runs.append(self.start(host, [*torchrun, *few, *changes]))
        said = [""] * len(runs)

        def read(n):
            said[n] = runs[n].communicate()[0]

        threads = [threading.Thread(target=read, args=(n,)) for n in range(len(runs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said, [run.returncode for run in runs]

    def run_folder(self, host):
        return self.box.file(host, WORK / "runs/two")

    def files(self, host, step):
        path = self.run_folder(host) / "checkpoints" / f"step-{step:08d}"
        return sorted(os.listdir(path)) if path.exists() else []


def test_the_page_of_two_machines(box, clock):
    """Train, verify, resume on other hosts: another number of them, another layout."""
    first = page_line("torchrun --nnodes 2")
    other = page_line("torchrun --nnodes 3")
    with box("flat-10g", 3) as cluster:
        hosts = Hosts(cluster, clock)
        ahead = hosts.start(1, ["date", "+%s"]).communicate()[0]
        assert int(ahead) - int(hosts.start(0, ["date", "+%s"]).communicate()[0]) > 4 * 3600
        said, code = hosts.howdah(0, "verify", "small.toml", "layout=dp2 tp2")
        assert code == 0, said

        proof = page_line("torchrun --nnodes 2", 'layout="dp* tp2"', PAGES.parent / "verify.md")
        said, codes = hosts.torchrun([0, 1], proof, ranks=2, few=())
        assert codes == [0, 0] and "equal: bytes sent and held" in said[0], said
        said, codes = hosts.torchrun([0, 1], first, "train.steps=6", "train.export=true", ranks=2)
        assert codes == [0, 0], said
        ranks = [f"rank-0000{rank}.safetensors" for rank in range(4)]
        assert hosts.files(0, 3) == ["index.json", *ranks[:2]]
        assert hosts.files(0, 6) == ["index.json", *ranks]  # brought there, for the export
        assert hosts.files(1, 3) == hosts.files(1, 6) == ["index.json", *ranks[2:]]
        assert "brought " in said[0] and ": equal" in said[0]
        exports = [(hosts.run_folder(host) / "export").is_dir() for host in (0, 1)]
        assert exports == [True, False]
        assert cluster.sent(0) > 0 < cluster.sent(1)
        told, code = hosts.howdah(0, "sample", "runs/two", "1 follows")
        assert code == 0, told
        told, code = hosts.howdah(1, "train", "runs/two", "layout=single", "train.steps=9")
        assert code == 2
        assert "rank-00000.safetensors of host0: start on these, too, by torchrun" in told

        # The host that has everything is away: those that are there say what they lack.
        said, codes = hosts.torchrun([1, 2], other_of(other, 2), "train.steps=9", ranks=1)
        assert codes == [1, 1]
        assert "step 6 lacks rank-00000.safetensors of host host0" in said[0], said

        said, codes = hosts.torchrun([2, 0, 1], other, "train.steps=9", ranks=1)
        assert codes == [0, 0, 0], said
        assert "going on from step 6, saved on dp2 tp2 x1" in said[0]
        assert "brought " in said[0]
        for steps in ("train.steps=6", "train.steps=9"):  # the schedule spans them
            alone = ["layout=single", steps, "folder=runs/alone", *FEW]
            told, code = hosts.howdah(0, "train", "small.toml", "--resume", *alone)
            assert code == 0, told
        here = losses(hosts.run_folder(2))
        there = losses(cluster.file(0, WORK / "runs/alone"))
        assert sorted(here) == [7, 8, 9]
        for step in here:
            assert here[step] == pytest.approx(there[step], rel=1e-4)


def test_the_page_of_a_rack(box, clock):
    """Doctor, train by what it measured, sample."""
    every, rack = [0, 1, 2, 3], PAGES / "rack.md"
    with box("flat-1g", 4) as cluster:
        hosts = Hosts(cluster, clock)
        doctor = page_line("torchrun --nnodes 4", "doctor --hosts --measure", rack)
        said, codes = hosts.torchrun(every, doctor, ranks=1, few=())
        assert codes == [1, 0, 0, 0], said  # for the clock of host1
        assert "4: host0 host1 host2 host3; 1 rank each" in said[0]
        assert "prices of algorithms, as measured" in said[0]
        train = page_line("torchrun --nnodes 4", "folder=runs/rack", rack)
        said, codes = hosts.torchrun(every, train, "train.steps=6", ranks=1)
        assert codes == [0] * 4, said
        assert "chosen for 4 hosts, measured" in said[0] and ": equal" in said[0]
        sample = page_line("howdah sample", page=rack)
        told, code = hosts.howdah(0, *sample[1:])
        assert code == 0, told


def test_all_machines_are_started_from_one_terminal(box, clock, tmp_path):
    """The page's own script, with an ssh and an scp that lead to hosts of the box."""
    script = next(
        b for b in re.findall(r"```sh\n(.*?)```", PAGE.read_text("utf-8"), re.S) if "ssh" in b
    )
    few = " ".join([*FEW, "train.steps=6", "folder=runs/two"])
    for old, new in {
        "node0 node1": "host0 host1",
        "/srv/howdah": str(WORK),
        "--nproc-per-node 4": "--nproc-per-node 1",
        "recipes/laptop.toml": "small.toml",
        "folder=runs/two": few,
    }.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    with box("flat-10g", 2) as cluster:
        hosts = Hosts(cluster, clock)
        for host in range(2):
            given = {**cluster.environment(host), "HOWDAH_SECRET_FILE": "", "OMP_NUM_THREADS": "1"}
            told = [f"{name}={value}" for name, value in given.items()]
            enter = shlex.join([*cluster.words(host, ["env", *told, "sh", "-c"])])
            (tmp_path / f"enter-host{host}").write_text(enter + ' "$1"\n')
            there = cluster.file(host, "/")
            (tmp_path / f"copy-host{host}").write_text(f'cp -p "$1" "{there}/$2"\n')
        (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec sh {tmp_path}/enter-$1 "$2"\n')
        scp = f'#!/bin/sh\nexec sh {tmp_path}/copy-${{4%%:*}} "$3" "${{4#*:}}"\n'
        (tmp_path / "scp").write_text(scp)
        for name in ("ssh", "scp"):
            (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run(
            ["sh", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert [*losses(hosts.run_folder(0))] == [*range(1, 7)], done.stdout + done.stderr
        secrets = [cluster.file(host, WORK / "secret").read_bytes() for host in range(2)]
        assert secrets == [(tmp_path / "secret").read_bytes()] * 2


def other_of(line, nodes):
    """The same command for another number of machines."""
    words = [*line]
    words[words.index("--nnodes") + 1] = nodes
    return words


def test_hosts_that_differ_are_told_which(box, clock):
    """Another text below the same path, and another howdah: each host's own sentence names it."""
    line = page_line("torchrun --nnodes 2")
    with box("flat-10g", 2) as cluster:
        hosts = Hosts(cluster, clock)
        path = cluster.file(1, WORK / "text/3.txt")
        path.write_text(path.read_text().replace("follows", "is after"))
        said, codes = hosts.torchrun([0, 1], line, "layout=dp2", ranks=1)
        assert codes == [1, 1]
        for each in said:
            assert "rank 1 on host1 and rank 0 on host0 have other contents in data.sources" in each

        with cluster.file(1, WORK / "howdah/comm/meeting.py").open("a") as source:
            source.write("\n# changed\n")
        said, codes = hosts.torchrun([0, 1], line, "layout=dp2", ranks=1)
        assert codes == [1, 1]
        for each in said:
            assert re.search(r"rank \d on host\d runs howdah .* and rank \d on host\d 0.1.0", each)
