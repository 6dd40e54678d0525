"""From the files of all ranks to one checkpoint: what the first rank of a site does after writing
its own file.

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

Where machines do not share the folder, the first rank of each does this in its own, and the index,
which names the files of all, goes over the board (`sites.py`):

    rank 2 of another site           rank 0
    1. wait for its done-files       1. wait for its done-files
    post the parts          ------>  2. merge all
    3. and 4., in its folder <------ post the index, 3. and 4.
    post "stands"           ------>  wait for all
    remove what is older    <------  post "all", remove what is older
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar

from howdah.base.atomic import sync_folder, write_text
from howdah.base.errors import UserError
from howdah.checkpoint.folders import INDEX, draft_folder, rank_file, remove, step_folder
from howdah.checkpoint.index import Index, decode, encode, merge
from howdah.checkpoint.sites import Board, Team

POLL = 0.02  # seconds between two looks
Found = TypeVar("Found")


@dataclass
class Patience:
    """What ends a wait for other ranks, besides what it waits for.

    deadline   most seconds of all waits together
    cancelled  ends them when it is set
    mine       files that this rank has written. If one is gone, the folder was removed, and with it
               perhaps what another rank believes to have written: there is nothing to wait for.
    """

    deadline: float
    cancelled: Event
    mine: Sequence[Path] = ()
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.deadline

    def hear(self, ranks: Iterable[int], look: Callable[[int], Found | None]) -> dict[int, Found]:
        """What `look` finds for each of `ranks`, once it does for all. Raises UserError."""
        found: dict[int, Found] = {}
        missing = [*ranks]
        while True:
            over = self.cancelled.is_set()  # read before the files: a reason is on disk by then
            found |= {rank: part for rank in missing if (part := look(rank)) is not None}
            missing = [rank for rank in missing if rank not in found]
            if not missing:
                return found
            if over:
                raise UserError(f"rank {missing[0]} could not write its part, nor say why")
            if gone := [path for path in self.mine if not path.exists()]:
                raise UserError(f"{gone[0]} was removed before the checkpoint was complete")
            if time.monotonic() > self._end:
                late = f"rank {missing[0]} had not written its part"
                raise UserError(f"{late} after {self.deadline:g} s")
            self.cancelled.wait(POLL)


def publish(folder: Path, own: Index, team: Team, *, deadline: float, cancelled: Event) -> None:
    """Wait until all ranks have written their files, and make them one checkpoint.

    folder     RUN/checkpoints
    own        the index of this rank's file
    team       the ranks; this one is the first of its site
    deadline   most seconds to wait for the other ranks
    cancelled  ends the wait when it is set

    Raises UserError when a rank failed, is not done in time or when `cancelled` is set, or wrote
    inconsistent data; OSError when the disk fails.
    """
    draft = draft_folder(folder, own.step)
    patience = Patience(deadline, cancelled, [draft / file.name for file in own.files])
    beside = [rank for rank in team.here if rank != team.rank]
    parts = {team.rank: own} | patience.hear(beside, partial(_part, draft))  # 1
    if team.board is None:
        _make_whole(folder, merge([*parts.values()]), parts)
    else:
        _publish_apart(folder, parts, team, team.board, patience)


def _publish_apart(
    folder: Path, parts: dict[int, Index], team: Team, board: Board, patience: Patience
) -> None:
    """Publishes the checkpoint on one site of several, of whose ranks there are the `parts`."""

    def look(name: str, rank: int) -> str | None:
        leader = team.sites[rank]
        if (why := board.look(f"failed/{leader}")) is not None:
            raise UserError(f"the host of rank {leader} could not save: {why}")
        return board.look(name)

    def read(name: str, rank: int) -> Index | None:
        said = look(name.format(rank), rank)
        return None if said is None else decode(said.encode(), f"the index of rank {rank}")

    if team.rank:
        for rank, part in parts.items():
            board.post(f"part/{rank}", encode(part))
        index = patience.hear([0], partial(read, "index"))[0]
    else:
        every = parts | patience.hear(team.away, partial(read, "part/{}"))
        index = merge([every[rank] for rank in sorted(every)])  # 2
        board.post("index", encode(index))
    _make_whole(folder, index, parts)
    patience.mine = ()
    if team.rank:
        board.post(f"stands/{team.rank}", "")
        patience.hear([0], partial(look, "all"))
    else:
        patience.hear(team.leaders[1:], lambda rank: look(f"stands/{rank}", rank))
        board.post("all", "")


def _make_whole(folder: Path, index: Index, parts: dict[int, Index]) -> None:
    """Gives a draft, in which there are the files of `parts`, its index and its name."""
    draft, final = draft_folder(folder, index.step), step_folder(folder, index.step)
    for file in (file for part in parts.values() for file in part.files):
        size = (draft / file.name).stat().st_size
        if size != file.bytes:
            raise UserError(f"{draft / file.name} has {size} bytes instead of {file.bytes}")
    write_text(draft / INDEX, encode(index))  # 3
    if final.exists():  # it is damaged; a sound checkpoint is not saved again
        remove(final)
    draft.rename(final)  # 4
    sync_folder(folder)
    for rank in [*parts][1:]:
        (final / rank_file(rank, "done")).unlink()


def _part(draft: Path, rank: int) -> Index | None:
    failed = draft / rank_file(rank, "failed")
    if failed.exists():
        raise UserError(f"rank {rank} could not write: {failed.read_text() or 'no reason given'}")
    done = draft / rank_file(rank, "done")
    return decode(done.read_bytes(), str(done)) if done.exists() else None
