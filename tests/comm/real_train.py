"""`howdah train` as a person starts it: in a session of its own, on a recipe and a cache."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CC")
TRAIN = [sys.executable, "-m", "howdah", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENDLESS = ["train.steps=1000000", "method.lr.schedule=constant"]
GUARD = 600  # seconds that nothing takes


def shell(cache, **more):
    """The environment of a person's shell: no launcher in it, and the tests' token cache."""
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return {**plain, "HOWDAH_CACHE": str(cache.parent), "OMP_NUM_THREADS": "1", **more}


def ended(words, environment):
    """A command that ends by itself: (exit code, standard output, standard error)."""
    done = subprocess.run(
        [*map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=GUARD,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def living():
    """(process, parent, session) of all live processes."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                yield int(path.name), int(fields[1]), int(fields[3])


def members(session):
    """The live processes of a session."""
    return [pid for pid, _, of in living() if of == session]


def children(parent):
    """The live processes that a process has started."""
    return [pid for pid, up, _ in living() if up == parent]


@contextmanager
def started(words, environment, folder):
    """A command in a session of its own, and where what it says is written. Whatever happens,
    nothing of the session lives on.
    """
    out = folder / "out"
    with out.open("w") as to:
        process = subprocess.Popen(
            [*map(str, words)], stdout=to, stderr=to, env=environment, start_new_session=True
        )
    try:
        yield process, out
    finally:
        for pid in members(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def wait_for(text, process, out, *, after=""):
    """Returns when the process has said the text, after another one."""
    until = time.monotonic() + GUARD
    while text not in (said := out.read_text())[max(said.find(after), 0) :] or after not in said:
        assert process.poll() is None and time.monotonic() < until, said
        time.sleep(0.01)


@contextmanager
def training(words, environment, folder):
    """The processes of a run that has taken three steps, and trains while the block runs."""
    with started(words, environment, folder) as (process, out):
        wait_for("\nstep:  3 ", process, out)
        yield members(process.pid)
        assert process.poll() is None, out.read_text()
