"""What is wrong with a recipe: told at once, in one sentence, by the name of the key."""

import os

import pytest
from test_recipe import refusal

from howdah.config.recipe import (
    RENAMED,
)


def test_several_problems_are_told_at_once(recipe):
    sentence = refusal(recipe, "method.dropout=1.5", "train.steps=0", "data.sequence_length=64")
    for name in ("method.dropout", "train.steps", "data.sequence_length"):
        assert name in sentence


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sead=1", "unknown key 'sead'; did you mean 'seed'?"),
        ("model.layer=1", "unknown key 'model.layer'; did you mean 'model.layers'?"),
        (
            "method.optimiser.name=sgd",
            "unknown key 'method.optimiser'; did you mean 'method.optimizer'?",
        ),
        ("warmup_steps=3", "unknown key 'warmup_steps'; here it is 'method.lr.warmup_steps'"),
        ("model.rope_scaling={factor=2, lo=1}", "unknown key 'model.rope_scaling.lo'; did you"),
        ("data.sources=[{path='a', wait=1}]", "unknown key 'data.sources[0].wait'; did you mean"),
        ("train.steps=many", "train.steps is 'many'; it must be a whole number"),
        ("train.steps=1.5", "train.steps is 1.5; it must be a whole number"),
        ("method.precision=fp7", "method.precision is 'fp7'; it must be 'float32', 'bf16',"),
        ("method.optimizer.name=adan", "method.optimizer.name is 'adan'; it must be 'adamw'"),
        ("method.optimizer.name=muon", "method.optimizer.name is 'muon'; it is not there yet: "),
        (
            "method.optimizer.name=adamw_bnb_8bit",
            "method.optimizer.name is 'adamw_bnb_8bit'; it is not there yet: an optimizer's",
        ),
        (
            "method.optimizer.name=adamw_torch",
            "method.optimizer.name is 'adamw_torch'; here this is method.optimizer.name=adamw",
        ),
        ("batch=3", "batch is 3; it must be a table: write batch.global_batch=3"),
        ("data=8", "data is 8; it must be a table: write data.sources=PATH"),
        ("data=a.txt", "data is 'a.txt'; it must be a table: write data.sources='a.txt'"),
        ("method.lr=3", "method.lr is 3; it must be a table: write method.lr.peak=3"),
        (
            "method.optimizer=adam",
            "method.optimizer is 'adam'; it must be a table: write method.optimizer.name='adam'",
        ),
        ("model.preset=labtop", "model.preset 'labtop' is unknown; did you mean 'laptop'?"),
        ("method.sync={kind='bps'}", "method.sync.kind is 'bps'; it must be 'bsp', 'ssp' or 'asp'"),
        ("seed", "'seed' changes nothing; write key=value, such as seed=1"),
        ("seed.x=1", "seed.x: seed is a single value, not a table"),
        ("layout=ddp2", "layout 'ddp2': unknown word 'ddp2'; here it is written 'dp2'"),
        ("layout=dp2 dp2", "layout 'dp2 dp2': 'dp2' says dp a second time; say it once"),
        ("layout=dp0", "layout 'dp0': dp0 must be at least dp1"),
        ("layout=dp*", "layout 'dp*' takes the number of processes from torchrun"),
        ("layout=dp2 x2", None),
        ("layout=x9", None),
        ("device=cuda", "device is cuda, but torch sees no CUDA device here; use device=cpu"),
        ("data.sources=[]", "data.sources is empty; name at least one"),
        ("data.validation_share=0", "data.validation_share is 0.0; it must be above 0"),
        ("data.validation=[{path='a', weight=2}]", "unknown key 'data.validation[0].weight'"),
        ("data.validation=a", "data.validation names the text to hold out, and data.validation_sh"),
        ("data.end_token=x", "data.end_token names a token of data.tokenizer, which is not given"),
        ("train.keep_last=0", "train.keep_last is 0; it must be at least 1"),
        ("train.save_every=-1", "train.save_every is -1; it must be at least 0"),
    ],
)
def test_a_mistake_is_one_sentence(recipe, override, sentence):
    if sentence is None:  # a batch number more than the two that the recipe needs
        found = refusal(recipe, override, "batch.micro_batch=1")
        assert "drop one of the three" in found
    else:
        assert refusal(recipe, override).startswith(sentence)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("kind='bps'", "method.sync.kind is 'bps'; it must be 'bsp', 'ssp' or 'asp'"),
        ("kind='ssp', bond=3", "unknown key 'method.sync.bond'; did you mean 'method.sync.bound'?"),
    ],
)
def test_of_servers_whose_rule_is_misspelt_nothing_else_is_said(recipe, override, sentence):
    assert refusal(recipe, f"method.sync={{{override}}}", "layout=dp2 server1") == sentence


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_key_that_has_another_name_now_is_told_its_name(recipe, old, new):
    found = refusal(recipe, f"{old}=1")
    assert found.startswith(f"unknown key '{old}'; it is called '{new}' now")


