"""The starts of a run, one after the other: what is refused, told, recorded, and left behind."""

import json
import os
import platform
import shutil
import sys
import threading
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file
from small_runs import metrics

from howdah.base.errors import UserError
from howdah.config.history import changes, refuse_accident
from howdah.config.recipe import load_run


@pytest.fixture
def trained(run, recipe, tmp_path):
    """A run folder with checkpoints of steps 10 and 20."""
    code, _, error = run("train", recipe, f"folder={tmp_path / 'a'}")
    assert code == 0, error
    return tmp_path / "a"


def everything(folder):
    """Every file below a folder with its bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- other settings --------------------------------------------------------------------


def test_a_run_past_the_last_step_hides_no_other_setting(run, trained, recipe):
    before, place = everything(trained), f"folder={trained}"
    code, _, error = run("train", recipe, place, "train.steps=5", "method.lr.peak=1e-3")
    assert (code, error) == (
        2,
        f"howdah: {trained} has a run with other settings: method.lr.peak was 0.003 and is 0.001; "
        "train.steps is 5, and 20 are done; go on with it by --resume train.steps=20 or more, or "
        "start another run with folder=PATH\n",
    )
    changed = ["train.steps=5", "seed=7", "model.layers=3", "method.optimizer.name=sgd"]
    for words in (["train", trained, *changed], ["train", recipe, place, *changed, "--resume"]):
        code, _, error = run(*words)
        assert code == 2 and error.count("\n") == 1
        for told in (
            "step-00000020 is past train.steps 5; make it 20 or more",
            "holds a model with layers 2, this run has 3",
            "was trained with seed 1, this run has 7",
            "holds the state of adamw, this run uses sgd",
        ):
            assert told in error
    assert everything(trained) == before


def test_sources_are_told_as_a_recipe_writes_them(run, trained, recipe, text):
    """They were shown as Python's tuple of dicts, cut after sixty characters."""
    code, _, error = run("train", recipe, f"folder={trained}", "data.sources=other")
    assert code == 2
    short = f"...{str(text)[-57:]}" if len(str(text)) > 60 else str(text)
    assert f'settings: data.sources was ["{short}"] and is ["other"]; go on' in error


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("'a'", "['a', {path = 'b.csv', field = 'body', weight = 2}]",
         'was ["a"] and is ["a", {path = "b.csv", field = "body", weight = 2.0}]'),
        ("['a','b','c','d','e']", "['a','b','c','d','f']",
         'was [..., "e"] and is [..., "f"]'),
        ("['a','b','c','d','e']", "'z'",
         'was [..., "a", "b", "c", ...] and is [..., "z"]'),
        (f"'/{'long/' * 30}end'", "'stdlib'",
         f'was ["...{("long/" * 30)[-54:]}end"] and is ["stdlib"]'),
    ],
)  # fmt: skip
def test_long_settings_are_told_in_short(recipe, tmp_path, old, new, told):
    before, now = (load_run(recipe, [f"data.sources={one}"]) for one in (old, new))
    with pytest.raises(UserError) as refused:
        refuse_accident(changes(before, now), tmp_path, done=0, steps=0)
    assert f"data.sources {told}; go on" in str(refused.value)


def test_settings_that_are_no_lists_are_told_as_toml(recipe, tmp_path):
    before = load_run(recipe)
    now = replace(before, method=replace(before.method, precision="bf16", dropout=0.5))
    now = replace(now, data=replace(now.data, tokenizer="b"), compile=True)
    with pytest.raises(UserError) as refused:
        refuse_accident(changes(before, now), tmp_path, done=0, steps=0)
    assert 'precision was "float32" and is "bf16"; method.dropout was 0.0 and is' in str(
        refused.value
    )
    assert 'data.tokenizer was not given and is "b"' in str(refused.value)


# -- the rate, and the record ------------------------------------------------------------


