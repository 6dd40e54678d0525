"""From the files of all ranks to one checkpoint: what rank 0 does after writing its own file.

    rank 1                           rank 0
    write rank-00001.safetensors     write rank-00000.safetensors
    write rank-00001.done   ------>  1. wait for every done-file
                                     2. merge them, compare the sizes of the files
                                     3. write index.json
                                     4. rename step-00000100.tmp to step-00000100,
                                        remove the done-files

The ranks synchronise through the file system alone. A background thread must not run collectives,
because training runs its own at the same time and the two could be matched with each other. A rank
that cannot write creates a `failed` file with the reason, so that rank 0 does not wait for it.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event

from howdah.base.atomic import sync_folder, write_text
from howdah.base.errors import UserError
from howdah.checkpoint.folders import INDEX, draft_folder, rank_file, remove, step_folder
from howdah.checkpoint.index import Index, decode, encode, merge

POLL = 0.02  # seconds between two checks for done-files


def publish(folder: Path, own: Index, world: int, *, deadline: float, cancelled: Event) -> None:
    """Wait until all ranks have written their files, and make them one checkpoint.

    folder     RUN/checkpoints
    own        the index of rank 0's file
    world      world size
    deadline   most seconds to wait for the other ranks
    cancelled  ends the wait when it is set

    Raises UserError when a rank failed, is not done in time or when `cancelled` is set, or wrote
    inconsistent data; OSError when the disk fails.
    """
    draft = draft_folder(folder, own.step)
    mine = [draft / file.name for file in own.files]
    others = _wait(draft, range(1, world), deadline, cancelled, mine)  # 1
    index = merge([own, *others])  # 2
    for file in index.files:
        size = (draft / file.name).stat().st_size
        if size != file.bytes:
            raise UserError(f"{draft / file.name} has {size} bytes instead of {file.bytes}")
    write_text(draft / INDEX, encode(index))  # 3
    final = step_folder(folder, own.step)
    if final.exists():  # it is damaged; a sound checkpoint is not saved again
        remove(final)
    draft.rename(final)  # 4
    sync_folder(folder)
    for rank in range(1, world):
        (final / rank_file(rank, "done")).unlink()


def _wait(
    draft: Path, ranks: Sequence[int], deadline: float, cancelled: Event, mine: Sequence[Path]
) -> list[Index]:
    """The indices of `ranks`, once all have written their files. Raises as `publish` does.

    mine  files that this rank has written. If one is gone, the folder was removed, and with it
          perhaps what another rank believes to have written: there is nothing to wait for.
    """
    end = time.monotonic() + deadline
    parts: dict[int, Index] = {}
    while True:
        over = cancelled.is_set()  # read before the files: a rank's reason is on disk by then
        for rank in ranks:
            if rank not in parts and (part := _part(draft, rank)):
                parts[rank] = part
        missing = [rank for rank in ranks if rank not in parts]
        if not missing:
            return [parts[rank] for rank in ranks]
        if over:
            raise UserError(f"rank {missing[0]} could not write its part, nor say why")
        if gone := [path for path in mine if not path.exists()]:
            raise UserError(f"{gone[0]} was removed before the checkpoint was complete")
        if time.monotonic() > end:
            raise UserError(f"rank {missing[0]} had not written its part after {deadline:g} s")
        cancelled.wait(POLL)


def _part(draft: Path, rank: int) -> Index | None:
    failed = draft / rank_file(rank, "failed")
    if failed.exists():
        raise UserError(f"rank {rank} could not write: {failed.read_text() or 'no reason given'}")
    done = draft / rank_file(rank, "done")
    return decode(done.read_bytes(), str(done)) if done.exists() else None
