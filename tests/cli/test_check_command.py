"""`howdah check` looks at all that `train` would refuse; a name means the same to all commands."""

import errno
import json
import os
import sys

import pytest

from howdah.cli import main as cli
from howdah.cli.environment import this_machine
from howdah.config.shipped import FOLDER
from howdah.text import tokenizer as tokenizers

NO_MODEL = " does not exist; init_from names the folder of a Hugging Face model: `hf download "


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a command in this process, in an empty folder: (exit code, output, error)."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOWDAH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["howdah", *map(str, words)])
        return (cli.run(), *capsys.readouterr())

    return command


@pytest.fixture
def refused(run):
    """Runs a command that must fail as a user's mistake; returns its one sentence."""

    def command(*words):
        code, out, error = run(*words)
        assert (code, out, error.count("\n")) == (2, "", 1), out + error
        return error.removeprefix("howdah: ").rstrip("\n")

    return command


# -- what it looks at ----------------------------------------------------------------


def test_a_device_that_is_not_there(refused, recipe):
    if this_machine().cuda:
        pytest.skip("there is a CUDA device")
    assert refused("check", recipe, "device=cuda").startswith("device is cuda, but ")
    told = refused("check", recipe, "device=cuda", "layout=tp3", "train.prompt=" + "ab " * 40)
    assert told.startswith("layout 'tp3': tp3 does not divide ")
    assert "; device is cuda, but " in told and "; train.prompt has at least " in told


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_run_folder_that_cannot_be_one(refused, recipe, text, tmp_path, command):
    """`check` found it sound, and `train` failed, or trained on what it wrote itself."""
    another = "give another with folder=PATH"
    (tmp_path / "file").touch()
    told = refused(command, recipe, f"folder={tmp_path}/file/run")
    assert told == f"cannot write the run folder {tmp_path}/file/run: Not a directory; {another}"
    told = refused(command, recipe, f"folder={text}/run")
    assert told == (
        f"the run folder {text}/run is in the text of data.sources[0], {text}, which would change "
        f"with what the run writes; {another}"
    )
    (tmp_path / "circle").symlink_to("circle")
    for name, why in (("file", "is a file"), ("circle", "cannot be read (Too many levels of")):
        told = refused(command, recipe, f"folder={tmp_path / name}")
        assert told.startswith(f"the run folder {tmp_path / name} {why}") and another in told
    told = refused(command, recipe, f"data.sources={tmp_path / 'circle'}")
    assert f"{tmp_path / 'circle'} cannot be read (Too many levels of" in told
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    (tmp_path / "old" / "lock").touch()
    told = refused(command, recipe, f"folder={tmp_path}/old/new")
    assert (
        told
        == f"the run folder {tmp_path}/old/new is in that of another run, {tmp_path}/old; {another}"
    )
    assert not (text / "run").exists() and not (tmp_path / "old" / "new").exists()


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_home_on_a_disk_that_is_not_there(refused, recipe, tmp_path, command):
    """`check` did not look at the disk, and `train` failed while it opened its file."""
    (tmp_path / "file").touch()
    words = (recipe, "layout=single x1 optimizer=disk", f"folder={tmp_path / 'a'}")
    told = refused(command, *words, f"storage.folder={tmp_path / 'file'}")
    assert "cannot hold the home on the disk: it is no folder; name a folder" in told
    told = refused(command, *words, f"storage.folder={tmp_path / 'file' / 'below'}")
    assert f"cannot hold the home on the disk: {tmp_path / 'file'} is no folder" in told


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_disk_without_o_direct_is_told_before_ranks_start(
    refused, recipe, tmp_path, monkeypatch, command
):
    """Ranks found it, one after the other. The folder that is asked for is not made."""
    opened = os.open

    def no_direct(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", no_direct)
    (tmp_path / "disk").mkdir()
    there = tmp_path / "disk" / "below"
    words = (recipe, "layout=single x1 optimizer=disk", f"folder={tmp_path / 'a'}")
    told = refused(command, *words, f"storage.folder={there}", "storage.direct=true")
    assert f"the file system of {there} does not take O_DIRECT (Invalid argument); use " in told
    assert not list((tmp_path / "disk").iterdir())


def test_check_looks_at_the_room_of_the_disk(refused, recipe, monkeypatch):
    monkeypatch.setattr("howdah.cli.check.free_bytes", lambda folder: 1000)
    told = refused("check", recipe, "layout=single x1 optimizer=disk")
    assert "on the disk of " in told and " too little; name a folder with room" in told


@pytest.mark.parametrize("away", ["host", "disk"])
def test_activations_away_are_not_compiled(refused, recipe, away):
    """The run ended with NOT EQUAL bytes."""
    words = ("check", recipe, f"layout=single x1 activations={away}")
    told = refused(*words, "compile=true")
    assert told.startswith(f"activations={away} with compile=true can be planned, but not run yet")
    assert "drop compile=true" in told


@pytest.mark.parametrize("command", ["check", "train"])
def test_weights_that_are_not_there(refused, recipe, tmp_path, command):
    """`check` called the recipe sound, and `train` said it when all text was encoded."""
    told = refused(command, recipe, "init_from=gone", f"folder={tmp_path / 'a'}")
    assert f"gone{NO_MODEL}" in told
    (tmp_path / "here" / "file").touch()
    assert "file is a file; init_from names" in refused(command, recipe, "init_from=file")
    (tmp_path / "here" / "empty").mkdir()
    (tmp_path / "here" / "empty" / "tokenizer.json").touch()
    told = refused(command, recipe, "init_from=empty", "data.tokenizer=none")
    assert "data.tokenizer: none does not exist; " in told and "empty/config.json" in told
    assert not list((tmp_path / "cache").rglob("*.ids"))
    assert not (tmp_path / "a").exists() and not (tmp_path / "here" / "runs").exists()


def test_weights_are_not_asked_for_where_a_checkpoint_is(run, recipe, tmp_path):
    step = tmp_path / "a" / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    (step / "index.json").touch()
    assert run("check", recipe, "init_from=gone", f"folder={tmp_path / 'a'}")[0] == 0


def test_a_prompt_that_is_too_long(refused, run, recipe, tmp_path):
    """The context is 32. Of a tokenizer that is trained later, words are the fewest tokens."""
    assert refused("check", recipe, f"train.prompt=ab{' ab' * 31}") == (
        "train.prompt has at least 33 tokens, and the model's context is 32: shorten it"
    )
    assert run("check", recipe, f"train.prompt=ab{' ab' * 30}")[0] == 0
    tokenizers.train(["xy"], 257).save(str(tmp_path / "mine.json"))
    mine = f"data.tokenizer={tmp_path / 'mine.json'}"
    assert refused("check", recipe, mine, f"train.prompt={'a' * 32}") == (
        "train.prompt has 33 tokens, and the model's context is 32: shorten it"
    )
    assert run("check", recipe, mine, f"train.prompt={'a' * 31}")[0] == 0


def test_a_tokenizer_that_is_too_large(refused, recipe, tmp_path):
    tokenizers.train(["xy"], 257).save(str(tmp_path / "mine.json"))
    told = refused("check", recipe, f"data.tokenizer={tmp_path / 'mine.json'}", "model.vocab=200")
    assert told.endswith("has 257 entries but model.vocab is 200; set model.vocab to 257 or more")


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("mistake", ["train.stepz=3", "layout=tp3"])
def test_missing_text_is_told_beside_a_mistake(refused, recipe, command, mistake):
    """An unknown key hid it, and was told first."""
    words = ["data.validation=gone.txt", "data.sources=none"]
    recipe.write_text(recipe.read_text().replace("validation_share = 0.1", ""))
    told = refused(command, recipe, mistake, *words)
    begins = {"train.stepz=3": "unknown key 'train.stepz'; did", "layout=tp3": "layout 'tp3': tp3"}
    assert told.startswith(begins[mistake])
    assert "data.validation: gone.txt does not exist; " in told
    assert "data.sources: none does not exist; " in told


@pytest.mark.parametrize("command", ["check", "train"])
def test_too_little_memory_hides_nothing(refused, recipe, tmp_path, monkeypatch, command):
    """A machine that was too small was told first, and what was wrong with the files after it."""
    monkeypatch.setattr(f"howdah.cli.{command}.free_memory", lambda: 10**8)
    (tmp_path / "mine.txt").write_text("no schedule")
    files = ["data.sources=none", f"schedule={tmp_path / 'mine.txt'}", "init_from=gone"]
    words = [f"train.prompt={'ab ' * 40}", "data.tokenizer=mine.json", f"folder={tmp_path / 'a'}"]
    told = refused(command, recipe, *words, files[0], files[2])
    assert told.startswith("single x1 takes about ")
    for problem in ("none does not", "mine.json does not", "gone does not"):
        assert problem in told
    monkeypatch.setattr("howdah.cli.check.free_memory", lambda: 10**8)
    told = refused(command, recipe, "layout=pp2 x6", "threads=-1", *files)
    for problem in ("threads is -1", "schedule, line 1", "none does not", "gone does not"):
        assert problem in told and told.count(problem) == 1, told
    told = refused(command, recipe, "threads=-1", "data.sources=none")
    assert told.startswith("threads is -1") and "; single x1 takes about " in told
    assert told.endswith("hub") and "single" not in refused(command, recipe, "batch=3")


@pytest.mark.parametrize("key", ["sources", "validation"])
def test_a_field_without_a_file_is_refused(refused, key, tmp_path):
    """It was the field of the standard library's files, which have none."""
    assert refused("check", "laptop", f"data.{key}.field=body") == (
        f"data.{key}[0].field is 'body', and files of stdlib have no fields; name the file that "
        f"has it: data.{key}=FILE"
    )


# -- what a name means ---------------------------------------------------------------


def test_a_recipe_that_ships_comes_before_the_model_of_its_name(run):
    """`train laptop` was the recipe, `plan laptop` the model."""
    code, out, _ = run("plan", "laptop")
    first, second, *_, last = out.splitlines()
    assert code == 0
    assert first == "laptop is the recipe that ships; the model alone is model.preset=laptop"
    assert second.startswith("laptop: 3,803,392 parameters") and "layout  dp2 x1" in out, last
    assert run("plan", FOLDER / "laptop.toml") == (0, out.partition("\n")[2], "")
    notes = json.loads(run("plan", "laptop", "--json")[1])["notes"]
    assert notes[0] == first

    code, out, _ = run("plan", "model.preset=laptop")
    assert code == 0 and out.startswith("laptop: 3,803,392 parameters") and "layout" not in out
    assert run("plan", "llama3-8b")[1].startswith("llama3-8b: ")  # means one thing
    assert run("plan", "fine-tune")[1].startswith("fine-tune: ")
    assert run("draw", "mesh", "laptop")[1].startswith(first)
    assert run("check", "laptop")[1].startswith("laptop: sound: ")  # a model cannot be checked


@pytest.mark.parametrize("name", ["laptop", "gpt2-124m", "llama3-8b"])
def test_a_folder_without_a_run_hides_nothing(run, tmp_path, name):
    before = run("plan", name)
    (tmp_path / "here" / name).mkdir()
    (tmp_path / "here" / name / "notes.txt").touch()
    assert run("plan", name) == before and before[0] == 0
    if name == "laptop":
        assert run("check", name)[1].startswith("laptop: sound: laptop on dp2 x1")


def test_what_is_here_comes_first_and_is_told(run, tmp_path):
    own = (FOLDER / "laptop.toml").read_text("utf-8").replace('"dp2"', '"dp4"')
    (tmp_path / "here" / "laptop").mkdir()
    (tmp_path / "here" / "laptop" / "run.toml").write_text(own)
    shipped = "`howdah recipes laptop` prints the recipe that ships"
    first, second, *_ = run("check", "laptop")[1].splitlines()
    assert first == f"laptop is what this folder has under that name; {shipped}"
    assert second.startswith("laptop: sound: run on dp4 x1")
    out = run("plan", "laptop")[1]
    assert out.startswith(
        "laptop is what this folder has under that name; the model alone is model.preset=laptop; "
        f"{shipped}\n"
    )
    assert "layout  dp4 x1" in out


def test_a_recipe_of_ones_own_beside_one_that_ships_is_told(run, tmp_path):
    """After `howdah recipes laptop > laptop.toml`, `train laptop` trained the one that ships."""
    own = (FOLDER / "laptop.toml").read_text("utf-8").replace('"dp2"', '"dp4"')
    (tmp_path / "here" / "laptop.toml").write_text(own)
    first, second, *_ = run("check", "laptop")[1].splitlines()
    assert first == "laptop is the recipe that ships; that of this folder is laptop.toml"
    assert second.startswith("laptop: sound: laptop on dp2")
    assert run("check", "laptop.toml")[1].startswith("laptop.toml: sound: laptop on dp4")


def test_a_file_that_hides_a_recipe_is_told(refused, tmp_path):
    (tmp_path / "here" / "laptop").write_text("my notes")
    assert refused("check", "laptop").endswith(
        "; it hides the recipe that ships: `howdah recipes laptop > mine.toml` writes that one"
    )
    called = "; the recipe that ships is called laptop"
    assert refused("check", "recipes/laptop.toml").endswith(f"No such file or directory{called}")
    assert refused("check", "laptop.toml").endswith(called)
    (tmp_path / "here" / "recipes").mkdir()  # a folder of text, or of food
    assert refused("check", "recipes/laptop.toml").endswith(called)


# -- plans ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["llama3-8b"], ["llama3-8b", "--layout", "dp2"], ["two-machines"]]
)
def test_only_the_mistake_is_told(refused, words):
    """Sentences on dp* and on a batch that was open followed, which a plan may have."""
    assert refused("plan", *words, "batch.global=3") == (
        "unknown key 'batch.global'; did you mean 'batch.global_batch'?"
    )
    assert refused("plan", *words, "sead=3") == "unknown key 'sead'; did you mean 'seed'?"
    assert refused("plan", *words, "method.dropuot=0") == (
        "unknown key 'method.dropuot'; did you mean 'method.dropout'?"
    )


