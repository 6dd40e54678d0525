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
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from howdah.base.errors import LONGEST, UserError, named, several
from howdah.config.recipe import Run, load_run
from howdah.config.save import plain
from howdah.plan.comm import Algorithms
from howdah.plan.storage import Storage
from howdah.text.sources import Source
from howdah.train.metrics import append

HISTORY = "history.jsonl"

FEW = 3  # items of a list that a sentence shows
USUAL = {  # of a text that is a path alone
    one.name: one.default for one in fields(Source) if one.name != "path"
}

Changes = dict[str, tuple[Any, Any]]  # by dotted key: the value before, and now

FREE = {  # keys that change no result, but how and where a run is computed, and what it tells
    *("name", "folder", "layout", "cluster", "schedule", "device", "threads", "compile"),
    *("batch.micro_batch", "train.prompt", "train.export", "train.keep_last"),
    *("train.steps", "train.tokens", "train.epochs"),
    *("train.log_every", "train.evaluate_every", "train.evaluate_samples", "train.save_every"),
    *("train.profile", "train.callbacks", "train.tracker", "train.expert_placement"),
    *("comm.sparse", "comm.wire", "comm.trust", "comm.interface"),
    *("comm.push_order", "comm.push_window", "comm.push_chunk", "comm.server_shares"),
    *("comm.tls.cert", "comm.tls.key", "comm.tls.ca"),
    *(f"comm.algorithm.{one.name}" for one in fields(Algorithms)),
    *(f"storage.{one.name}" for one in fields(Storage)),
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


def refuse_accident(found: Changes, folder: Path, *, done: int, steps: int) -> None:
    """Raises UserError if settings that change the result are among the changes.

    done   steps that the run has done
    steps  those that it has now; 0: not known yet
    """
    told = [
        "{} was {} and is {}".format(key, *map(spelled, _unshared(*both)))
        for key, both in found.items()
        if key not in FREE
    ]
    if told:
        way = "go on with it by --resume"
        if 0 < steps < done:
            told.append(f"train.steps is {steps:,}, and {done:,} are done")
            way = f"go on with it by --resume train.steps={done} or more"
        raise UserError(
            f"{folder} has a run with other settings: {several(told)}; {way}, or start another run "
            "with folder=PATH"
        )


def _unshared(old: Any, new: Any) -> tuple[Any, Any]:
    """Two values without the items that both have, where they are long lists."""
    if not (isinstance(old, tuple) and isinstance(new, tuple) and max(len(old), len(new)) > FEW):
        return old, new
    was, now = ([one for one in a if one not in b] for a, b in ((old, new), (new, old)))
    return ([..., *was], [..., *now]) if was or now else (old, new)


def spelled(value: Any) -> str:
    """A value as a recipe may spell it, in its short form, and cut where it is long.

    >>> spelled(({"path": "a.csv", "field": "text", "weight": 1.0}, {"path": "b", "weight": 2}))
    '["a.csv", {path = "b", weight = 2}]'
    """
    if value is None or value is ...:
        return "not given" if value is None else "..."
    if isinstance(value, list | tuple):
        items = [spelled(one) for one in [*value[: FEW + 1], *[...] * (len(value) > FEW + 1)]]
        return f"[{', '.join(items)}]"
    if isinstance(value, dict):
        given = {name: one for name, one in value.items() if USUAL.get(name) != one}
        rest = ", ".join(f"{name} = {spelled(one)}" for name, one in given.items())
        return spelled(value["path"]) if [*given] == ["path"] else f"{{{rest}}}"
    if isinstance(value, str | Path):
        text = str(value) if len(str(value)) <= LONGEST else f"...{str(value)[3 - LONGEST :]}"
        return json.dumps(text, ensure_ascii=not text.isprintable())
    return str(value).lower()


def refuse_other_start(found: Changes, folder: Path, *, beside: bool = False) -> None:
    """Raises UserError if a run that has begun is given other initial weights; `beside` which an
    adapter is trained they may have been moved.
    """
    old, new = found.get("init_from", (None, None))
    if new is not None and not beside:  # a base that was moved is known by its checksum
        begun = named(old or "random weights")
        raise UserError(
            f"init_from is {named(new)}, but {folder} has begun from {begun}; start another run "
            "with folder=PATH"
        )


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
        "changed": {key: plain(both) for key, both in found.items()},
        "command": sys.argv,
        "host": platform.node(),
        "versions": {name: version(name) for name in ("howdah", "torch")}
        | {"python": platform.python_version()},
    }
    with suppress(OSError):
        append(folder / HISTORY, json.dumps(line))
