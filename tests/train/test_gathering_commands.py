"""`howdah train --listen` and those who join it, as commands of their own."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

from howdah.server.ledger import read_ledger, twice

SECRET = bytes(range(32))
SERVED = (
    *("layout=server2", "method.grad_clip=0.0", "batch.global_batch=2", "batch.micro_batch=1"),
    *("method.precision=float64", "train.log_every=1", "method.lr.schedule=inverse_sqrt"),
)
BSP = 'method.sync={kind = "bsp", workers = 2}'


@contextmanager
def commands(recipe, tmp_path, *changes):
    """Starts `howdah ROLE RECIPE ...`, each with a run folder of its own, and ends what is left."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    env = {**os.environ, "HOWDAH_SECRET_FILE": str(secret), "OMP_NUM_THREADS": "1"}
    started = []

    def start(name, role, *words, secret=True):
        command = [sys.executable, "-m", "howdah", role, str(recipe), *changes, *words]
        folder = f"folder={tmp_path / name}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        given = env if secret else {k: v for k, v in env.items() if k != "HOWDAH_SECRET_FILE"}
        started.append(subprocess.Popen([*command, folder], env=given, **pipes))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()


def until(process, words):
    """Reads what a process says up to a line with these words, which is returned."""
    for line in process.stdout:
        if words in line:
            return line
    raise AssertionError(f"it never said: {words}")


@pytest.mark.slow
def test_commands_that_join_survive_a_killed_worker_and_a_killed_server(recipe, tmp_path):
    """kill -9 of a worker, and then of a server whose replica takes its place. What another worker
    has not done again of the first one's steps is done by the one that joins.
    """
    sync = 'method.sync={kind = "asp", workers = 2, replicas = 1}'
    steps = 240  # some seconds, so that those who are killed are killed before the end
    changes = (*SERVED, sync, f"train.steps={steps}", "train.log_every=1")
    with commands(recipe, tmp_path, *changes) as start:
        train = start("run", "train", "--listen", "127.0.0.1:0")
        at = until(train, "listening at").split("listening at ")[1].split(":")
        at = f"127.0.0.1:{at[1]}"
        servers = [start(f"s{n}", "server", "--join", at) for n in range(2)]
        until(train, "server 1 has joined")
        first = start("w0", "worker", "--join", at)
        until(train, "worker 0 has joined")  # under asp it begins alone
        start("w1", "worker", "--join", at)
        until(train, "step: ")
        first.kill()
        left = until(train, "has left")
        assert "worker 0 has left" in left and "another may take its place" in left
        start("w2", "worker", "--join", at)
        until(train, "worker 0 has joined")
        until(train, "step: ")
        servers[0].kill()
        told = until(train, "has taken its place")
        number = int(re.search(r"server (\d) has ended", told)[1])
        rest = train.communicate()[0]
        assert train.returncode == 0, rest
        assert f"step: {steps}" in rest and f"held-out at step {steps}" in rest
        assert servers[1].wait(60) == 0
    (path,) = (tmp_path / "s1" / "ledgers").glob(f"server-{number}-from-0")
    others = (tmp_path / "s1" / "ledgers").glob(f"server-{1 - number}-from-0")
    for ledger in (path, *others):
        events = read_ledger(ledger)
        assert twice(events) == []
        pushes = {event.update[::2] for event in events if event.kind == "push"}
        assert {one[:1] for one in pushes} == {(0,), (1,)}
        done = [e.update for e in events if e.kind == "push"]
        keys = {one.key for one in done}
        assert len(done) == 2 * steps * len(keys)  # every update of every step, once


@pytest.mark.slow
def test_what_cannot_be_joined_is_told(recipe, tmp_path):
    alone = ("--join", "127.0.0.1:1", *SERVED, BSP)
    with commands(recipe, tmp_path) as start:
        wrong = [
            (start("a", "worker", "--join", "node1", *SERVED, BSP), "--join is 'node1', and an"),
            (start("b", "worker", "--join", "node1:1", *SERVED), "this one has no method.sync"),
            (start("c", "server"), "--join HOST:PORT says where howdah train --listen runs"),
            (start("d", "worker", *alone, secret=False), "machines join by a secret: write it on"),
            (start("e", "server", *alone, secret=False), "machines join by a secret: write it on"),
            (start("f", "train", "--listen", *alone[1:], secret=False), "join by a secret: write"),
        ]
        for process, words in wrong:
            said, _ = process.communicate()
            assert process.returncode == 2 and words in said, said
