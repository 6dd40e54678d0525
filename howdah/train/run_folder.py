"""A run folder, and the lock that keeps a second live run out of it.

RUN/run.toml          the resolved run
    layout.txt        with layout=auto: what was found, and why
    history.jsonl     a line for each start: what has changed, versions, machine, command
    tokenizer.json    the tokenizer of its tokens
    chat.json         of conversations, the tokenizer's chat template and special tokens
    log.txt           every line that was said, from the start on
    metrics.jsonl     one object per logged step and evaluation
    tensorboard/      the same values for TensorBoard
    checkpoints/      step-00000100/ ...
    trace/            rank-0.json ...: what each rank did in its last steps
    export/           a Hugging Face folder, when asked for
    lock              held by rank 0 while it lives; the kernel releases it when the process dies
    server-abcdefgh/  of a server that has joined from here, while it lives: what it gets and sends
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import IO

from howdah.base.errors import UserError, named
from howdah.base.files import kind_of, no_file
from howdah.checkpoint.folders import clean
from howdah.host.facts import nearest_there
from howdah.plan.trace_file import FOLDER
from howdah.text.sources import Data, on_disk, texts
from howdah.text.template import CHAT

TOKENIZER = "tokenizer.json"
EXPORT = "export"
LOCK = "lock"
SERVER = "server-"
CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
LAYOUT, LOG = "layout.txt", "log.txt"
ANOTHER = "give another with folder=PATH"
BEFORE_STEPS = {
    *("run.toml", LAYOUT, "history.jsonl", TOKENIZER, CHAT, LOG, METRICS, "tensorboard", LOCK)
}


@dataclass(frozen=True)
class Found:
    """What a start finds where its run folder is to be.

    made   folders that were not there, innermost first
    names  names in the run folder, without a lock that this start has made
    """

    folder: Path
    made: list[Path]
    names: frozenset[str]


def make_run_folder(folder: Path) -> list[Path]:
    """Creates the run folder; returns the folders that were not there before, innermost first.

    Raises UserError when it cannot be written.
    """
    if problem := _no_folder(folder):
        raise UserError(problem)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as error:
        raise _unwritable(folder, error) from error
    if problem := no_file(folder / LOCK):
        raise UserError(f"{folder / LOCK} {problem}; remove it, for runs lock a file of this name")
    return made


def folder_problems(folder: Path, data: Data) -> Iterator[str]:
    """Yields why a run with this text cannot have its folder there. A folder is made and removed in
    the nearest one that is there.
    """
    if problem := _no_folder(folder):
        yield problem
        return
    try:
        Path(mkdtemp(prefix=".howdah-", dir=nearest_there(folder))).rmdir()
    except OSError as error:
        yield str(_unwritable(folder, error))
    for above in folder.absolute().parents:
        if kind_of(above / CHECKPOINTS) == "folder" and kind_of(above / LOCK) == "file":
            yield f"the run folder {folder} is in that of another run, {above}; {ANOTHER}"
            break
    for key, text in texts(data):
        if on_disk(text) and _real(folder).is_relative_to(_real(Path(text.path))):
            yield (
                f"the run folder {folder} is in the text of {key}, {named(text.path)}, which would "
                f"change with what the run writes; {ANOTHER}"
            )


def _real(path: Path) -> Path:
    """The path without links; of one that leads in a circle what there is (`resolve` raises)."""
    return Path(os.path.realpath(path))


def _no_folder(folder: Path) -> str:
    """Why what is there can be no run folder; empty: it is one, or can be made."""
    kind = kind_of(folder)
    if kind in ("folder", "does not exist"):
        return ""
    return f"the run folder {folder} {'is a file' if kind == 'file' else kind}; {ANOTHER}"


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot write the run folder {folder}: {error.strerror}; {ANOTHER}")


def _remove_empty(folder: Path, made: list[Path]) -> None:
    """Removes the lock of a folder that holds nothing else, and the folders `made` for it."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            for path in made:
                path.rmdir()


@contextmanager
def lock(folder: Path) -> Iterator[Found]:
    """Holds the run folder's lock during the block. Raises UserError when another live run holds
    it. A block that fails before it has written anything leaves no folder behind.
    """
    locked_before = (folder / LOCK).exists()
    made = make_run_folder(folder)
    with (folder / LOCK).open("r+") as file:
        if not _locked(file, folder / LOCK):
            raise UserError(
                f"another live run is writing {folder}; wait for it, or give another folder "
                "with folder=PATH"
            )
        try:
            names = {path.name for path in folder.iterdir()}
            yield Found(folder, made, frozenset(names if locked_before else names - {LOCK}))
        except BaseException:
            _remove_empty(folder, made)
            raise


@contextmanager
def server_folder(folder: Path) -> Iterator[Path]:
    """A folder in the run folder, for a server, during the block. Removes those of servers that
    were killed: nobody holds their locks. Raises UserError when it cannot be written.
    """
    with ExitStack() as during:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _held(folder):  # between the making of a folder and its lock nobody looks
                for path in folder.glob(f"{SERVER}*"):
                    with suppress(OSError), _held(path, fcntl.LOCK_NB):
                        shutil.rmtree(path)
                made = Path(during.enter_context(TemporaryDirectory(prefix=SERVER, dir=folder)))
                during.enter_context(_held(made))
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield made


@contextmanager
def _held(folder: Path, how: int = 0) -> Iterator[None]:
    """Holds the lock of a folder itself. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(opened)


def clean_run(run: Path) -> None:
    """Removes the drafts of checkpoints and traces in a run folder, to which nobody writes."""
    clean(run / CHECKPOINTS)
    for draft in (run / FOLDER).glob("*.new"):
        draft.unlink(missing_ok=True)


def remove_start(found: Found) -> None:
    """Removes what a start has written to its run folder, if nothing was logged or saved since, and
    the folders that it made. What was `found` there stays, and so does the folder of a live run.
    """
    folder, metrics = found.folder, found.folder / METRICS
    unused = kind_of(folder / CHECKPOINTS) == "does not exist" and kind_of(folder) == "folder"
    if not unused or (kind_of(metrics) == "file" and metrics.stat().st_size):
        return
    with suppress(UserError, OSError), lock(folder):
        for path in folder.iterdir():
            if path.name in BEFORE_STEPS - found.names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in found.made:
            path.rmdir()


def _locked(file: IO[str], path: Path) -> bool:
    """Takes the lock of an open file; false if another run has it, or has removed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