@pytest.mark.slow
def test_the_note_on_the_rate_says_the_rates_that_are_used(run, trained, recipe, tmp_path):
    """A longer cosine run: the note's new rate is that of the next step, the old one that of a run
    that was never extended, and the keys that it names keep the old one.
    """
    code, out, error = run("train", trained, "train.steps=40")
    assert code == 0, error
    (note,) = [line for line in out.splitlines() if line.startswith("note")]
    words = note.split()
    new, old = (float(words[words.index(word) + 1].rstrip(";")) for word in ("has", "had"))
    assert f"{metrics(trained)[21]['rate']:.3g}" == f"{new:.3g}"
    assert old == pytest.approx(0.1 * 3e-3)  # min_ratio of the peak, at the end of 20 steps
    assert old == pytest.approx(metrics(trained)[20]["rate"], rel=0.1) and new > 5 * old

    other = tmp_path / "b"
    assert run("train", recipe, f"folder={other}")[0] == 0
    keep = [word for word in words if word.startswith("method.lr.")]
    assert len(keep) == 3
    code, _, error = run("train", other, "train.steps=22", *keep)
    assert code == 0, error
    assert [metrics(other)[step]["rate"] for step in (21, 22)] == [pytest.approx(old)] * 2


@pytest.mark.slow
def test_the_history_has_the_versions_of_this_start(run, trained):
    """Those of the programs themselves, and the host and command line of each start."""
    import torch

    import howdah

    assert run("train", trained, "train.steps=21", "layout=single x2")[0] == 0
    first, second = map(json.loads, (trained / "history.jsonl").read_text().splitlines())
    for line in (first, second):
        assert line["versions"] == {
            "howdah": howdah.__version__,
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
        }
        assert line["host"] == os.uname().nodename == platform.node()
    assert first["command"][-1] == f"folder={trained}"
    words = ["howdah", "train", str(trained), "train.steps=21", "layout=single x2"]
    assert second["command"] == words
    assert second["step"] == 20 and first["time"] <= second["time"]


def test_the_log_has_every_line_that_was_said(run, recipe, tmp_path):
    """What was said before the steps, such as where a run goes on from, was on the screen alone."""
    words = ["train", recipe, f"folder={tmp_path / 'a'}", "layout=zero1"]  # which has a note
    said = [run(*words, "train.steps=2"), run(*words, "train.steps=3", "--resume")]
    assert [code for code, _, _ in said] == [0, 0], said
    lines = "".join(out for _, out, _ in said).splitlines()
    assert (tmp_path / "a" / "log.txt").read_text().splitlines() == lines
    assert "going on from step 2, saved on single zero1 x1" in lines
    assert "note        zero1 shards nothing: each copy of the states is on one rank" in lines


# -- text under the same name --------------------------------------------------------------


@pytest.fixture
def evaluated(run, recipe, tmp_path):
    """A run folder with a validation file, which is the only text that is held out."""
    held = tmp_path / "held.txt"
    held.write_text("\n\n".join(f"{n} comes before {n + 1}" for n in range(60)))
    recipe.write_text(recipe.read_text().replace("validation_share = 0.1", ""))
    words = [f"data.validation={held}", "train.steps=4"]
    code, _, error = run("train", recipe, f"folder={tmp_path / 'a'}", *words)
    assert code == 0, error
    return tmp_path / "a", held, words


def test_another_validation_text_under_the_same_path_is_noticed(run, recipe, evaluated):
    """Losses went on as if they were of one text."""
    folder, held, words = evaluated
    words[1] = "train.steps=5"
    held.write_text(held.read_text().replace("before", "after"))
    before = everything(folder)
    sentence = (
        f"howdah: {folder}/checkpoints/step-00000004 was evaluated on other text: the contents of "
        "data.validation have changed, so losses before and after do not compare; restore them, or "
        "go on by --resume\n"
    )
    for command in (["train", folder, words[1]], ["train", recipe, f"folder={folder}", *words]):
        code, _, error = run(*command)
        assert (code, error) == (2, sentence)
    assert everything(folder) == before
    assert run("train", folder, words[1], "--resume")[0] == 0
    assert run("train", folder, "train.steps=6")[0] == 0  # the new text is the run's now


