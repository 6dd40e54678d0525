"""The settings of a run over time: what has changed since it was started, and the record of it.

A run folder is resumed by any recipe that names it. Where it runs, how often it saves, and how long
it lasts may change at any time. What changes the result (method, data, global batch, seed, initial
weights) is not changed by accident: `howdah train RECIPE` refuses it, unless `--resume` is given or
the run folder itself is named as the recipe.

RUN/history.jsonl has a line for each start: the step it went on from, the changed settings, the
versions, the machine and the command.
"""

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from howdah.base.errors import UserError, named, several, shown
from howdah.config.recipe import Run, load_run
from howdah.optim.learning_rate import learning_rate

HISTORY = "history.jsonl"

Changes = dict[str, tuple[Any, Any]]  # by dotted key: the value before, and now

FREE = {  # keys that change no result, but how and where a run is computed, and what it tells
    *("name", "folder", "layout", "schedule", "device", "threads", "compile"),
    *("batch.micro_batch", "train.prompt", "train.export", "train.keep_last"),
    *("train.steps", "train.tokens", "train.epochs"),
    *("train.log_every", "train.evaluate_every", "train.evaluate_samples", "train.save_every"),
}


def changes(before: Run, after: Run) -> Changes:
    """The settings that differ."""
    old, new = dict(_flat(asdict(before))), dict(_flat(asdict(after)))
    keys = [*old, *(key for key in new if key not in old)]
    return {
        key: (old.get(key), new.get(key)) for key in keys if str(old.get(key)) != str(new.get(key))
    }


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield path + name, value


def changes_since(folder: Path, now: Run) -> Changes:
    """The settings of a run folder that differ from those of `now`; none if it cannot be read."""
    try:
        return changes(load_run(folder), now)
    except UserError:
        return {}


def refuse_accident(found: Changes, folder: Path) -> None:
    """Raises UserError if settings that change the result are among the changes."""
    told = [
        f"{key} was {shown(_plain(old))} and is {shown(_plain(new))}"
        for key, (old, new) in found.items()
        if key not in FREE
    ]
    if told:
        raise UserError(
            f"{folder} has a run with other settings: {several(told)}; go on with it by --resume, "
            "or start another run with folder=PATH"
        )


def refuse_other_start(found: Changes, folder: Path) -> None:
    """Raises UserError if a run that has begun is given other initial weights."""
    old, new = found.get("init_from", (None, None))
    if new is not None:
        begun = named(old or "random weights")
        raise UserError(
            f"init_from is {named(new)}, but {folder} has begun from {begun}; start another run "
            "with folder=PATH"
        )


def rate_note(found: Changes, now: Run, step: int) -> str:
    """What changed settings do to the learning rate at `step`; empty if nothing."""
    start, steps = "method.lr.", found.get("train.steps", (now.train.steps, 0))[0]
    before = {k.removeprefix(start): old for k, (old, _) in found.items() if k.startswith(start)}
    if not step or not (before or "train.steps" in found):
        return ""
    was = learning_rate(replace(now.method.lr, **before), step=step, steps=max(steps, step + 1))
    new = learning_rate(now.method.lr, step=step, steps=max(now.train.steps, step + 1))
    if abs(new - was) <= 0.01 * was:
        return ""
    both = f"{now.train.steps:,} steps now, instead of {steps:,}"
    spans = f"the learning rate's schedule spans {both}"
    keep = (
        f"; to keep that, add method.lr.schedule=constant method.lr.peak={was:.3g} "
        "method.lr.warmup_steps=0"
    )
    if before:  # which is what was asked for
        spans, keep = "the learning rate has changed", ""
    return f"{spans}: step {step + 1:,} has {new:.3g} where it had {was:.3g}{keep}"


def refuse_in_vain(found: Changes, folder: Path, *, done: int, steps: int) -> None:
    """Raises UserError if settings of training have changed and no step is left to use them."""
    changed = [key for key in found if key not in FREE]
    if changed and done >= steps:
        raise UserError(
            f"{folder} has no step left, {done:,} of {steps:,} are done, and "
            f"{', '.join(changed)} would change nothing; raise train.steps too"
        )


def remember(folder: Path, step: int, found: Changes) -> None:
    """Appends a line to the history of a run. What cannot be written is left out."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "changed": {key: [_plain(old), _plain(new)] for key, (old, new) in found.items()},
        "command": sys.argv,
        "host": platform.node(),
        "versions": {name: version(name) for name in ("howdah", "torch")}
        | {"python": platform.python_version()},
    }
    try:
        with (folder / HISTORY).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError:
        return


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
