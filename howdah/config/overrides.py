"""KEY=VALUE of a command line; and for a value in the place of a table, or a table in the place of
a value, what to write instead.

    train=3            train is 3; it must be a table: write train.steps=3
    train.steps.x=3    train.steps.x: steps is a single value, not a table: write train.steps=3
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import reduce
from typing import Any

from howdah.base.errors import UserError, named, shown
from howdah.base.files import parse_toml
from howdah.base.tables import read_table
from howdah.config.shipped import PRESET
from howdah.config.texts import with_texts
from howdah.plan.layout import parse_layout

Table = dict[str, Any]

UNITS = ("train.tokens", "train.epochs")
MEANT = {  # by table: what to write, and the keys that a value in its place may be meant for
    "model": ("model.preset=laptop",),
    "model.rope_scaling": ("model.rope_scaling.factor=8", "factor"),
    "model.latent": (
        "model.latent={kv_rank = 64, query_rank = 0, qk_nope_size = 32, qk_rope_size = 16, "
        "v_size = 32}",
    ),
    "model.experts": ("model.experts={count = 8, top_k = 2, ffn_size = 1024}",),
    "data": ("data.sources=PATH", "sources"),
    "data.sources": ("data.sources=PATH",),
    "data.validation": ("data.validation=PATH",),
    "batch": ("batch.global_batch=32", "global_batch"),
    "method": ("method.lr.peak=1e-3", "precision", "optimizer.name", "lr.schedule"),
    "method.optimizer": ("method.optimizer.name=adamw", "name"),
    "method.lr": ("method.lr.peak=1e-3", "schedule", "peak"),
    "method.routing": ("method.routing.balance_loss=0.01", "balance_loss"),
    "method.masking": ("method.masking.share=0.15", "share"),
    "method.spans": ("method.spans.share=0.15", "share"),
    "method.sync": ('method.sync={kind = "ssp", bound = 3, workers = 4}', "kind"),
    "method.spike": ('method.spike={action = "skip", deviations = 6.0, window = 128}', "action"),
    "method.adapter": ("method.adapter.rank=8", "rank"),
    "train": ("train.steps=1000", "steps"),
    "comm": ("comm.algorithm=ring", "algorithm"),
    "comm.algorithm": ("comm.algorithm=ring",),
    "comm.tls": ('comm.tls={cert = "a.pem", key = "a.key", ca = "ca.pem"}',),
    "storage": ("storage.threads=4", "threads"),
}


def changed(table: Table, overrides: Iterable[str], kind: type) -> tuple[Table, list[str]]:
    """The table of a recipe, which is changed, and a sentence for each override that is wrong.

    kind  the dataclass that the table will be read into

    A preset comes first, because it replaces the whole [model].
    """
    problems = []
    for override in sorted(overrides, key=lambda one: not one.startswith(PRESET)):
        table = with_texts(table)
        try:
            _apply(table, override, kind)
        except UserError as problem:
            problems.append(str(problem))
    return table, problems


def _apply(table: Table, override: str, kind: type) -> None:
    """Changes one value of a table. A preset replaces the whole [model]: with sizes of the recipe
    it would be a model that nobody named. Raises UserError.
    """
    name, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"{shown(override)} changes nothing; write key=value, such as seed=1")
    try:
        read = parse_toml(f"value = {text}")
    except ValueError:
        read = {}
    value = read["value"] if len(read) == 1 else text  # a bare word is a string
    *path, last = name.split(".")
    owners = [table]
    for at, part in enumerate(path):
        inner = [owner.setdefault(part, {}) for owner in owners]
        owners = [one for item in inner for one in (item if isinstance(item, list) else [item])]
        if not all(isinstance(owner, dict) for owner in owners):
            outer = ".".join(path[: at + 1])
            instead = _single(outer, value, f"{last}{text}", inner[0], kind)
            raise UserError(f"{named(name)}: {named(part)} is a single value, not a table{instead}")
    if f"{name}=" == PRESET and isinstance(table.get("model"), dict):
        owners[0].clear()
    if name in UNITS and value == 0:  # in a recipe it means: not given
        raise UserError(f"{name} is 0; a run has at least one step")
    for owner in owners:  # of a list of tables, such as data.sources, each is changed
        owner[last] = value


def with_key(problem: str, table: Mapping[str, Any], kind: type) -> str:
    """A problem of a recipe; where a value stands in the place of a table, or a table in that of a
    value, with what to write instead.
    """
    if not (said := re.match(r"([\w.]+)(?:\[\d+\])? is .*; it must be (a table$)?", problem)):
        return problem
    name, value = said[1], reduce(_item, said[1].split("."), table)
    tries, otherwise = [], ""
    if said[2] and name in MEANT:
        example, *keys = MEANT[name]
        tries, otherwise = [(f"{name}.{key}", value) for key in keys], f": write {example}"
    elif isinstance(value, Mapping):
        tries = [(name, one) for one in value.values()]
    return problem + next((_write(*one) for one in tries if _takes(kind, *one)), otherwise)


def _item(table: object, name: str) -> Any:
    return table.get(name) if isinstance(table, Mapping) else None


def _single(name: str, value: object, word: str, now: object, kind: type) -> str:
    """What to write in place of a table `name` that is a single value: `value`, or of the layout
    the `word` that it makes; or what it is `now`.
    """
    for text in (word, str(value)) if name == "layout" else ():
        with suppress(UserError):
            return _write(name, str(parse_layout(text)))
    return _write(name, value if _takes(kind, name, value) else now)


def _write(name: str, value: object) -> str:
    spelled = str(value).lower() if isinstance(value, bool) else shown(value)
    return f": write {named(name)}={spelled}"


def _takes(kind: type, name: str, value: object) -> bool:
    """Whether the key `name` of a recipe takes a value."""
    table: Any = reduce(lambda inner, part: {part: inner}, reversed(name.split(".")), value)
    problems = read_table(kind, with_texts(table), limits=True).problems
    return not any(name in problem for problem in problems)
