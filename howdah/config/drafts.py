"""Drafts: a plan from a model and a few options, for `howdah plan` and `howdah draw`.

A model is a preset, a recipe, or a config.json of Hugging Face. An option that is not given follows
from the model or the recipe. Data, a run folder and the settings of training are not needed,
because nothing is run.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

from howdah.base.bounds import Samples, Tokens
from howdah.base.errors import UserError, nearest, shown
from howdah.base.files import kind_of
from howdah.config.recipe import Run, load_run, plan_of
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.method import Method, Precision
from howdah.plan.plan import Plan, make_plan
from howdah.shapes.presets import preset
from howdah.shapes.shape import ModelShape

LONGEST = 8192  # tokens per sample at most, if not given: contexts of 131072 are for inference


@dataclass(frozen=True)
class Draft:
    """The options for a plan. Those that are empty or 0 follow from the model or the recipe.

    sequence                   tokens per sample
    micro_batch, global_batch  in samples
    """

    layout: str = ""
    sequence: int = 0
    micro_batch: int = 0
    global_batch: int = 0
    precision: str = ""


@dataclass(frozen=True)
class Drafted:
    """A model with its name, and its plan; None if there is neither a layout nor a cluster."""

    name: str
    shape: ModelShape
    sequence: int
    plan: Plan | None


def draft(model: str | Run, wanted: Draft, *, devices: int | None) -> Drafted:
    """The plan of `model` (a preset, recipe, config.json, or a Run) on `devices` devices.

    A preset or config.json has no plan if neither a layout nor devices are given. Raises UserError.
    """
    _check_draft(wanted)
    if isinstance(model, str):
        path = Path(model)
        if path.suffix == ".toml" or kind_of(path / "run.toml") == "file":
            model = load_run(path)
        elif path.suffix == ".json" or kind_of(path) == "folder":
            from howdah.shapes.huggingface import model_of

            return _drafted(path.name, model_of(path), wanted, devices)
        else:
            return _drafted(model, preset(model), wanted, devices)
    layout, method = wanted.layout or model.layout, model.method
    if wanted.precision:
        method = replace(method, precision=_precision(wanted.precision))
    batch = replace(
        model.batch,
        micro_batch=wanted.micro_batch or model.batch.micro_batch,
        global_batch=wanted.global_batch or model.batch.global_batch,
    )
    sequence = wanted.sequence or model.data.sequence_length
    changed = replace(
        model, batch=batch, method=method, data=replace(model.data, sequence_length=sequence)
    )
    plan = plan_of(changed, resolve(parse_layout(layout), devices))
    return Drafted(model.name, model.model, sequence, plan)


def _check_draft(wanted: Draft) -> None:
    """Raises UserError, which names the command-line option, if a number is out of bounds.

    A number of 0 is open, and allowed.
    """
    for name, kind in {"sequence": Tokens, "micro_batch": Samples, "global_batch": Samples}.items():
        number, most = getattr(wanted, name), get_args(kind)[1].most
        if not 0 <= number <= most:
            raise UserError(
                f"{option(name)} is {number}; it must be at least 0 and at most {most:,}"
            )


def option(name: str) -> str:
    """The command-line option that sets the field `name` of a Draft."""
    return f"--{name.replace('_', '-')}"


def _drafted(name: str, shape: ModelShape, wanted: Draft, devices: int | None) -> Drafted:
    sequence = wanted.sequence or min(shape.context, LONGEST)
    if sequence > shape.context:
        raise UserError(
            f"--sequence {sequence} is over the context of {name}; use at most {shape.context}"
        )
    if not wanted.layout and devices is None:
        for what in ("micro_batch", "global_batch", "precision"):
            if getattr(wanted, what):
                raise UserError(
                    f"{option(what)} says nothing of a model alone; give a --layout or a --cluster "
                    "too"
                )
        return Drafted(name, shape, sequence, None)
    layout = resolve(parse_layout(wanted.layout or "dp*"), devices)
    batch = Batch(wanted.global_batch or None, wanted.micro_batch or None)
    if batch.micro_batch is None and (batch.global_batch is None or layout.micros is None):
        batch = replace(batch, micro_batch=1)
    method = Method(precision=_precision(wanted.precision or "bf16"))
    plan = make_plan(shape, layout, batch, sequence=sequence, method=method)
    return Drafted(name, shape, sequence, plan)


def _precision(word: str) -> Precision:
    known = get_args(Precision)
    if word not in known:
        raise UserError(f"precision {shown(word)} is unknown{nearest(word, known)}")
    return cast(Precision, word)
