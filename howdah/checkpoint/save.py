"""Saver: takes snapshots of a rank's pieces, and writes them to disk while training continues.

    training   ──────┤snapshot├────────────────┤snapshot├──────
    thread                     write, publish            write, publish

A snapshot is a copy in memory of the host (`snapshot.py`). Where there is no room for one, and
where training would wait anyway, the thread writes the tensors themselves, and `save` returns when
its file is written. The files are the same. At most one save is in flight: the next one waits for
it. When the disk is too slow, this wait is visible as time spent in `save`.

A save that fails only logs a sentence: its files are removed, older checkpoints are not touched,
and training continues. To find out whether all ranks have written, the training thread, which may
run collectives, calls `part` on every rank, then `cancel` if a rank's file is missing, then `wait`.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import torch

from howdah.base.atomic import sync_folder, write_text
from howdah.base.errors import UserError
from howdah.base.quantities import spell
from howdah.checkpoint.folders import (
    after,
    best_step,
    draft_folder,
    mark_best,
    numbered,
    prune,
    rank_file,
    step_folder,
)
from howdah.checkpoint.index import MOST_STEPS, About, File, Index, Stored, encode
from howdah.checkpoint.load import open_checkpoint
from howdah.checkpoint.publish import publish
from howdah.checkpoint.safefile import Spec, write
from howdah.checkpoint.sites import Team, one_site
from howdah.checkpoint.snapshot import Entry, Snapshot, Snapshots


class Saver:
    """Saves one rank's pieces of a run's checkpoints, in the background.

    folder     RUN/checkpoints, shared by all ranks; made when it is missing
    rank       this process's rank
    world      world size
    keep       number of checkpoints to keep besides the best
    say        is called with a sentence: from the background thread, when a save fails; once, when
               there is no room for a copy
    deadline   seconds that rank 0 waits for the files of the other ranks
    snapshots  takes the copies; without it in memory of the CPU, as much as it takes

    team       where machines have folders of their own: who sees which. Without it all see `folder`
    start      the step that the run goes on from: later ones that are there now are damaged

    Rank 0 must call `folders.clean(folder)` before any rank saves. Every process must call `wait`
    after its training loop, or the last checkpoint may be missing. With several sites, all ranks
    must know that the last save has ended everywhere before the next one.
    """

    def __init__(  # noqa: PLR0913 (facts that have nothing in common, all by keyword)
        self,
        folder: Path,
        *,
        rank: int,
        world: int,
        keep: int,
        say: Callable[[str], None],
        deadline: float = 600.0,
        snapshots: Snapshots | None = None,
        team: Team | None = None,
        start: int = MOST_STEPS,
    ) -> None:
        if keep < 1:
            raise UserError(f"keep = {keep} would remove every checkpoint; keep at least 1")
        self.folder, self.rank, self.world = folder, rank, world
        self._keep, self._say, self._deadline = keep, say, deadline
        self._snapshots, self._team = snapshots or Snapshots(), team or one_site(rank, world)
        self._damaged = after(folder, start)
        self._thread: Thread | None = None
        self._saved: int | None = None  # the last step that this rank has written
        self._unmarked: int | None = None  # the best step, while best.json cannot be written
        self._suspects: set[int] | None = None  # one of them is the best; best.json is damaged
        self._said: set[str] = set()  # why tidying up has failed so far
        self._crowded = False  # whether there was no room for a copy, and that was said
        self._failed: str | None = None
        self._written, self._cancelled = Event(), Event()
        self._part = True  # whether this rank's file of the last save is on disk
        self._defect: Exception | None = None

    @property
    def failed(self) -> str | None:
        """Why the last finished save failed, or None. On ranks other than 0, this is about the
        rank's own file.
        """
        return self._failed

    def save(
        self,
        *,
        step: int,
        entries: Iterable[Entry],
        about: About,
        best: bool = False,
        beside: bool = True,
    ) -> None:
        """Write the tensors in the background as the checkpoint of `step`. When this returns, the
        tensors may change; on a GPU behind `Snapshots.settle`.

        entries  (kind such as "weight" or "exp_avg", piece, its elements as a 1-D tensor on any
                 device)
        about    facts of the run, equal on all ranks; the `meta` of rank 0 is stored
        best     whether rank 0 marks this checkpoint as the best
        beside   return when they are copied, if there is room; otherwise when this rank's file is
                 written, or has failed

        Every rank must save the same steps. A step that is already on disk, complete and
        undamaged, is not written again.
        """
        self.wait()
        # `meta` is copied too. A value that JSON cannot hold raises here, in the caller's thread.
        about = replace(about, meta=json.loads(json.dumps(about.meta)))
        if self._team.board:
            self._team.board.begin()
        snapshot = None if self._stands(step) else self._take([*entries], beside)
        arguments = (step, snapshot, about, best)
        # daemon: a process that exits must not wait for the file of a dead rank
        alone = self.world == 1
        self._part = False
        self._written.clear()
        self._cancelled.clear()
        thread = Thread(target=self._job, args=arguments, name="save", daemon=not alone)
        thread.start()  # raises when the system limits threads
        self._thread = thread
        if snapshot and not snapshot.apart:
            self._written.wait()

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def part(self) -> bool:
        """Waits until this rank's file of the last save is written; returns whether it is."""
        if self._thread:
            self._written.wait()
        return self._part

    def cancel(self) -> None:
        """Ends rank 0's wait for other ranks: some rank's file of the save in flight is missing."""
        self._cancelled.set()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the save in flight has ended, at most `seconds`; `failed` is the outcome.

        Raises the exception of the background thread if that was a programming error.
        """
        if self._thread:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return
            self._thread = None
        if self._defect:
            defect, self._defect = self._defect, None
            raise defect

    def _stands(self, step: int) -> bool:
        """Whether this saver has written `step`, and rank 0 has not abandoned it since.

        Looks for the done-file first: once that is gone, the checkpoint is either published, under
        its final name, or lost. Ranks of several sites, which see different files, all write again.
        """
        if self._team.board:
            return False
        done = draft_folder(self.folder, step) / rank_file(self.rank, "done")
        return self._saved == step and (done.exists() or step_folder(self.folder, step).exists())

    def _take(self, entries: list[Entry], beside: bool) -> Snapshot:
        taken, room = self._snapshots.size(entries), self._snapshots.room
        if room is None or taken <= room or not beside:
            return self._snapshots.take(entries, apart=beside)
        if not self._crowded:
            self._crowded = True
            self._say(
                "training waits while checkpoints are written: a copy would take "
                f"{spell(taken, 'bytes')} of the host's memory, {spell(room, 'bytes')} are left"
            )
        return self._snapshots.take(entries, apart=False)

    def _job(self, step: int, snapshot: Snapshot | None, about: About, best: bool) -> None:
        """Runs in the background thread and raises nothing. An exception sets `failed`; one that is
        neither an OSError nor a UserError is also kept, for `wait` to raise.
        """
        self._failed = None
        try:
            self._snapshots.enter()
            if snapshot is not None and not self._is_there(step):
                own = self._write_part(step, snapshot, about)
                self._part_stands()
                if self._team.leads:
                    deadline, cancelled = self._deadline, self._cancelled
                    publish(self.folder, own, self._team, deadline=deadline, cancelled=cancelled)
            self._saved = step
            self._part_stands()
            if self._team.leads:
                self._tidy(step, best)
        except (OSError, UserError) as error:
            self._give_up(step, _reason(error))
        except Exception as error:
            self._give_up(step, repr(error))
            self._defect = error
        finally:
            self._written.set()

    def _is_there(self, step: int) -> bool:
        """Whether a sound checkpoint of `step` is there. Ranks agree: they read the same files.
        Those of several sites do not, and ask no file.
        """
        return not self._team.board and _whole(step_folder(self.folder, step))

    def _part_stands(self) -> None:
        self._part = True
        self._written.set()

    def _write_part(self, step: int, snapshot: Snapshot, about: About) -> Index:
        draft = draft_folder(self.folder, step)
        draft.mkdir(parents=True, exist_ok=True)
        for ending in ("done", "failed"):  # of an earlier attempt at this step
            (draft / rank_file(self.rank, ending)).unlink(missing_ok=True)
        snapshot.wait()
        path = draft / rank_file(self.rank, "safetensors")
        own = write_part(path, step, snapshot.entries, about=about, host=self._team.host)
        if not self._team.leads:
            write_text(draft / rank_file(self.rank, "done"), encode(own))
        return own

    def _tidy(self, step: int, best: bool) -> None:
        """Mark the best and remove old checkpoints. An error is logged once: the checkpoint is
        valid. Without a mark, old checkpoints are removed all the same, or the disk would fill up.
        """
        if best:
            self._unmarked = step
        with self._tidying(step):
            if self._unmarked is not None:
                mark_best(self.folder, self._unmarked)
                self._unmarked = None
        with self._tidying(step):
            self._damaged.discard(step)  # it has been replaced
            best_of, damaged = self._could_be_best(), self._damaged
            prune(self.folder, step, keep=self._keep, best=best_of, damaged=damaged)

    @contextmanager
    def _tidying(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, UserError) as error:
            if (reason := _reason(error)) not in self._said:
                self._said.add(reason)
                self._say(f"step {step} is saved, but tidying up after it failed: {reason}")

    def _could_be_best(self) -> set[int]:
        """The steps that must stay because one of them is the best checkpoint.

        best.json protects one checkpoint, which may be far older than the newest ones. If it is
        damaged, any checkpoint that is there can be the one that it named, so all of them stay. A
        later one cannot: if it had been the best, this saver would have marked it, and best.json
        would be whole again. So later ones are removed as usual, and the number of checkpoints
        stays bounded. The next best is better than all of them and releases them; so does a user
        who repairs the file. A best that could not be marked stays until it can.
        """
        stay = set() if self._unmarked is None else {self._unmarked}
        try:
            named = best_step(self.folder)
            self._suspects = None
        except UserError as error:
            if self._suspects is None:
                self._suspects = set(numbered(self.folder))
                there = ", ".join(map(str, sorted(self._suspects)))
                self._say(f"{error}; until then checkpoints stay of which one may be best: {there}")
            return stay or self._suspects
        return stay if named is None else stay | {named}

    def _give_up(self, step: int, reason: str) -> None:
        draft = draft_folder(self.folder, step)
        if self._team.leads:
            shutil.rmtree(draft, ignore_errors=True)
            if self._team.board:
                with suppress(UserError):
                    self._team.board.post(f"failed/{self.rank}", reason)
        else:
            _tell(draft / rank_file(self.rank, "failed"), reason)
        self._failed = reason
        self._say(
            f"the checkpoint of step {step} was not saved: {reason}; older ones are untouched"
        )


def write_part(
    path: Path, step: int, entries: Mapping[str, Entry], *, about: About, host: str = ""
) -> Index:
    """Write one rank's pieces, by the names of their entries, to `path`; returns the index of that
    file alone. `host` is the machine that alone has it.
    """
    specs = [Spec(name, tuple(t.shape), t.dtype) for name, (_, _, t) in entries.items()]
    written = write(path, specs, tensors=(t.cpu() for _, _, t in entries.values()))
    sync_folder(path.parent)
    stored = tuple(
        Stored(kind, piece, _spelled(tensor.dtype), path.name, name, written.crc32[name])
        for name, (kind, piece, tensor) in entries.items()
    )
    file = File(path.name, written.bytes, written.header_crc32, host)
    return Index(step, about, stored, (file,))


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _whole(checkpoint: Path) -> bool:
    """Whether the path holds a complete, undamaged checkpoint."""
    if not checkpoint.exists():
        return False
    try:
        return not open_checkpoint(checkpoint).verify()
    except UserError:
        return False


def _reason(error: OSError | UserError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error)


def _tell(path: Path, reason: str) -> None:
    """Write the reason of a failure for rank 0. On a full disk even an empty file reports it."""
    try:
        path.write_text(reason)
    except OSError:
        return
