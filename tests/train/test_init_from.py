"""Weights of a folder come with its tokenizer: with another one the embedding would be noise."""

import json

import pytest
from safetensors.torch import load_file, save_file

from howdah.base.errors import UserError
from howdah.comm.transport import SingleRank
from howdah.train.inputs import input_problems
from howdah.train.loop import train
from howdah.train.start import prepare_start, prepare_tokens, require_inputs


@pytest.fixture
def folder(workers, make_job, tmp_path):
    """A Hugging Face folder of a trained model."""
    from small_runs import train_on

    train_on(workers, make_job("a", "train.export=true", "train.steps=1"))
    return tmp_path / "a" / "export"


def test_the_folders_tokenizer_is_used(folder, make_job):
    job = make_job("b", f"init_from={folder}")
    assert job.data.tokenizer == str(folder)
    corpus = prepare_tokens(job, print)
    assert corpus.tokenizer_path.read_bytes() == (folder / "tokenizer.json").read_bytes()
    prepare_start(job, corpus)


def test_another_tokenizer_is_refused(folder, make_job, tmp_path):
    """Also one of the same size: what counts is which token each row stands for. `check` called it
    sound, and `train` told it when all text was encoded.
    """
    tokenizer, other = json.loads((folder / "tokenizer.json").read_bytes()), tmp_path / "other.json"
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    other.write_text(json.dumps(tokenizer), encoding="utf-8")
    job = make_job("b", f"init_from={folder}", f"data.tokenizer={other}")
    with pytest.raises(UserError, match=r"has another tokenizer than data\.tokenizer names; leave"):
        require_inputs(job)
    (told,) = input_problems(
        job.data, shape=job.shape, prompt="", init_from=job.init_from, folder=job.folder
    )
    assert told.startswith(f"init_from: {folder} has another tokenizer")
    other.write_bytes((folder / "tokenizer.json").read_bytes() + b"\n")
    require_inputs(job)


def test_a_folder_without_one_needs_a_name(folder, make_job):
    (folder / "tokenizer.json").rename(folder.parent / "tokenizer.json")
    with pytest.raises(UserError, match=r"has no tokenizer\.json, and with other tokens"):
        make_job("b", f"init_from={folder}")
    job = make_job("b", f"init_from={folder}", f"data.tokenizer={folder.parent}")
    prepare_start(job, prepare_tokens(job, print))


def test_numbers_that_are_not_finite_are_named(folder, make_job):
    """It was: training diverged; lower the rate."""
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"export holds numbers in norm\.weight that are not finite"
    ):
        train(make_job("b", f"init_from={folder}", "train.steps=1"), SingleRank())


def test_an_export_that_would_fail_is_refused_before_training(make_job, tmp_path):
    with pytest.raises(UserError, match=r"^train\.export is true, but model\.norm_at is 'after'"):
        make_job("a", "train.export=true", "model.norm_at=after")
    (tmp_path / "a" / "export").mkdir(parents=True)
    (tmp_path / "a" / "export" / "letter.txt").touch()
    job = make_job("a", "train.export=true")
    with pytest.raises(UserError, match="holds more than an export of howdah"):
        require_inputs(job)