def test_a_fine_tune_gets_no_advice_of_pre_training(run, tmp_path):
    assert "note" not in run("plan", "fine-tune")[1]
    text = (FOLDER / "fine-tune.toml").read_text("utf-8")
    (tmp_path / "here" / "fresh.toml").write_text(text.replace("init_from", "# init_from"))
    assert "published pre-training runs" in run("plan", "fresh.toml")[1]


def test_a_plan_is_headed_by_what_is_planned(run):
    assert run("plan", "llama3-8b", "model.preset=laptop")[1].startswith("laptop: 3,803,392 par")
    assert (
        run("plan", "laptop", "model.preset=smollm2-135m")[1]
        .splitlines()[1]
        .startswith("smollm2-135m: ")
    )


@pytest.mark.parametrize("rent", ["0", "0 USD/h", "0.0"])
def test_a_rent_of_nothing_is_refused(refused, rent):
    words = ("llama3-8b", "--cluster", "h100x8", "--tokens", "1T", "--rent", rent)
    assert refused("plan", *words) == (
        "--rent is 0, which is no price; leave it out for devices that you own"
    )


def test_the_layout_that_would_fit_passes_when_it_is_written(run, refused, text, monkeypatch):
    monkeypatch.setattr("howdah.cli.check.free_memory", lambda: 2 * 10**10)
    words = "check", "gpt2-124m", f"data.sources={text}"
    *_, layout, rest = refused(*words).split("'")
    assert rest.startswith(" would fit; or ")
    code, out, _ = run(*words, f"layout={layout}")
    assert code == 0 and f" on {layout}, 8 ranks, 512 x 1024 " in out