def test_the_same_text_at_another_path_is_the_same(run, evaluated, tmp_path):
    folder, held, _ = evaluated
    held.rename(tmp_path / "moved.txt")
    code, _, error = run(
        "train", folder, "train.steps=5", f"data.validation={tmp_path / 'moved.txt'}"
    )
    assert code == 0, error


def test_other_sources_with_as_many_samples_are_noticed(run, recipe, text, tmp_path):
    """With a tokenizer of its own, only the number of samples told texts apart."""
    shutil.copytree(text, tmp_path / "text")
    assert run("train", recipe, f"folder={tmp_path / 'a'}", "train.steps=1")[0] == 0
    recipe.write_text(recipe.read_text().replace("validation_share = 0.1", ""))
    (tmp_path / "held.txt").write_text("9 follows 8, says nobody")
    place = [f"data.sources={tmp_path / 'text'}", f"folder={tmp_path / 'b'}", "train.steps=3"]
    others = [f"data.tokenizer={tmp_path / 'a'}", f"data.validation={tmp_path / 'held.txt'}"]
    words = ["train", recipe, *place, *others]
    assert run(*words)[0] == 0
    for file in (tmp_path / "text").iterdir():
        first, second, *rest = file.read_text().splitlines()
        file.write_text("\n".join([second, first, *rest]))
    code, _, error = run(*words)
    assert code == 2
    assert "was trained with other text: the contents of data.sources have changed; rest" in error


# -- what is left of a start that took no step -----------------------------------------------


@pytest.fixture
def broken(run, recipe, tmp_path):
    """Words that start a run from weights with a number that is not finite."""
    words = [f"folder={tmp_path / 'x'}", "train.export=true", "train.steps=1"]
    assert run("train", recipe, *words)[0] == 0
    weights = load_file(tmp_path / "x" / "export" / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "x" / "export" / "model.safetensors", {"format": "pt"})
    return ["train", recipe, f"init_from={tmp_path / 'x' / 'export'}"]


@pytest.mark.parametrize("layout", ["single", pytest.param("dp2", marks=pytest.mark.slow)])
def test_a_start_that_takes_no_step_leaves_nothing(run, broken, tmp_path, layout):
    """run.toml and history.jsonl stayed, as of a run."""
    place = tmp_path / "deep" / "runs" / "b"
    code, _, error = run(*broken, f"folder={place}", f"layout={layout}")
    assert code == 2 and "norm.weight that are not finite" in error
    assert not (tmp_path / "deep").exists()


def test_what_was_there_before_a_start_stays(run, broken, tmp_path):
    place = tmp_path / "mine"
    (place / "tensorboard").mkdir(parents=True)
    for name in ("run.toml", "letter.txt", "log.txt", "tensorboard/old"):
        (place / name).write_text("mine")
    assert run(*broken, f"folder={place}")[0] == 2
    left = {path.relative_to(place).as_posix() for path in everything(place)}
    assert left == {"run.toml", "letter.txt", "log.txt", "tensorboard/old"}
    assert all((place / name).read_text() == "mine" for name in left - {"run.toml", "log.txt"})
    (tmp_path / "empty").mkdir()
    assert run(*broken, f"folder={tmp_path / 'empty'}")[0] == 2
    assert [*(tmp_path / "empty").iterdir()] == []


def test_a_run_that_has_logged_a_step_is_kept(run, recipe, tmp_path):
    """It diverges at its second step, and its log may say why."""
    words = [f"folder={tmp_path / 'c'}", "method.lr.peak=1e9", "method.lr.warmup_steps=0"]
    code, _, error = run("train", recipe, *words, "method.grad_clip=0")
    assert code == 2 and "training diverged" in error
    assert metrics(tmp_path / "c") and (tmp_path / "c" / "run.toml").is_file()


def test_a_limit_of_threads_before_the_first_step_is_a_sentence(run, recipe, tmp_path, monkeypatch):
    """As in a container that may start few: it was a traceback."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    code, _, error = run("train", recipe, f"folder={tmp_path / 'a'}")
    assert (code, error.count("\n")) == (1, 1)
    assert error.startswith("howdah: no thread can be started; start fewer ranks, or raise the lim")