def test_mistakes_of_every_kind_are_told_together(recipe):
    """Types, unknown keys, bounds and the words of the layout: each is wrong alone."""
    recipe.write_text(recipe.read_text().replace('layout = "single"', 'layout = "ddp2"'))
    found = refusal(
        recipe, "seed=abc", "method.dropout=2", "train.stepz=3", "batch.global_batch=true"
    )
    assert found == (
        "seed is 'abc'; it must be a whole number; "
        "batch.global_batch is True; it must be a whole number; "
        "unknown key 'train.stepz'; did you mean 'train.steps'?; "
        "layout 'ddp2': unknown word 'ddp2'; here it is written 'dp2'; "
        "method.dropout is 2.0; it must be below 1"
    )
    found = refusal(recipe, "model.preset=labtop", "seed=x")  # no model, and yet the rest
    assert found.startswith("model.preset 'labtop' is unknown; did you mean 'laptop'?; seed is 'x'")


def test_a_layout_that_cannot_be_read_hides_no_number(recipe):
    found = refusal(recipe, "layout=ddp2", "threads=-1", "train.steps=0", "name=..")
    for name in ("layout 'ddp2'", "threads is -1", "train.steps is 0", "name is '..'"):
        assert name in found


def test_of_very_many_mistakes_the_first_are_told(recipe):
    recipe.write_text("".join(f"key{n} = 1\n" for n in range(1000)) + recipe.read_text())
    found = refusal(recipe)
    assert "'key11' and 988 more; known are: " in found and len(found) < 4000


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("threads=-1", "threads is -1; it must be at least 0, which shares the cores out"),
        ("threads=1025", "threads is 1025; it must be at most 1,024"),
        ("seed=9223372036854775808", "it must be at most 9,223,372,036,854,775,807"),
        ("seed=" + "9" * 5000, "it must be a whole number"),
        ("seed=0x" + "f" * 5000, "seed is int that is too long to show; it must be at most"),
        ("model.layers=9223372036854775807", "it must be at most 1,000"),
        ("model.vocab=true", "model.vocab is True; it must be a whole number"),
        ("model=laptop", "model is 'laptop'; write the name of a preset as model.preset=NAME"),
        ("model.preset=3", "model.preset is 3; it must be a name, like laptop"),
        ("method.optimizer.betas=[0.9]", "betas is [0.9]; it must be a list of 2 numbers"),
        ("method.lr.peak=nan", "method.lr.peak is nan; it must be a number"),
        ("method.optimizer.epsilon=-inf", "epsilon is -inf; it must be at least 0"),
        ("train.steps=100000000", "train.steps is 100000000; it must be at most 10,000,000"),
        ("train.steps=" + "[" * 50_000, "it must be a whole number"),
        (
            "data.sequence_length=1000000000",
            "data.sequence_length is 1000000000; it must be at most",
        ),
        ("data.sources=['']", "data.sources[0].path is empty; name a file, a folder or"),
        ("data.sources=[{path='x', weight=0}]", "data.sources[0].weight is 0.0; it must be above"),
        ("data.sources=['" + "x" * 300 + "']", "a path has at most 4,096 characters, and 255"),
        (
            'data.tokenizer="a\\u0000"',
            "data.tokenizer is 'a\\x00'; it must be a text in quotes, and it",
        ),
        ("folder=" + "x" * 300, "and a path has at most 4,096 characters, and 255"),
        ("layout=", "layout is empty; write single for one process"),
        ("layout=dp99999999", "dp99999999 must be at most dp1048576"),
        ("layout=dp1000 x1", "would start 1,000 processes on this machine; start it on several"),
        ("name=", "name is ''; it must be able to name a folder"),
        ("name=a/b", "name is 'a/b'; it must be able to name a folder"),
        ("a." * 2000 + "b=1", "unknown key 'a'"),
    ],
)
def test_a_number_or_a_word_out_of_bounds_is_refused_at_once(recipe, override, sentence):
    more = ["batch.global_batch=1000"] if "dp1000" in override else []
    found = refusal(recipe, override, *more)
    assert sentence in found and len(found) < 400


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a = " + "[" * 100_000, "its lists or tables are nested too deep"),
        ("seed = " + "9" * 5000, "a number has thousands of digits"),
        ("a." * 100_000 + "a = 1", "a line has 1,000 dots or more"),
        ("#" * 300_000, "it has more than the 262,144 bytes that are read"),
    ],
)
def test_a_recipe_that_breaks_a_parser_is_a_sentence(recipe, text, sentence):
    recipe.write_text(text)
    assert sentence in refusal(recipe)