def test_a_recipe_that_is_not_there_and_a_text_in_its_place(refused, tmp_path):
    known = "; known are: bloom-176b, fine-tune, gpt2-124m, "
    assert known in refused("train", "nosuch.toml", "--resume")
    assert refused("train", "labtop.toml").endswith("; did you mean 'laptop'?")
    assert "; it is a model: " in refused("check", "qwen3-0.6b")
    (tmp_path / "book.txt").write_text("It was a dark night.")
    told = refused("check", tmp_path / "book.txt")
    assert " is not TOML: " in told and told.endswith("a file of text is named in data.sources")


def test_check_looks_at_the_labels_of_all_rows(run, refused, recipe, tmp_path):
    """It looked at the first row of each file alone, and `train` refused the last."""
    rows = [
        f'{{"text": "{word} {n}", "label": "{word}"}}\n' for n in range(9) for word in ("a", "b")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    (tmp_path / "held.jsonl").write_text("".join(rows) + '{"text": "c", "label": "c"}\n')
    texts = [
        f'[{{path = "{tmp_path / name}.jsonl", label = "label"}}]' for name in ("rows", "held")
    ]
    words = ("check", recipe, "data.validation_share=0.03")
    assert run(*words, f"data.sources={texts[0]}")[0] == 0
    told = refused(*words, f"data.sources={texts[0]}", f"data.validation={texts[1]}")
    assert told == f"{tmp_path / 'held.jsonl'} line 19: the label 'c' has no row of data.sources"
    bare = f"data.validation={tmp_path / 'held.jsonl'}"
    told = refused(*words, f"data.sources={texts[0]}", bare, "model.family=encoder")
    assert told.startswith("data.validation[0] has no label") and "mask_token" not in told
    assert told.endswith("train on labelled texts or on none")


def test_a_labelled_file_that_is_missing_is_told_once(refused, recipe):
    told = refused("check", recipe, 'data.sources=[{path = "nowhere.jsonl", label = "label"}]')
    assert told.count("nowhere.jsonl does not exist") == 1, told
