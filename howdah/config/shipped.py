"""The recipes that ship with howdah, and what a name on the command line means.

A shipped recipe is a file in `recipes/`, found by its name from any folder. It opens with two lines
of comment: for whom it is, and what it takes. All commands look a name up in one order:

    1. what is here: a file, a folder with a run.toml (a model's: with a config.json)
    2. a recipe that ships
    3. a preset, where the command takes models: `plan` and `draw`
"""

from pathlib import Path

from howdah.base.errors import nearest
from howdah.base.files import kind_of
from howdah.shapes.presets import PRESETS

FOLDER = Path(__file__).parent / "recipes"
RUN, CONFIG = "run.toml", "config.json"
PRESET = "model.preset="  # begins the name of a model that may be nothing else


def recipe_names() -> list[str]:
    """The names of the shipped recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def is_here(path: Path, *held: str) -> bool:
    """Whether `path` is a file, or a folder that holds a run or one of the files `held`."""
    if (kind := kind_of(path)) != "folder":
        return kind == "file" or kind.startswith("is a pipe")
    return any(kind_of(path / name) == "file" for name in (RUN, *held))


def found(recipe: Path) -> Path:
    """The path of a recipe: as it is where a recipe or a run is there, else of the shipped one."""
    if str(recipe) not in recipe_names() or is_here(recipe):
        return recipe
    return FOLDER / f"{recipe}.toml"


def is_recipe(name: str) -> bool:
    """Whether a name that may be a model's means a recipe or a run folder."""
    path = Path(name)
    if not is_here(path, CONFIG):
        return path.suffix == ".toml" or name in recipe_names()
    return path.suffix != ".json" and is_here(path)


def which(name: str, *, models: bool = False) -> str:
    """Which of several things a name means, and how to say the others; empty if it is one thing.

    models  whether the command takes models too
    """
    here = is_here(Path(name), *(CONFIG,) * models)
    ships = name in recipe_names()
    others = [f"the model alone is {PRESET}{name}"] * (models and name in PRESETS)
    if here and ships:
        others.append(f"`howdah recipes {name}` prints the recipe that ships")
    elif ships and kind_of(Path(f"{name}.toml")) == "file":
        others.append(f"that of this folder is {name}.toml")
    if not (here or ships) or not others:
        return ""
    place = "what this folder has under that name" if here else "the recipe that ships"
    return "; ".join([f"{name} is {place}", *others])


def meant(recipe: Path) -> str:
    """What a missing recipe may be instead, for an error message."""
    name, names = str(recipe), recipe_names()
    if kind_of(recipe) == "folder" and kind_of(recipe / RUN) == "does not exist":
        return (
            "; no run has begun in this folder: name a recipe (.toml); a folder of text is named "
            "in its data.sources"
        )
    if name in PRESETS:
        return f"; it is a model: name the recipe laptop, and model.preset={name} behind it"
    if name.startswith(("https:/", "http:/")):
        return "; it is an address: download it, and name the file"
    if recipe.suffix not in ("", ".toml") or (len(recipe.parts) > 1 and recipe.stem not in names):
        return _beside(recipe)
    if recipe.stem in names:
        return f"; the recipe that ships is called {recipe.stem}"
    return nearest(recipe.stem, names)


def _beside(recipe: Path) -> str:
    """The run folder or recipe beside a missing one that has nearly its name."""
    try:
        near = nearest(recipe.name, [one.name for one in recipe.parent.iterdir()])
    except OSError:
        return ""
    return near if "did you mean" in near else ""


def hidden_by(path: Path) -> str:
    """For an error message of a file that is no recipe: that it hides one that ships."""
    if str(path) not in recipe_names():
        return ""
    return f"; it hides the recipe that ships: `howdah recipes {path} > mine.toml` writes that one"


def about(name: str) -> str:
    """The first line of a recipe: for whom it is."""
    with (FOLDER / f"{name}.toml").open(encoding="utf-8") as file:
        return file.readline().strip("# \n")
