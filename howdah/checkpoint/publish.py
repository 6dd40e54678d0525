"""From the parts of all ranks to one checkpoint: what rank 0 does after its own part.

    rank 1                           rank 0
    write rank-00001.safetensors     write rank-00000.safetensors
    write rank-00001.done   ------>  1. wait for every done-file
                                     2. merge them, compare the sizes of the files
                                     3. write index.json
                                     4. rename step-00000100.tmp to step-00000100,
                                        remove the done-files

The ranks meet in the file system alone: a thread that writes files in the background must not
make collectives, because the training that goes on beside it makes its own, and the two would
mix. A rank that cannot write says so in a `failed` file, so that nobody waits for it.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event

from howdah.base.atomic import sync_folder, write_text
from howdah.base.errors import UserError
from howdah.checkpoint.folders import INDEX, draft_folder, rank_file, remove, step_folder
from howdah.checkpoint.index import Index, decode, encode, merge

POLL = 0.02  # seconds between two looks for done-files


def publish(folder: Path, own: Index, world: int, *, deadline: float, cancelled: Event) -> None:
    """Wait until all ranks have written their parts, and make them a checkpoint.

    Raises UserError when a rank failed, is not done after `deadline` seconds or when it is
    `cancelled`, or wrote something that does not fit; OSError when the disk refuses.
    """
    draft = draft_folder(folder, own.step)
    others = _wait(draft, range(1, world), deadline, cancelled)  # 1
    index = merge([own, *others])  # 2
    for file in index.files:
        size = (draft / file.name).stat().st_size
        if size != file.bytes:
            raise UserError(f"{draft / file.name} has {size} bytes instead of {file.bytes}")
    write_text(draft / INDEX, encode(index))  # 3
    final = step_folder(folder, own.step)
    if final.exists():  # damaged, or its step would not be saved again
        remove(final)
    draft.rename(final)  # 4
    sync_folder(folder)
    for rank in range(1, world):
        (final / rank_file(rank, "done")).unlink()


def _wait(draft: Path, ranks: Sequence[int], deadline: float, cancelled: Event) -> list[Index]:
    """The parts of `ranks`, once all have written them."""
    end = time.monotonic() + deadline
    parts: dict[int, Index] = {}
    while True:
        over = cancelled.is_set()  # asked before the look: what a rank had to say stands there
        for rank in ranks:
            if rank not in parts and (part := _part(draft, rank)):
                parts[rank] = part
        missing = [rank for rank in ranks if rank not in parts]
        if not missing:
            return [parts[rank] for rank in ranks]
        if over:
            raise UserError(f"rank {missing[0]} could not write its part, nor say why")
        if time.monotonic() > end:
            raise UserError(f"rank {missing[0]} had not written its part after {deadline:g} s")
        cancelled.wait(POLL)


def _part(draft: Path, rank: int) -> Index | None:
    failed = draft / rank_file(rank, "failed")
    if failed.exists():
        raise UserError(f"rank {rank} could not write: {failed.read_text() or 'no reason given'}")
    done = draft / rank_file(rank, "done")
    return decode(done.read_bytes(), str(done)) if done.exists() else None
