"""Drafts: a plan from a model and a few options, for `howdah plan` and `howdah draw`.

A model is a recipe, a preset, or a config.json of Hugging Face (`shipped.py` says which a name is).
A preset and a config.json become a recipe that says nothing else, so that one way leads from all
three to a plan:

    recipe of the model  <-  KEY=VALUE of the command  <-  its options (--layout, --sequence ...)

An option is a short name for a key. Values that are not given follow from the model or the recipe.
Keys of data, folders and training are refused, because a plan does not depend on them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from howdah.base.errors import UserError, several
from howdah.base.files import kind_of
from howdah.config.overrides import Table, changed
from howdah.config.recipe import Run, load_run, parse_run, plan_of
from howdah.config.shipped import CONFIG, PRESET, is_here, is_recipe
from howdah.plan.batch import Batch
from howdah.plan.check import check_plan
from howdah.plan.layout import Layout, parse_layout, resolve
from howdah.plan.plan import Plan
from howdah.shapes.presets import PRESETS
from howdah.shapes.shape import ModelShape
from howdah.text.sources import Data

LONGEST = 8192  # tokens per sample at most, if not given: contexts of 131072 are for inference
OPTIONS = {  # the key of a recipe that an option sets
    "layout": "layout",
    "sequence": "data.sequence_length",
    "micro_batch": "batch.micro_batch",
    "global_batch": "batch.global_batch",
    "precision": "method.precision",
}
OF_MODEL = ("name", "model", OPTIONS["sequence"])  # keys that the numbers of a model depend on
IGNORED = (  # keys that no plan depends on
    *(f"data.{one.name}" for one in fields(Data) if one.name != "sequence_length"),
    *("device", "threads", "compile", "folder", "init_from", "seed", "train"),
)


@dataclass(frozen=True)
class Draft:
    """The options for a plan. Those that are empty or None follow from the model or the recipe.

    sequence                   tokens per sample
    micro_batch, global_batch  in samples
    keys                       changes of single keys, such as "model.layers=40"
    """

    layout: str = ""
    sequence: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    precision: str = ""
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drafted:
    """A model with its name, and its plan; None if there is neither a layout nor a cluster.

    notes  what a config.json says that a plan does not depend on
    tuned  whether the model starts from weights that were trained before
    """

    name: str
    shape: ModelShape
    sequence: int
    plan: Plan | None
    notes: tuple[str, ...] = ()
    tuned: bool = False


def draft(
    model: str | Run, wanted: Draft, *, devices: int | None, cluster: str = "NAME"
) -> Drafted:
    """The plan of `model` (a recipe, preset, config.json, or a Run) on `devices` devices.

    cluster  for error messages: the name of the cluster that has them

    A preset or config.json has no plan if neither a layout nor devices are given. Raises UserError.
    """
    changes = _changes(wanted)
    try:
        return _drafted(model, changes, devices, cluster)
    except UserError as problem:
        raise UserError(_in_options(str(problem), wanted)) from None


def run_of(model: str, wanted: Draft) -> tuple[str, Run, tuple[str, ...]]:
    """The name and the run of a model, whose layout and batch may be open, and notes on it."""
    changes = _changes(wanted)
    if is_recipe(model):
        run = load_run(Path(model), [*changes.values()])
        return run.name, run, ()
    name, table, notes = _table_of(model)
    return name, _filled(table, changes), notes


def _drafted(
    model: str | Run, changes: Mapping[str, str], devices: int | None, cluster: str
) -> Drafted:
    notes: tuple[str, ...] = ()
    if isinstance(model, str) and is_recipe(model):
        model = load_run(Path(model), [*changes.values()])
    if isinstance(model, Run):
        run, name, planned = model, model.name, True
    else:
        name, table, notes = _table_of(model)
        run, planned = _filled(table, changes), devices is not None or "layout" in changes
    if not planned:
        _check_alone(run, changes)
    plan = _plan(run, devices, cluster) if planned else None
    name = changes.get(PRESET[:-1], name).removeprefix(PRESET).strip("'\"")
    tuned = run.init_from is not None
    return Drafted(name, run.model, run.data.sequence_length, plan, notes, tuned)


def _plan(run: Run, devices: int | None, cluster: str) -> Plan:
    layout = parse_layout(run.layout)
    if devices is not None and layout.dp is not None and layout.world != devices:
        replicas, rest = divmod(devices, layout.pp * layout.cp * layout.tp)
        use = "" if rest or not replicas else f", or use dp{replicas} or dp*"
        raise UserError(
            f"layout '{layout}' is for {layout.world} device{'s' * (layout.world != 1)}, and the "
            f"cluster has {devices}; plan it for {cluster}x{layout.world}{use}"
        )
    return plan_of(run, resolve(layout, devices))


# -- a model without a recipe --------------------------------------------------------


def _table_of(model: str) -> tuple[str, Table, tuple[str, ...]]:
    """The name of a preset or config.json, a recipe of it, and notes."""
    name, path = model.removeprefix(PRESET), Path(model)
    unread = not is_here(path, CONFIG) and (name in PRESETS or kind_of(path) != "folder")
    if unread and path.suffix != ".json":
        return name, {"model": {"preset": name}}, ()
    from howdah.shapes.huggingface import sizes_of

    shape, notes = sizes_of(path)
    sizes = {name: size for name, size in asdict(shape).items() if size is not None}
    return path.name, {"model": sizes}, notes


def _filled(table: Table, changes: Mapping[str, str]) -> Run:
    """The run of a table without a recipe: bf16, one sample at a time, dp*, at most LONGEST."""
    table = {"name": "plan", "layout": "dp*", "method": {"precision": "bf16"}, **table}
    table, problems = changed(table, changes.values(), Run)
    run = parse_run(table, whole=False, problems=problems)
    batch, layout = run.batch, parse_layout(run.layout)
    if batch.micro_batch is None and (batch.global_batch is None or layout.micros is None):
        run = replace(run, batch=replace(batch, micro_batch=1))
    if OPTIONS["sequence"] not in changes:
        length = min(run.model.context, LONGEST)
        run = replace(run, data=replace(run.data, sequence_length=length))
    return run


def _check_alone(run: Run, changes: Mapping[str, str]) -> None:
    """Raises UserError for keys and values that a model without layout and devices cannot have."""
    for name in changes:
        if not _among(name, OF_MODEL):
            raise UserError(
                f"{name} says nothing of a model alone; give a --layout or a --cluster too"
            )
    batch, sequence = Batch(micro_batch=1), run.data.sequence_length
    if problems := check_plan(run.model, Layout(), batch, run.method, sequence=sequence):
        raise UserError(several(problems))


# -- options and keys ----------------------------------------------------------------


def _changes(wanted: Draft) -> dict[str, str]:
    """The keys and options as changes of a recipe, by the name of the key. Raises UserError where
    two of them disagree, and for a key that no plan depends on.
    """
    changes = {change.partition("=")[0]: change for change in wanted.keys}
    for name in changes:
        if not is_planned(name):
            way = "give --tokens" if name == "train.tokens" else "leave it out"
            raise UserError(f"{name} is no part of a plan; {way}")
    for field, key in OPTIONS.items():
        if (value := getattr(wanted, field)) in (None, ""):
            continue
        said = changes.get(key, f"={value}").partition("=")[2].strip("'\"")
        if said != str(value):
            raise UserError(f"{_option(field)} is {value} and {key} is {said}; give one of the two")
        changes[key] = f"{key}={json.dumps(value, ensure_ascii=False)}"
    return changes


def is_planned(key: str) -> bool:
    """Whether a plan may depend on a key of a recipe."""
    return not _among(key, IGNORED)


def _among(name: str, keys: Sequence[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def _in_options(problem: str, wanted: Draft) -> str:
    """A sentence about a key, about the option instead if that was given."""
    for field, key in OPTIONS.items():
        if getattr(wanted, field) not in (None, "") and "." in key:
            problem = problem.replace(f"{key}=", f"{_option(field)} ").replace(key, _option(field))
    return problem


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