def test_a_pipe_is_no_recipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    assert "it is a pipe, a socket or a device" in refusal(tmp_path / "pipe.toml")


def test_a_table_without_a_model_is_refused(recipe):
    recipe.write_text("seed = 1\n")
    assert refusal(recipe).startswith("model is missing; write model.preset=laptop, or")


@pytest.mark.parametrize(
    "content", [b"layout = dp2", b"\xff\xfe\x00", b"[model\n", b"a = 1\na = 2"]
)
def test_what_is_not_toml_is_refused(tmp_path, content):
    (tmp_path / "bad.toml").write_bytes(content)
    assert refusal(tmp_path / "bad.toml").startswith(f"{tmp_path / 'bad.toml'} is not TOML: ")


def test_what_is_not_there_is_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.toml")
    assert refusal(tmp_path).endswith(
        "run.toml: No such file or directory; no run has begun in this folder: name a recipe "
        "(.toml); a folder of text is named in its data.sources"
    )


def test_mistakes_of_every_stage_are_told_together(recipe):
    """A value that cannot be read hid those that do not fit together, such as layout and heads."""
    found = refusal(
        recipe, "seed=abc", "layout=tp3", "batch.micro_batch=100", "method.lr.peak=-1", "threads=-1"
    )
    for name in ("seed is 'abc'", "tp3 does not divide", "micro_batch 100", "lr.peak", "threads"):
        assert name in found
    found = refusal(recipe, "batch.global_batch=x", "layout=dp2", "method.dropout=2")
    assert found == (  # and nothing about a batch that is open
        "batch.global_batch is 'x'; it must be a whole number; "
        "method.dropout is 2.0; it must be below 1"
    )


def test_sizes_beside_a_folder_of_weights(recipe):
    """It was: width, heads, ffn_size, vocab, context are missing."""
    text = recipe.read_text()
    recipe.write_text(text[: text.index("[model]")] + text[text.index("[data]") :])
    assert refusal(recipe, "init_from=hf", "model.layers=2") == (
        "the table [model] lacks sizes, and those of init_from are used only without it: leave "
        "model.layers out"
    )
