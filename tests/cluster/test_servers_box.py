"""A run with servers on hosts that share no folder: members join by an address, one host's link is
cut for half a second, and another host's server and worker are killed.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from small_runs import RECIPE

import howdah
from howdah.server.ledger import read_ledger, twice

pytestmark = [pytest.mark.root, pytest.mark.slow]
WORK = Path("/tmp", "work")  # in the /tmp that each host has of its own
SETTINGS = (
    *("layout=server2", "method.grad_clip=0.0", "batch.global_batch=2", "batch.micro_batch=1"),
    *("train.log_every=1", "train.steps=80", "folder=run", "comm.interface=eth0"),
    'method.sync={kind = "asp", workers = 3, replicas = 1}',
)


class Hosts:
    """Hosts with a recipe, its text, and a howdah of their own."""

    def __init__(self, box, stack):
        self.box, self.stack = box, stack
        for host in range(box.hosts):
            work = box.file(host, WORK)
            (work / "text").mkdir(parents=True)
            for name in range(8):
                lines = [f"{n} follows {n - 1}, says {name}" for n in range(name * 90, 400)]
                (work / "text" / f"{name}.txt").write_text("\n".join(lines))
            (work / "small.toml").write_text(RECIPE.format(text="text"))
            source = box.file(0, WORK / "howdah") if host else Path(howdah.__file__).parent
            shutil.copytree(source, work / "howdah", ignore=shutil.ignore_patterns("__pycache__"))

    def start(self, host, role, *words):
        """Starts `howdah ROLE` on a host; what it says is read by the caller."""
        command = [sys.executable, "-m", "howdah", role, "small.toml", *SETTINGS, *words]
        shell = f"cd {WORK}; exec {shlex.join(command)}"
        env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = self.box.start(host, ["sh", "-c", shell], env=env, **pipe)
        self.stack.callback(self._end, process)
        return process

    def _end(self, process):
        process.kill()
        process.wait()
        process.stdout.close()

    def kill(self, host):
        """Kills (SIGKILL) all servers and workers of a host."""
        for name in Path(self.box.file(host, "/proc")).glob("[0-9]*"):
            words = (name / "cmdline").read_bytes().split(b"\0")
            if b"server" in words or b"worker" in words:
                self.box.run(host, ["kill", "-9", name.name])


def until(process, words):
    """Reads what a process says up to a line with these words, which is returned."""
    said = []
    for line in process.stdout:
        said.append(line)
        if words in line:
            return line
    raise AssertionError(f"it never said: {words}: {said}")


def test_servers_and_workers_on_hosts_of_their_own(box):
    with ExitStack() as stack, box("flat-1g", 4) as cluster:
        hosts = Hosts(cluster, stack)
        train = hosts.start(0, "train", "--listen", "host0:29400")
        until(train, "listening at")
        for host in (1, 2):
            hosts.start(host, "server", "--join", "host0:29400")
        until(train, "server 1 has joined")
        for host in (1, 2, 3):
            hosts.start(host, "worker", "--join", "host0:29400")
        until(train, "step: ")
        cluster.ip(3, "link set eth0 down")
        time.sleep(0.5)
        cluster.ip(3, "link set eth0 up")
        for host in range(3):
            near = f"10.77.0.{host + 1} lladdr 02:77:00:00:00:{host + 1:02x}"
            cluster.ip(3, f"neigh replace {near} nud permanent dev eth0")
        until(train, "step: ")
        hosts.kill(2)
        told = until(train, "has taken its place")
        dead = int(re.search(r"server (\d) has ended", told)[1])
        hosts.start(0, "worker", "--join", "host0:29400")
        rest = train.stdout.read()
        assert train.wait() == 0, rest
        assert "step: 80" in rest and "held-out at step 80" in rest
        folder = cluster.file(1, WORK / "run/ledgers")
        for shard in (dead, 1 - dead):
            events = read_ledger(folder / f"server-{shard}-from-0")
            done = [event.update for event in events if event.kind == "push"]
            assert twice(events) == []
            assert len(done) == 3 * 80 * len({one.key for one in done})  # each once
