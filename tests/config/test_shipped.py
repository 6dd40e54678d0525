"""The shipped recipes: each is sound, fits on its devices, and says for whom it is."""

from dataclasses import replace
from pathlib import Path

import pytest

from howdah.base.errors import UserError
from howdah.config.history import changes
from howdah.config.recipe import Machine, load_run, resolve_run, resolved
from howdah.config.save import save_run
from howdah.config.shipped import FOLDER, about, found, recipe_names
from howdah.sim.predict import predict

HERE = Machine(world=None, local_world=None, cores=8, cuda=0, cache=Path("/cache"))
MEMORY = {  # bytes of a process, where it is not a GPU of 24 GB
    **dict.fromkeys(("laptop", "laptop-moe", "laptop-bloom", "laptop-bert", "laptop-t5"), 2e9),
    "bloom-176b": 78.6e9,
}
GPU = 23.5e9  # bytes that a run can use of 24 GB

every_recipe = pytest.mark.parametrize("name", recipe_names())


@pytest.fixture
def somewhere(tmp_path, monkeypatch):
    """A folder outside of the source tree, with a text."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@every_recipe
def test_a_shipped_recipe_is_planned_and_fits(name, somewhere):
    run = load_run(Path(name))
    world = 4 if "dp*" in run.layout else None
    job = resolve_run(run, replace(HERE, world=world, local_world=2 if world else None))
    assert job.name == name and job.folder == somewhere / "runs" / name
    assert predict(job.plan, None).peak < MEMORY.get(name, GPU)


@every_recipe
def test_a_shipped_recipe_says_for_whom_it_is_and_what_it_takes(name):
    first, second, third, *_ = (FOLDER / f"{name}.toml").read_text("utf-8").splitlines()
    assert first.startswith("# ") and second.startswith("# ") and not third
    assert about(name) == first[2:] and first.endswith(".") and second.endswith(".")


def test_the_recipes_are_those_of_the_repository():
    assert {path.stem for path in Path(__file__).parents[2].glob("recipes/*.toml")} == set(
        recipe_names()
    )
    assert "laptop" in recipe_names()


def test_what_is_here_is_taken_first(somewhere):
    assert found(Path("laptop")) == FOLDER / "laptop.toml"
    assert found(Path("other")) == Path("other") and found(Path("a/laptop")) == Path("a/laptop")
    run = load_run(Path("laptop"))
    (somewhere / "laptop").mkdir()
    save_run(resolved(run, resolve_run(run, HERE)), somewhere / "laptop" / "run.toml")
    assert changes(run, load_run(Path("laptop"))).keys() >= {"folder"}


def test_a_name_that_is_nearly_one_is_answered(somewhere):
    with pytest.raises(UserError, match=r"recipe labtop: No such file .*; did you mean 'laptop'\?"):
        load_run(Path("labtop"))
    with pytest.raises(UserError, match=r"labtop.toml: No such file .*; did you mean 'laptop'\?"):
        load_run(Path("labtop.toml"))
    with pytest.raises(UserError, match=r"directory$"):
        load_run(Path("recipes/labtop.toml"))


def test_a_model_is_no_recipe():
    with pytest.raises(UserError, match=r"name the recipe laptop, and model\.preset=llama3-8b"):
        load_run(Path("llama3-8b"))
