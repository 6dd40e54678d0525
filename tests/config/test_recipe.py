"""From a recipe to a Job: what may be written, what is filled in, what is refused and how."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from howdah.base.errors import UserError
from howdah.config.history import changes_since, refuse_accident, refuse_in_vain
from howdah.config.recipe import (
    Machine,
    load_run,
    parse_run,
    resolve_run,
    resolved,
)
from howdah.config.save import save_run
from howdah.shapes.presets import preset
from howdah.shapes.shape import RopeScaling
from howdah.train.notes import rate_note

HERE = Machine(world=None, local_world=None, cores=8, cuda=0, cache=Path("/cache"))
MODEL = '[model]\npreset = "laptop"\n'


def refusal(recipe, *overrides, machine=HERE):
    """The sentence that a run is refused with."""
    with pytest.raises(UserError) as refused:
        resolve_run(load_run(recipe, overrides), machine)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_overrides_change_single_values(recipe):
    run = load_run(
        recipe,
        [
            "layout=dp2 x3",
            "seed=7",
            "method.lr.peak=2e-4",
            "method.optimizer.betas=[0.8, 0.9]",
            'data.sources=["stdlib", {path = "x.jsonl", field = "body"}]',
            "init_from=some/folder",
            "model.rope_scaling.factor=8",
        ],
    )
    assert (run.layout, run.seed, run.method.lr.peak) == ("dp2 x3", 7, 2e-4)
    assert run.method.optimizer.betas == (0.8, 0.9)
    assert [s.path for s in run.data.sources] == ["stdlib", "x.jsonl"]
    assert run.data.sources[1].field == "body"
    assert run.init_from == Path("some/folder")
    assert run.model.rope_scaling == RopeScaling(8.0)
    assert run.method.lr.warmup_steps == 3  # beside it, from the recipe


def test_a_preset_gives_the_sizes_that_are_not_written(recipe):
    recipe.write_text('[model]\npreset = "laptop"\nlayers = 2\n')
    model = load_run(recipe).model
    assert (model.layers, model.width, model.tie_embeddings) == (2, 256, True)


def test_a_preset_on_the_line_replaces_the_recipes_model(recipe):
    """It was a hybrid: the recipe's sizes, and of the preset what the recipe left out."""
    plain = load_run(recipe, ["model.preset=laptop"]).model
    assert plain == preset("laptop")
    words = ["model.layers=2", "model.preset=laptop"]
    for line in (words, words[::-1]):
        assert load_run(recipe, line).model == replace(plain, layers=2)


@pytest.mark.parametrize("value", ['name = "é"', 'layout = "dp2"', "", "[train]\nprompt = 'a\\b'"])
def test_a_saved_run_reads_back_equal(tmp_path, value):
    (tmp_path / "a.toml").write_text(
        f'{value}\n[model]\npreset = "llama3-1b"\n'
        if not value.startswith("[")
        else f'[model]\npreset = "llama3-1b"\n{value}\n'
    )
    run = load_run(tmp_path / "a.toml")
    save_run(run, tmp_path / "b.toml")
    assert load_run(tmp_path / "b.toml", [f"name={run.name}"]) == run


@pytest.mark.parametrize(
    "words",
    [(), ("model.preset=llama3-8b",), ("model.layers=3", "data.sources=[{path='a', weight=2}]")],
)
def test_a_brief_recipe_has_what_is_not_left_out(recipe, tmp_path, words):
    run = load_run(recipe, words)
    save_run(run, tmp_path / "a.toml", brief=True)
    assert load_run(tmp_path / "a.toml", [f"name={run.name}"]) == run
    assert len((tmp_path / "a.toml").read_text().splitlines()) < 50
    assert "undecodable" not in (tmp_path / "a.toml").read_text()


# -- going on with a run folder ----------------------------------------------------


