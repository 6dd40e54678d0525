"""The folder of a run's checkpoints: names of its files, listing, and removal.

    checkpoints/
      step-00000100/        complete: it got this name by one rename
        index.json
        rank-00000.safetensors
        rank-00001.safetensors
      step-00000200.tmp/    being written, or left behind by a process that died
      best.json             {"step": 100}

A folder whose name ends in `.tmp` and that no rank is writing can be deleted. A checkpoint is
renamed to such a name before it is removed, so a crash halfway never leaves a checkpoint with
missing files.
"""

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from howdah.base.atomic import sync_folder, write_text
from howdah.base.errors import UserError
from howdah.base.files import kind_of, parse_json, read_file
from howdah.checkpoint.fields import table, whole
from howdah.checkpoint.index import MOST_STEPS

INDEX = "index.json"
BEST = "best.json"


def step_folder(folder: Path, step: int) -> Path:
    """The path of the complete checkpoint of `step`."""
    return folder / f"step-{step:08d}"


def draft_folder(folder: Path, step: int) -> Path:
    """The path at which the checkpoint of `step` is written, until it is complete."""
    return folder / f"step-{step:08d}.tmp"


def rank_file(rank: int, ending: str) -> str:
    """The name of a rank's file; `ending` is `safetensors`, or `done` or `failed` during a save."""
    return f"rank-{rank:05d}.{ending}"


def step_of(path: Path) -> int | None:
    """The step in the name of a complete checkpoint; None for any other name."""
    number = re.fullmatch(r"step-([0-9]{8,12})", path.name)
    step = int(number[1]) if number else -1
    return step if path.name == step_folder(path.parent, step).name else None


def numbered(folder: Path) -> list[int]:
    """The steps of all folders that are named like a complete checkpoint, ascending.

    Raises UserError where they may not be seen.
    """
    if kind_of(folder) != "folder":
        return []
    try:
        paths = [*folder.iterdir()]
    except PermissionError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}; make it readable") from error
    return sorted(step for path in paths if (step := step_of(path)) is not None)


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in `folder` that have an index, ascending."""
    return [s for s in numbered(folder) if kind_of(step_folder(folder, s) / INDEX) == "file"]


def best_step(folder: Path) -> int | None:
    """The step that is marked as best, or None. Raises UserError when best.json is damaged."""
    path = folder / BEST
    if kind_of(path) == "does not exist":
        return None
    try:
        return whole(table(parse_json(read_file(path)), BEST), "step", MOST_STEPS)
    except (KeyError, ValueError, OSError):
        raise UserError(f'{path} is damaged; write {{"step": N}} into it, or delete it') from None


def mark_best(folder: Path, step: int) -> None:
    """Mark the checkpoint of `step` as the best so far."""
    write_text(folder / BEST, json.dumps({"step": step}) + "\n")


def remove(checkpoint: Path) -> None:
    """Remove a complete checkpoint: rename it first, then delete its files. Of one that is a link
    to another place, the link alone.
    """
    rubbish = checkpoint.with_name(checkpoint.name + ".old.tmp")
    shutil.rmtree(rubbish, ignore_errors=True)
    checkpoint.rename(rubbish)
    sync_folder(checkpoint.parent)
    if rubbish.is_symlink():
        rubbish.unlink()
    shutil.rmtree(rubbish, ignore_errors=True)


def after(folder: Path, start: int) -> set[int]:
    """The steps that a run which goes on from `start` has passed over, as it begins: damaged."""
    return {step for step in numbered(folder) if step > start}


def prune(
    folder: Path, saved: int, *, keep: int, best: Collection[int], damaged: Collection[int] = ()
) -> None:
    """Remove old checkpoints after step `saved` was written. Kept are `saved`, the `keep` newest
    steps up to `saved` that are not `damaged`, those between them, and all steps of `best`: those
    that could be the best one.

    Later steps are kept as well: they are from before the run resumed at an older checkpoint, and
    a damaged one of them must not displace the one just saved. Drafts of earlier steps are removed:
    every rank that has finished `saved` is done with them.
    """
    earlier = [step for step in numbered(folder) if step <= saved]
    whole = [step for step in earlier if step not in damaged][-keep:]
    for step in earlier:
        if step < min(whole, default=saved) and step not in best:
            remove(step_folder(folder, step))
    for path in folder.glob("step-*.tmp"):
        number = re.match(r"step-(\d+)", path.name)
        if number and int(number[1]) < saved:
            shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove the temporary files that interrupted saves have left behind.

    Rank 0 alone calls it, before any rank of the run saves.
    """
    for path in folder.glob("*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("*.part"):
        path.unlink(missing_ok=True)
