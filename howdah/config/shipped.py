"""The recipes that ship with howdah: files in `recipes/`, found by their names from any folder.

    howdah train laptop        a file or folder `laptop` that is here, else the shipped recipe

Each opens with two lines of comment: for whom it is, and what it takes.
"""

from pathlib import Path

from howdah.base.errors import nearest
from howdah.base.files import kind_of
from howdah.shapes.presets import PRESETS

FOLDER = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """The names of the shipped recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def found(recipe: Path) -> Path:
    """The path of a recipe: as it is where something is there, else of the shipped recipe."""
    if str(recipe) not in recipe_names() or kind_of(recipe) != "does not exist":
        return recipe
    return FOLDER / f"{recipe}.toml"


def meant(recipe: Path) -> str:
    """What a missing recipe may be instead, for an error message."""
    name = str(recipe)
    if recipe.suffix or len(recipe.parts) > 1:
        return ""
    if name in PRESETS:
        return f"; it is a model: howdah train laptop model.preset={name}"
    return nearest(name, recipe_names())


def about(name: str) -> str:
    """The first line of a recipe: for whom it is."""
    with (FOLDER / f"{name}.toml").open(encoding="utf-8") as file:
        return file.readline().strip("# \n")
