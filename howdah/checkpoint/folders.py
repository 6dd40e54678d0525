"""The folder of a run's checkpoints: names, what stands there, what may go.

    checkpoints/
      step-00000100/        whole: it got this name by one rename
        index.json
        rank-00000.safetensors
        rank-00001.safetensors
      step-00000200.tmp/    being written, or left by a process that died
      best.json             {"step": 100}

Whatever ends in `.tmp` holds nothing anyone needs. A checkpoint that is removed gets such a
name first, so that a crash halfway leaves rubbish and not a checkpoint with files missing.
"""

import json
import re
import shutil
from pathlib import Path

from howdah.base.atomic import sync_folder, write_text
from howdah.base.errors import UserError
from howdah.base.files import kind_of, parse_json, read_file
from howdah.checkpoint.fields import table, whole
from howdah.checkpoint.index import MOST_STEPS

INDEX = "index.json"
BEST = "best.json"


def step_folder(folder: Path, step: int) -> Path:
    """Where the whole checkpoint of `step` stands."""
    return folder / f"step-{step:08d}"


def draft_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written until it is whole."""
    return folder / f"step-{step:08d}.tmp"


def rank_file(rank: int, ending: str) -> str:
    """A rank's file in a checkpoint: `safetensors`, and while writing `done` or `failed`."""
    return f"rank-{rank:05d}.{ending}"


def step_of(path: Path) -> int | None:
    """The step that the name of a whole checkpoint says; None for any other name."""
    number = re.fullmatch(r"step-([0-9]{8,12})", path.name)
    step = int(number[1]) if number else -1
    return step if path.name == step_folder(path.parent, step).name else None


def numbered(folder: Path) -> list[int]:
    """The steps of all folders that are named like a whole checkpoint, ascending."""
    if kind_of(folder) != "folder":
        return []
    return sorted(step for path in folder.iterdir() if (step := step_of(path)) is not None)


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in `folder`, ascending; only those that have an index."""
    return [s for s in numbered(folder) if kind_of(step_folder(folder, s) / INDEX) == "file"]


def best_step(folder: Path) -> int | None:
    """The step that is marked as best, or None. Raises UserError when the mark is damaged."""
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
    """Remove a whole checkpoint: first its name, then its files."""
    rubbish = checkpoint.with_name(checkpoint.name + ".old.tmp")
    shutil.rmtree(rubbish, ignore_errors=True)
    checkpoint.rename(rubbish)
    sync_folder(checkpoint.parent)
    shutil.rmtree(rubbish, ignore_errors=True)


def prune(folder: Path, saved: int, *, keep: int) -> None:
    """Keep `saved`, which has just been written, the `keep` newest up to it, and the best.

    Later steps stay: they were there before a run that went back to an older checkpoint, and
    one that is damaged must not push out the one just saved. Drafts of earlier steps go: a
    rank that has finished `saved` is done with them. Raises UserError, before anything goes, where
    the mark of the best is damaged.
    """
    earlier = [step for step in numbered(folder) if step <= saved]
    stay = {*earlier[-keep:], saved, best_step(folder)}
    for step in earlier:
        if step not in stay:
            remove(step_folder(folder, step))
    for path in folder.glob("step-*.tmp"):
        number = re.match(r"step-(\d+)", path.name)
        if number and int(number[1]) < saved:
            shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what saves that died have left behind.

    For one process (rank 0), before any rank of the run saves.
    """
    for path in folder.glob("*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("*.part"):
        path.unlink(missing_ok=True)
