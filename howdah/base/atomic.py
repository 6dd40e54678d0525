"""Atomic file writes: the file with a given name is either complete or does not exist.

A process can die between any two bytes, and a disk can fill up. So bytes are first written under
a temporary name:

    write NAME.part  →  fsync  →  rename to NAME  →  fsync of the folder

A rename within one folder is atomic, so a reader sees the old file or the new one. The first
fsync keeps the rename from reaching the disk before the bytes do; the second makes the name
itself durable (Pillai et al. 2014, "All File Systems Are Not Created Equal").
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new binary file that gets the name `path` when the block ends without an error.

    After an error, an older file at `path` is unchanged, and the new bytes are removed.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: after this call it is complete and durable on the disk."""
    with replacing(path) as file:
        file.write(text.encode())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the file names inside `folder` durable (fsync of the folder)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
