"""The command line from outside: what it prints, how it exits, and what it leaves behind.

Starting Python with torch takes seconds, so mistakes are made in this process; what is about
processes (launchers, signals, a rank that dies) is in test_cli_processes.py.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import losses

from howdah.cli import main as cli
from howdah.cli import train as cli_train
from howdah.train import loop
from howdah.train.run_folder import lock


def everything(folder):
    """Every file below a folder with its bytes."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# -- mistakes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.stepz=3"], "unknown key 'train.stepz'; did you mean 'train.steps'?"),
        (["train.steps=soon"], "train.steps is 'soon'; it must be a whole number"),
        (["layout=dp2 dq2"], "layout 'dp2 dq2': unknown word 'dq2'"),
        (["layout=single dp2"], "layout 'single dp2': 'dp2' says dp a second time; say it once"),
        (["batch.micro_batch=2", "layout=x5"], "batch.global_batch 6 on 1 replicas with"),
        (["data.sources=['nowhere/at/all']"], "data.sources: nowhere/at/all does not exist; "),
        (["batch.global_batch=100000"], "data.sources: there are "),
        (["data.tokenizer=nowhere"], "data.tokenizer: nowhere does not exist; name a "),
        (["model.vocab=100"], "model.vocab is 100, but 256 bytes and "),
        (["folder=/dev/null/x"], "cannot write the run folder /dev/null/x: Not a directory; "),
        (["init_from=gpt2"], f"{Path.cwd() / 'gpt2'} does not exist; init_from names the folder "),
        (["device=cuda"], "device is cuda, but "),
        (["quick"], "'quick' changes nothing; write key=value, such as seed=1"),
        (["train.steps.x=1"], "train.steps.x: steps is a single value, not a table"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_exit_code_2(recipe, refused, tmp_path, words, sentence):
    place = [] if words[0].startswith("folder=") else [f"folder={tmp_path / 'a'}"]
    if words == ["device=cuda"] and cli_train.this_machine().cuda:
        pytest.skip("there is a CUDA device")
    assert refused("train", recipe, *place, *words).startswith(sentence)
    assert set(everything(tmp_path / "a")) <= {tmp_path / "a" / "lock"}


def test_a_recipe_that_is_none(refused, tmp_path):
    assert refused("train", tmp_path / "x.toml").startswith("cannot read the recipe ")
    assert refused("train", tmp_path).startswith("cannot read the recipe ")
    told = refused("train", "https://example.org/a.toml")
    assert told.endswith("; it is an address: download it, and name the file")
    (tmp_path / "x.toml").write_bytes(bytes(range(256)))
    assert " is not TOML: " in refused("train", tmp_path / "x.toml")


def test_text_that_cannot_be_used(recipe, refused, text, tmp_path):
    place = f"folder={tmp_path / 'a'}"
    (tmp_path / "empty").mkdir()
    assert " holds no text; " in refused(
        "train", recipe, place, f"data.sources=['{tmp_path / 'empty'}']"
    )
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a"}\n{"body": "b"}\n')
    sentence = refused("train", recipe, place, f"data.sources=['{lines}']")
    assert f"{lines}" in sentence and "line 2" in sentence and "text" in sentence
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "1.txt").write_bytes(b"good until \xff here")
    sentence = refused(
        "train", recipe, place, f"data.sources=['{tmp_path / 'bytes'}']", "data.undecodable=stop"
    )
    assert "1.txt" in sentence and "repair it, or set data.undecodable to 'skip'" in sentence


