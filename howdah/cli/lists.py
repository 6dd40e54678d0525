"""The commands that list what there is: presets, and the keys of a recipe."""

from typing import Annotated

import typer

from howdah.base.errors import UserError, shown
from howdah.config.keys import find_keys, recipe_keys
from howdah.draw.columns import columns
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import PRESETS


def presets(
    word: Annotated[str, typer.Argument(help="only names that contain this")] = "",
) -> None:
    """List the named models, with their sizes."""
    rows = [
        (name, f"{parameters(shape).total:,}", f"{shape.layers} layers, width {shape.width:,}")
        for name, shape in PRESETS.items()
        if word.lower() in name
    ]
    if not rows:
        raise UserError(f"no preset has {shown(word)} in its name; `howdah presets` lists them all")
    print("\n".join(columns(rows, "<><")))


def keys(
    word: Annotated[str, typer.Argument(help="only keys with this in their name or meaning")] = "",
) -> None:
    """List the keys of a recipe: their values, defaults and meanings."""
    found = find_keys(word) if word else list(recipe_keys())
    if not found:
        raise UserError(f"no key has {shown(word)} in its name or meaning; see `howdah keys`")
    for key in found:
        default = f"; by default {key.default}" if key.default else ""
        print(f"{key.name}  ({key.values}{default})")
        if key.about:
            print(f"    {key.about}")
