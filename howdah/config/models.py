"""The model of a recipe: a table of its sizes, a preset with what differs from it, or that of the
folder `init_from`; with a head for the labels of the run's rows, where these have some.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from howdah.base.errors import UserError, shown
from howdah.base.tables import read_table
from howdah.shapes.presets import preset
from howdah.shapes.shape import ModelShape
from howdah.text.labels import label_names, label_problems
from howdah.text.sources import Data, unreadable

SIZES = {one.name for one in fields(ModelShape) if one.default is MISSING}  # all are needed
OF_TOKENS = {"tie_embeddings": False, "transform": False}  # of a head for tokens


def model_of(table: Mapping[str, Any]) -> object:
    """The model's sizes: those of the [model] table, or those of the folder init_from. With rows
    that have labels, these are the model's, unless the table or the folder says which it has.

    Raises UserError for a table that is none, and for rows without labels.
    """
    model = _sizes(table)
    data = read_table(Data, found).value if isinstance(found := table.get("data"), dict) else None
    if not isinstance(model, dict) or data is None or not data.labelled:
        return model
    if any(label_problems(data)) or unreadable(data, opened=False):
        return model  # which is told where all texts are checked
    return {**model, "labels": model.get("labels") or label_names(data), **OF_TOKENS}


def _sizes(table: Mapping[str, Any]) -> object:
    asked = table.get("model", {})
    if isinstance(asked, dict) and asked.keys() <= {"labels"}:
        if not isinstance(table.get("init_from"), str):
            raise UserError("model is missing; write model.preset=laptop, or a table of its sizes")
        from howdah.model.hub import read_hub

        found = asdict(read_hub(Path(table["init_from"]))[0])
        return {**found, **asked, **(OF_TOKENS if asked else {})}
    model = table["model"]
    if isinstance(model, str):
        raise UserError(f"model is {shown(model)}; write the name of a preset as model.preset=NAME")
    if not isinstance(model, dict) or "preset" not in model:
        if isinstance(model, dict) and "init_from" in table and not set(model) >= SIZES:
            raise UserError(
                "the table [model] lacks sizes, and those of init_from are used only without it: "
                f"leave {', '.join(f'model.{name}' for name in model) or '[model]'} out"
            )
        return model
    if not isinstance(model["preset"], str):
        raise UserError(f"model.preset is {shown(model['preset'])}; it must be a name, like laptop")
    rest = {name: size for name, size in model.items() if name != "preset"}
    return {**asdict(preset(model["preset"])), **rest}