def test_an_unusable_cache(recipe, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("HOWDAH_CACHE", "/dev/null")
    sentence = refused("train", recipe, f"folder={tmp_path / 'a'}")
    assert sentence.startswith("the token cache /dev/null/howdah cannot be used (Not a directory)")


def test_a_layout_that_does_not_fit_torchrun(recipe, refused, howdah, monkeypatch, tmp_path):
    launched = {**os.environ, "RANK": "1", "WORLD_SIZE": "3"}
    monkeypatch.setattr(os, "environ", launched)
    command = ["train", recipe, f"folder={tmp_path / 'a'}", "layout=dp2"]
    assert "needs 2 processes but there are 3; use dp3 or dp*" in refused(*command)
    monkeypatch.setattr(os, "environ", {**launched, "LOCAL_RANK": "1"})
    monkeypatch.setattr(cli, "ALONE", 0.0)  # nobody ends it: no other rank has met the mistake
    assert "needs 2 processes but there are 3" in refused(*command)


@pytest.mark.parametrize("launched", [False, True])
def test_a_live_run_is_left_alone(recipe, refused, monkeypatch, tmp_path, launched):
    """Under torchrun the second run once wrote its run.toml before it looked at the lock."""
    with lock(tmp_path / "a"):
        (tmp_path / "a" / "run.toml").write_text("the live run's")
        if launched:
            rank = {"RANK": "0", "WORLD_SIZE": "1"}
            monkeypatch.setattr(os, "environ", {**os.environ, **rank})
        sentence = refused("train", recipe, f"folder={tmp_path / 'a'}")
        assert sentence.startswith(f"another live run is writing {tmp_path / 'a'}; wait for it")
        assert (tmp_path / "a" / "run.toml").read_text() == "the live run's"


def test_a_run_that_cannot_go_on_is_left_as_it_was(trained, refused, recipe):
    before = everything(trained)
    assert " holds a model with layers 2, this run has 3; " in refused(
        "train", trained, "model.layers=3"
    )
    assert refused("train", trained, "train.steps=5").endswith(
        "step-00000020 is past train.steps 5; make it 20 or more, or give another folder=PATH"
    )
    assert " was trained with seed 1, this run has 2" in refused("train", trained, "seed=2")
    assert " holds the state of adamw, this run uses sgd; " in refused(
        "train", recipe, f"folder={trained}", "method.optimizer.name=sgd", "--resume"
    )
    assert everything(trained) == before


def test_damaged_checkpoints(trained, howdah, refused):
    parts = sorted((trained / "checkpoints").glob("step-*/*.safetensors"))
    parts[1].write_bytes(parts[1].read_bytes()[:-1])
    code, out, _ = howdah("train", trained)
    assert code == 0
    assert "step-00000020 is passed over: rank-00000.safetensors has " in out
    assert out.count(" is passed over: ") == 1
    assert "going on from step 10, saved on single" in out
    for part in parts:
        part.write_bytes(part.read_bytes()[:-1])
    before = everything(trained)
    assert refused("train", trained).startswith(f"every checkpoint in {trained / 'checkpoints'} is")
    assert everything(trained) == before


def test_folders_that_hold_no_run(refused, tmp_path):
    nothing = f"{tmp_path} has no whole checkpoint; train it first, or name a run folder"
    assert refused("sample", tmp_path, "a") == nothing
    assert refused("export", tmp_path, "--to", tmp_path / "b") == nothing
    assert refused("export", tmp_path, "--best", "--to", tmp_path / "b") == nothing.replace(
        "whole", "best"
    )
    assert not (tmp_path / "b").exists()
    assert refused("trace", tmp_path / "b").startswith(f"{tmp_path / 'b'} is no run folder; give")
    assert refused("trace", tmp_path).startswith("cannot read the recipe ")


def test_an_export_never_replaces_anything_else(trained, refused, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    sentence = refused("export", trained, "--to", tmp_path / "mine")
    assert sentence.startswith(f"{tmp_path / 'mine'} is not empty and holds more than an export")
    assert everything(tmp_path / "mine") == {tmp_path / "mine" / "letter.txt": b"dear"}
    assert "a file; " in refused("export", trained, "--to", tmp_path / "mine" / "letter.txt")
    assert refused("export", trained, "--to", "/dev/null/x").startswith("cannot export to /dev/nu")
    words = ("export", trained, "--to", tmp_path / "out", "--precision")
    assert refused(*words, "fp16") == "--precision is 'fp16'; it must be float32 or bf16"
    assert refused(*words, "bf16", "--adapter").startswith("--precision is of a whole model, and ")


def test_compiled_blocks_need_a_compiler(recipe, refused, tmp_path, monkeypatch):
    """torch asks for it at the first step: it was a traceback."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    told = refused("train", recipe, "compile=true", f"folder={tmp_path / 'a'}")
    assert told.startswith("compile is true, but the C++ compiler that torch.compile uses, no-such")
    assert not (tmp_path / "a").exists()


def test_a_draw_that_means_nothing(trained, refused):
    assert refused("sample", trained, "a", "--temperature=-1").startswith("temperature is -1.0; ")
    assert refused("sample", trained, "a", "--top-p=2").startswith("top_p is 2.0; ")
    assert refused("sample", trained, "a", "--top-k=-1").startswith("top_k is -1; ")


def test_a_defect_keeps_its_traceback(recipe, monkeypatch, tmp_path):
    def broken(*_, **__):
        raise ValueError("a defect")

    monkeypatch.setattr(loop, "place", broken)
    monkeypatch.setattr(sys, "argv", ["howdah", "train", str(recipe), f"folder={tmp_path / 'a'}"])
    with pytest.raises(ValueError, match="a defect"):
        cli.run()


# -- what the commands do ----------------------------------------------------------


def test_a_run_is_trained_sampled_exported_and_begun_from(howdah, trained, recipe, tmp_path):
    first = howdah("sample", trained, "7 follows", "--length", 12, "--seed", 3)
    assert first[0] == 0 and first[1].startswith("7 follows")
    assert first == howdah("sample", trained, "7 follows", "--length", 12, "--seed", 3)

    code, out, _ = howdah("export", trained, "--to", tmp_path / "out")
    assert (code, out) == (0, f"step 20 of {trained} is in {tmp_path / 'out'}\n")
    assert howdah("export", trained, "--to", tmp_path / "out")[0] == 0  # replaces its own

    half = ("export", trained, "--precision", "bf16", "--to", tmp_path / "half")
    assert howdah(*half)[0] == 0
    both = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "half")]
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(both[0][name].bfloat16(), one) for name, one in both[1].items())
    assert '"bfloat16"' in (tmp_path / "half" / "config.json").read_text()

    code, out, _ = howdah("trace", trained)
    assert code == 0 and out.startswith("layout      single x1, step ")
    assert (trained / "trace" / "trace.svg").read_text().count("</svg>") == 1

    text = recipe.read_text()
    recipe.write_text(text[: text.index("[model]")] + text[text.index("[data]") :])
    begin = [f"init_from={tmp_path / 'out'}"]  # its tokenizer is used
    code, out, error = howdah("train", recipe, f"folder={tmp_path / 'b'}", *begin, "train.steps=1")
    assert code == 0, error
    assert losses(tmp_path / "b")[1] < 1.1 * losses(trained)[20]


def test_a_run_whose_settings_have_changed_is_not_resumed_by_accident(
    howdah, refused, trained, recipe, tmp_path
):
    """A sweep over learning rates into one folder gave equal losses and wrong records."""
    before = everything(trained)
    words = ["train", recipe, f"folder={trained}", "train.steps=22"]
    told = refused(*words, "method.lr.peak=5e-4", "seed=9")
    assert told == (
        f"{trained} has a run with other settings: seed was 1 and is 9; method.lr.peak was 0.003 "
        "and is 0.0005; go on with it by --resume, or start another run with folder=PATH"
    )
    assert everything(trained) == before
    told = refused("train", trained, f"init_from={tmp_path}", "data.tokenizer=" + str(trained))
    assert told == (
        f"init_from is {tmp_path}, but {trained} has begun from random weights; start another run "
        "with folder=PATH"
    )
    assert everything(trained) == before
    code, out, error = howdah(*words, "method.lr.peak=5e-4", "--resume")
    assert code == 0, error
    (note,) = [line for line in out.splitlines() if line.startswith("note")]
    assert note.startswith("note        the learning rate has changed: step 21 has 5.3")
    assert note.endswith(" where it had 0.0003")
    before = everything(trained)
    assert refused("train", trained, "method.lr.peak=1e-3").endswith(
        "has no step left, 22 of 22 are done, and method.lr.peak would change nothing; raise "
        "train.steps too"
    )
    assert everything(trained) == before
    code, _, error = howdah("train", trained, "train.steps=23", "method.lr.schedule=constant")
    assert code == 0, error  # the run folder itself is meant
    lines = (trained / "history.jsonl").read_text().splitlines()
    first, second, third = map(json.loads, lines)
    assert [line["step"] for line in (first, second, third)] == [0, 20, 22]
    assert first["changed"] == {}
    assert second["changed"] == {"method.lr.peak": [0.003, 0.0005], "train.steps": [20, 22]}
    assert third["changed"]["method.lr.schedule"] == ["cosine", "constant"]
    assert third["command"][1:3] == ["train", str(trained)]
    assert {"howdah", "torch", "python"} == set(third["versions"]) and third["host"]


def test_doctor_finds_what_the_machine_has(howdah):
    code, out, _ = howdah("doctor")
    assert code == 0 and "torch" in out and "cores" in out