def test_a_run_folder_is_a_recipe(recipe, tmp_path, monkeypatch):
    """What a run has decided stands in it, and paths lead there from any folder."""
    (tmp_path / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    overrides = ["data.sources=['notes', 'stdlib']", "layout=dp3", "folder=a", "init_from=b"]
    run = load_run(recipe, overrides)
    job = resolve_run(run, HERE)
    (tmp_path / "a").mkdir()
    save_run(resolved(run, job), tmp_path / "a" / "run.toml")
    monkeypatch.chdir("/")
    again = resolve_run(load_run(tmp_path / "a"), HERE)
    sources = (replace(job.data.sources[0], path=str(tmp_path / "notes")), job.data.sources[1])
    assert again == replace(job, data=replace(job.data, sources=sources))
    assert again.folder == tmp_path / "a" and again.init_from == tmp_path / "b"


def test_a_moved_run_folder_goes_on_where_it_is(recipe, tmp_path):
    run = load_run(recipe, [f"folder={tmp_path / 'old'}"])
    (tmp_path / "new").mkdir()
    save_run(resolved(run, resolve_run(run, HERE)), tmp_path / "new" / "run.toml")
    assert load_run(tmp_path / "new").folder == tmp_path / "new"
    assert load_run(tmp_path / "new", ["folder=third"]).folder == Path("third")


def test_a_base_that_was_moved_has_taken_its_tokenizer_along(recipe, tmp_path):
    saved = 'init_from = "/old"\n' + recipe.read_text()
    for tokenizer, then in (("/old", None), ("/own.json", "/own.json")):
        table = saved.replace("[data]", f'[data]\ntokenizer = "{tokenizer}"')
        (tmp_path / "run.toml").write_text(table)
        assert load_run(tmp_path).data.tokenizer == tokenizer
        assert load_run(tmp_path, ["init_from=/new"]).data.tokenizer == then


def test_more_threads_than_cores_can_run_are_refused(recipe):
    resolve_run(load_run(recipe, ["threads=64"]), replace(HERE, cores=8))
    with pytest.raises(
        UserError, match=r"^threads is 65, over 8 for each core of .* \(8\): .* threads=0"
    ):
        resolve_run(load_run(recipe, ["threads=65"]), replace(HERE, cores=8))


def test_going_on_elsewhere_takes_the_threads_and_device_of_that_machine(recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace("threads = 1", ""))
    there = replace(HERE, cores=64, cuda=8)
    run = load_run(recipe)
    assert resolve_run(run, there).device == "cuda"
    save_run(resolved(run, resolve_run(run, there)), tmp_path / "run.toml")
    job = resolve_run(load_run(tmp_path, ["layout=dp2"]), HERE)
    assert (job.device, job.threads) == ("cpu", 4)


def test_going_on_with_other_ranks_needs_no_other_word(recipe, tmp_path):
    """The micro-batch of one layout is too large for the next, so it stays open."""
    run = load_run(recipe, ["layout=dp2"])
    save_run(resolved(run, resolve_run(run, HERE)), tmp_path / "run.toml")
    assert resolve_run(load_run(tmp_path), HERE).batch.micro_batch == 3
    job = resolve_run(load_run(tmp_path, ["layout=dp3"]), HERE)
    assert (job.batch.global_batch, job.batch.micro_batch, str(job.layout)) == (6, 2, "dp3 x1")


def test_a_global_batch_that_followed_from_the_layout_is_kept(recipe, tmp_path):
    """It is part of the mathematics: another layout must not change it."""
    recipe.write_text(recipe.read_text().replace("global_batch = 6", "micro_batch = 1"))
    run = load_run(recipe, ["layout=dp2 x3"])
    save_run(resolved(run, resolve_run(run, HERE)), tmp_path / "run.toml")
    job = resolve_run(load_run(tmp_path, ["layout=dp4"]), HERE)
    assert (job.batch.global_batch, str(job.layout)) == (6, "dp4 x2")


# -- resolving ---------------------------------------------------------------------


def test_open_things_are_closed(recipe):
    job = resolve_run(load_run(recipe, ["layout=dp*"]), replace(HERE, world=3, local_world=1))
    assert (str(job.layout), job.batch.micro_batch) == ("dp3 x1", 2)
    job = resolve_run(load_run(recipe, ["layout=dp2", "threads=0"]), HERE)
    assert (job.threads, job.device) == (4, "cpu")


def test_a_key_of_the_sources_is_one_of_each(recipe):
    """`data.sources.field=body` is in the list of keys, and was refused on the line."""
    both = ["data.sources=['a', {path='b', weight=2}]", "data.sources.field=body"]
    sources = load_run(recipe, both).data.sources
    assert [(s.path, s.field, s.weight) for s in sources] == [("a", "body", 1), ("b", "body", 2)]
    recipe.write_text(f"data.sources = 'c'\n{MODEL}")
    (source,) = load_run(recipe, ["data.sources.field=body"]).data.sources
    assert (source.path, source.field) == ("c", "body")
    recipe.write_text(MODEL)
    keys = ["data.validation.path=d", "data.validation.field=body"]
    (held,) = load_run(recipe, keys).data.validation
    assert (held.path, held.field) == ("d", "body")
    found = refusal(recipe, "data.sources=[1]", "data.sources.field=x")
    assert found.startswith("data.sources.field: sources is a single value, not a table")


def test_a_run_folder_holds_its_validation_text(recipe, tmp_path, monkeypatch):
    """Another is a change that a resume has to ask for; so is one that is taken away."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.jsonl").write_text('{"text": "one"}\n')
    recipe.write_text(recipe.read_text().replace("validation_share = 0.1", ""))
    run = load_run(recipe, ["data.validation=held.jsonl", "folder=a"])
    (tmp_path / "a").mkdir()
    save_run(resolved(run, resolve_run(run, HERE)), tmp_path / "a" / "run.toml")
    again = load_run(tmp_path / "a")
    assert [held.path for held in again.data.validation] == [str(tmp_path / "held.jsonl")]
    resolve_run(again, HERE)
    changed = load_run(tmp_path / "a", ["data.validation=[]"])
    with pytest.raises(UserError, match=r"other settings: data\.validation was .* and is \[\]; go"):
        refuse_accident(changes_since(tmp_path / "a", changed), tmp_path / "a", done=9, steps=9)
    with pytest.raises(UserError, match=r"has no step left, 9 of 9 are done, .* nothing"):
        refuse_in_vain(changes_since(tmp_path / "a", changed), tmp_path / "a", done=9, steps=9)
    refuse_in_vain(changes_since(tmp_path / "a", changed), tmp_path / "a", done=8, steps=9)


def test_one_source_may_be_written_as_a_word(recipe):
    assert load_run(recipe, ["data.sources=mytext"]).data.sources[0].path == "mytext"


@pytest.mark.parametrize("layout", ["single", "dp2 zero2", "tp2 sp", "pp2", "dp2 zero3"])
def test_every_layout_may_be_compiled(recipe, layout):
    """Blocks of own operations were refused: torch.compile broke off at each of them."""
    assert resolve_run(load_run(recipe, ["compile=true", f"layout={layout}"]), HERE).compile


def test_a_layout_must_fit_the_world(recipe):
    found = refusal(recipe, "layout=dp2", machine=replace(HERE, world=3, local_world=3))
    assert "needs 2 processes but there are 3; use dp3 or dp*" in found


def test_a_recipe_may_not_share_its_table(recipe):
    """`parse_run` leaves the caller's table as it is."""
    table = tomllib.loads(recipe.read_text())
    before = tomllib.loads(recipe.read_text())
    parse_run({"name": "a", **table})
    assert table == before


def test_a_run_that_cannot_be_written_is_a_sentence(tmp_path):
    """A disk that is full at the start once ended in a traceback."""
    run = load_run(Path("recipes/laptop.toml"))
    save_run(run, tmp_path / "run.toml")
    before = (tmp_path / "run.toml").stat()
    save_run(run, tmp_path / "run.toml")
    after = (tmp_path / "run.toml").stat()  # a full disk does not matter then
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(
        UserError, match=r"cannot write .*/gone/run\.toml: No such file or directory"
    ):
        save_run(run, tmp_path / "gone" / "run.toml")


def test_the_note_on_the_rate_compares_with_that_of_the_last_start(recipe):
    """It compared with the new peak, and called a quarter of the rate no change."""
    now = load_run(recipe, ["method.lr.peak=1e-3", "train.steps=40"])

    def note(**found):
        changed = {key.replace("__", "."): both for key, both in found.items()}
        return rate_note(changed, now.method.lr, steps=40, done=20)

    said = note(method__lr__peak=(4e-3, 1e-3), train__steps=(20, 40))
    assert said.startswith("the learning rate has changed: step 21 has 0.000")
    assert note(method__lr__peak=(1e-3, 1e-3)) == note() == ""
    steps = note(train__steps=(20, 40))
    assert "spans 40 steps now, instead of 20: step 21 has" in steps and "to keep that" in steps
