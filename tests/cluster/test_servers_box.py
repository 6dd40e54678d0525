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
from itertools import product
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
        return self.howdah(host, {}, role, "small.toml", *SETTINGS, *words)

    def howdah(self, host, env, *words):
        """Starts a command of howdah on a host."""
        command = [sys.executable, "-m", "howdah", *words]
        shell = f"cd {WORK}; exec {shlex.join(command)}"
        env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **env}
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


def both(process, *words):
    """The lines with these words, in any order."""
    found = {}
    for line in process.stdout:
        found |= {one: line for one in words if one in line}
        if len(found) == len(words):
            return found
    raise AssertionError(f"it never said all of {words}: {found}")


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_servers_and_workers_on_hosts_of_their_own(box, how):
    with ExitStack() as stack, box("flat-1g", 4) as cluster:
        hosts = Hosts(cluster, stack)
        train = hosts.start(0, "train", "--listen", "host0:29400")
        until(train, "listening at")
        for host in (1, 2):
            hosts.start(host, "server", "--join", "host0:29400")
        until(train, "server 1 has joined")
        _, lost, _ = [hosts.start(h, "worker", "--join", "host0:29400") for h in (1, 2, 3)]
        until(train, "step: ")
        cluster.ip(3, "link set eth0 down")
        time.sleep(0.5)
        cluster.ip(3, "link set eth0 up")
        for host in range(3):
            near = f"10.77.0.{host + 1} lladdr 02:77:00:00:00:{host + 1:02x}"
            cluster.ip(3, f"neigh replace {near} nud permanent dev eth0")
        until(train, "step: ")
        hosts.kill(2) if how == "killed" else cluster.unplug(2)
        told = both(train, "has taken its place", "another may take its place")
        dead = int(re.search(r"server (\d)", told["has taken its place"])[1])
        hosts.start(0, "worker", "--join", "host0:29400")
        rest = train.stdout.read()
        assert train.wait() == 0, rest
        assert "step: 80" in rest and "held-out at step 80" in rest
        if how == "cut off":  # who is left alone ends with a sentence, too
            assert lost.wait() == 1
            said = lost.stdout.read().strip()
            assert said.splitlines()[-1].startswith("howdah: the run has ended: ")
            assert "Traceback" not in said
        folder = cluster.file(1, WORK / "run/ledgers")
        for shard in (dead, 1 - dead):
            events = read_ledger(folder / f"server-{shard}-from-0")
            assert twice(events) == []
            done = [event.update for event in events if event.kind == "push"]
            made = {(one.worker, one.key, one.clock) for one in done}
            assert made == {*product(range(3), range(4), range(80))}  # of the lost worker, too


def test_servers_by_collectives_are_exact_between_hosts(box, modules):
    """The lecture's form: pushes are reduces to a server, pulls are broadcasts from it."""
    (prove,) = modules("prove")
    with ExitStack() as stack, box("flat-1g", 3) as cluster:
        hosts = Hosts(cluster, stack)
        runs = [
            hosts.howdah(host, prove.seat(host, 3), "verify", "small.toml", "layout=dp2 server1")
            for host in range(3)
        ]
        said = [run.communicate()[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0, 0], said
        assert "\ndp2 server1" in said[0] and "NOT" not in said[0]
        assert said[0].splitlines()[-1].startswith("equal: bytes sent and held, bits of all ranks")
        assert not said[1] and not said[2], "rank 0 tells"
