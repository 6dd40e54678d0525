"""`howdah presets`, `howdah keys`, `--version`: what there is, said from the code itself."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from howdah.base.errors import UserError
from howdah.base.tables import _paths
from howdah.cli import lists
from howdah.cli.commands import app
from howdah.config.keys import find_keys, recipe_keys
from howdah.config.recipe import Run, parse_run
from howdah.config.shipped import FOLDER, recipe_names
from howdah.shapes.presets import PRESETS

GROUPS = ("method", "train", "batch", "data")
PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")

# keys of the items of lists
OF_ITEMS = {
    *(f"data.sources.{key}" for key in ("path", "field", "target", "label", "weight")),
    *(f"data.validation.{key}" for key in ("path", "field", "target", "label")),
    "method.sync",  # tables that may be absent
    "method.spike",
    "method.adapter",
}


def run(*words):
    told = CliRunner().invoke(app, words)
    return told.exit_code, told.output


def test_the_version_is_that_of_the_package():
    assert run("--version") == (0, f"howdah {version('howdah')}\n")
    assert run("-h") == run("--help")


def test_the_recipes_are_listed_and_printed():
    code, told = run("recipes")
    assert code == 0 and [line.split()[0] for line in told.splitlines()] == recipe_names()
    assert "  Two CPU processes train a small" in told
    text = (FOLDER / "laptop.toml").read_text("utf-8")
    assert run("recipes", "laptop") == (0, text)
    with pytest.raises(UserError, match=r"^no recipe is called 'labtop'; did you mean 'laptop'\?$"):
        lists.recipes("labtop")


def test_every_preset_is_listed_once():
    code, told = run("presets")
    assert code == 0 and [line.split()[0] for line in told.splitlines()] == list(PRESETS)
    assert run("presets", "Mixtral")[1].split()[:4] == [
        "mixtral-8x7b",
        "46,702,792,704",
        "32",
        "layers,",
    ]


def test_the_keys_are_those_that_a_recipe_may_have():
    names = [key.name for key in recipe_keys()]
    tables = {name.rpartition(".")[0] for name in names}
    assert len(names) == len(set(names))
    assert set(names) - {"model.preset"} == set(_paths(Run, "")) - tables - OF_ITEMS


def test_every_key_of_the_page_is_a_key_and_has_a_meaning():
    """The tables of docs/training.md and the docstrings must not drift apart."""
    shown = set(re.findall(r"^\| `((?:method|train|batch|data)\.[a-z_.0-9]+)` \|", PAGE, re.M))
    known = {key.name: key for key in recipe_keys()}
    assert shown - OF_ITEMS == {name for name in known if name.split(".")[0] in GROUPS}
    for name in ("method.lr.peak", "train.steps", "batch.global_batch", "layout", "seed", "name"):
        assert known[name].about


def test_defaults_are_those_of_an_empty_recipe():
    made = parse_run({"name": "a", "model": {"preset": "laptop"}})
    known = {key.name: key.default for key in recipe_keys()}
    assert known["train.steps"] == str(made.train.steps)
    assert known["method.optimizer.betas"] == str(list(made.method.optimizer.betas))
    assert known["method.precision"] == made.method.precision
    assert known["data.sources"] == "['stdlib']" and known["data.tokenizer"] == ""


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("learning_rate", ["method.lr.peak"]),  # another trainer's word
        ("epochs", ["train.epochs"]),
        ("warmup", ["method.lr.warmup_steps"]),
        ("KEEP_LAST", ["train.keep_last"]),
        ("key-value", ["model.kv_heads", "model.latent.kv_rank"]),
    ],
)
def test_a_word_finds_its_keys(word, names):
    assert {key.name for key in find_keys(word)} & set(names)
    assert f"{names[0]}  (" in run("keys", word)[1]


def test_limits_and_defaults_are_shown():
    told = run("keys", "label_smoothing")[1]
    assert told.startswith(
        "method.label_smoothing  (number, from 0 below 1; by default 0.0)\n    ε:"
    )


@pytest.mark.parametrize("command", ["keys", "presets"])
def test_a_word_that_finds_nothing_is_a_mistake(command):
    told = CliRunner().invoke(app, [command, "walrus"])
    assert told.exit_code != 0 and "'walrus'" in str(told.exception)
