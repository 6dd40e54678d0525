"""Death at any moment and disks that are full, for real: the older checkpoint is never lost.

No file of the source has this name: the promise is one that all of them make together.
"""

import os
import resource
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from sample_state import about, assert_holds, only, parts, save, silent, state

from howdah.checkpoint.folders import clean, numbered, step_folder
from howdah.checkpoint.load import newest, open_checkpoint
from howdah.checkpoint.save import Saver
from howdah.plan.boxes import whole_piece


def script(name, *args):
    """Run a function of this file in a fresh interpreter, which has no threads to fork."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    code += f"import test_crash; test_crash.{name}(*sys.argv[1:])"
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def die_at(event, folder):
    """Save step 2, pruning step 1, and be killed just before the given touch of the disk.

    In a forked child of a process without threads; returns whether the child was killed.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status)
    left = [event]

    def counted(call):
        def wrapper(*args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), 9)
            left[0] -= 1
            return call(*args, **kwargs)

        return wrapper

    zlib.crc32 = counted(zlib.crc32)  # taken before each write of data
    for name in ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    save(folder, 2, state(seed=2), world=2, keep=1, best=True)
    os._exit(0)


def deaths(folder):
    """Die at the first touch of the disk, at the second, ... until the save survives."""
    event, drafts, killed, folder = 0, 0, True, Path(folder)
    while killed:
        run = folder / f"event-{event}"
        save(run, 1, state(seed=1), world=2)
        killed = die_at(event, run)
        drafts += any(run.glob("*.tmp"))
        clean(run)
        for step in numbered(run):  # nothing looks whole that is not
            checkpoint = open_checkpoint(step_folder(run, step))
            assert checkpoint.verify() == []
            assert_holds(checkpoint, state(seed=step))
        assert {"step-00000001", "step-00000002"} & set(only(run))
        assert set(only(run)) <= {"step-00000001", "step-00000002", "best.json"}
        event += 1
    assert checkpoint.step == 2
    print(event, drafts)


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    done = script("deaths", tmp_path)
    assert done.returncode == 0, done.stderr
    events, drafts = (int(word) for word in done.stdout.split())
    assert events > 30
    assert drafts > 10  # it did die in the middle of saves


def fill(folder, limit):
    """Save more than `limit` bytes, with every file held to that size by the kernel."""
    save(Path(folder), 1, state(), best=True)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), hard))
    outgrow(Path(folder), int(limit))


def outgrow(folder, room):
    said = []
    saver = Saver(folder, rank=0, world=1, keep=1, say=said.append)
    piece = whole_piece("w", (room,))
    saver.save(step=2, entries=[("weight", piece, torch.zeros(room))], about=about())
    saver.wait()
    (sentence,) = said
    assert saver.failed in sentence
    print(said[0])
    assert only(folder) == ["best.json", "step-00000001"]
    assert_holds(newest(folder, silent), state())
    saver.save(step=3, entries=parts(state(seed=3), 1)[0], about=about())  # training goes on
    saver.wait()
    assert saver.failed is None
    assert_holds(newest(folder, silent), state(seed=3))


def test_a_file_that_may_not_grow(tmp_path):
    done = script("fill", tmp_path, 1_000_000)
    assert done.returncode == 0, done.stderr
    assert "step 2 was not saved: File too large" in done.stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk(tmp_path, capsys):
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("this root may not mount")
    try:
        save(tmp_path, 1, state(), best=True)
        outgrow(tmp_path, 1_000_000)
        assert "step 2 was not saved: No space left on device" in capsys.readouterr().out
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
