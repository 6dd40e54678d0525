"""A run folder, and the lock that keeps a second live run out of it.

RUN/run.toml          the resolved run
    history.jsonl     a line for each start: what has changed, versions, machine, command
    tokenizer.json    the tokenizer of its tokens
    log.txt           every log line
    metrics.jsonl     one object per logged step and evaluation
    tensorboard/      the same values for TensorBoard
    checkpoints/      step-00000100/ ...
    trace/            rank-0.json ...: what each rank did in its last steps
    export/           a Hugging Face folder, when asked for
    lock              held by rank 0 while it lives; the kernel releases it when the process dies
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from howdah.base.errors import UserError

TOKENIZER = "tokenizer.json"
EXPORT = "export"
LOCK = "lock"


def make_run_folder(folder: Path) -> list[Path]:
    """Creates the run folder; returns the folders that were not there before, innermost first.

    Raises UserError when it cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {folder}: {error.strerror}; give another with folder=PATH"
        ) from error
    return made


def _remove_empty(folder: Path, made: list[Path]) -> None:
    """Removes the lock of a folder that holds nothing else, and the folders `made` for it."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            for path in made:
                path.rmdir()


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Holds the run folder's lock during the block. Raises UserError when another live run holds
    it. A block that fails before it has written anything leaves no folder behind.
    """
    made = make_run_folder(folder)
    with (folder / LOCK).open("r+") as file:
        if not _locked(file, folder / LOCK):
            raise UserError(
                f"another live run is writing {folder}; wait for it, or give another folder "
                "with folder=PATH"
            )
        try:
            yield
        except BaseException:
            _remove_empty(folder, made)
            raise


def _locked(file: IO[str], path: Path) -> bool:
    """Takes the lock of an open file; false if another run has it, or has removed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
