"""The commands that list what there is: presets, recipes, and the keys of a recipe."""

from typing import Annotated

import typer

from howdah.base.errors import UserError, nearest, shown
from howdah.base.their_words import ABSENT, KEYS, SAID, our_key, ours
from howdah.config.keys import find_keys, recipe_keys
from howdah.config.shipped import FOLDER, about, recipe_names
from howdah.draw.columns import columns
from howdah.plan.layout import CHOICES, KNOWN
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


def recipes(
    name: Annotated[str, typer.Argument(help="print this one, to begin a recipe with")] = "",
) -> None:
    """List the shipped recipes; `howdah recipes NAME > mine.toml` begins one of your own."""
    names = recipe_names()
    if name and name not in names:
        raise UserError(f"no recipe is called {shown(name)}{nearest(name, names)}")
    if name:
        print((FOLDER / f"{name}.toml").read_text("utf-8"), end="")
        return
    print("\n".join(columns([(one, about(one)) for one in names], "<<")))


def keys(
    word: Annotated[str, typer.Argument(help="only keys with this in their name or meaning")] = "",
) -> None:
    """List the keys of a recipe: their values, defaults and meanings."""
    found = find_keys(word) if word else list(recipe_keys())
    meant, _, written = our_key(word).partition("=")
    if written:
        print(f"{word}: in the layout it is written {written!r}")
    elif meant.startswith("data.sources."):  # a key of each item of a list, which has no row
        print(f"{word}: here it is {meant!r}")
    if written or (ours(word, KEYS) and not found):
        found = [key for key in recipe_keys() if meant.startswith(key.name)]
    if said := ours(word, SAID):
        print(f"{word}: {said}")
        found = [key for key in recipe_keys() if "." in key.name and key.name in said] or found
        if not found:
            return
    if not found and (absent := ours(word, ABSENT)):
        raise UserError(f"{shown(word)} is {absent}")
    if not found:
        of_layout = word in {*KNOWN, *CHOICES}
        hint = "it is a word of the layout (docs/layouts.md)" if of_layout else "see `howdah keys`"
        raise UserError(f"no key has {shown(word)} in its name or meaning; {hint}")
    for key in found:
        default = f"; by default {key.default}" if key.default else ""
        print(f"{key.name}  ({key.values}{default})")
        if key.about:
            print(f"    {key.about}")
