"""Real disks that are full: a small one of memory, which root may mount, and a system's device.

`/dev/full` needs no root. Every write to it says that there is no space; it can stand in the place
of a file, by a link, but not of a folder.
"""

import os
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

FULL = Path("/dev/full")


@contextmanager
def small_disk(folder, size):
    """Mounts a disk of `size` bytes at `folder`; skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("this root may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(disk):
    """Takes all space there is; returns the file to remove to have it back."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler
