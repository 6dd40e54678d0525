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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from howdah.base.errors import UserError

TOKENIZER = "tokenizer.json"
EXPORT = "export"


def make_run_folder(folder: Path) -> None:
    """Creates the run folder. Raises UserError when it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / "lock"
        probe.touch()
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {folder}: {error.strerror}; give another with folder=PATH"
        ) from error


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Holds the run folder's lock during the block. Raises UserError when another live run holds
    it.
    """
    make_run_folder(folder)
    with (folder / "lock").open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another live run is writing {folder}; wait for it, or give another folder "
                "with folder=PATH"
            ) from None
        yield
