"""Weights of a folder come with its tokenizer: with another one the embedding would be noise."""

import json

import pytest

from howdah.base.errors import UserError
from howdah.train.start import prepare_start, prepare_tokens


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
    prepare_start(job, corpus, print)


def test_another_tokenizer_is_refused(folder, make_job, tmp_path):
    """Also one of the same size: what counts is which token each row stands for."""
    tokenizer, other = json.loads((folder / "tokenizer.json").read_bytes()), tmp_path / "other.json"
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    other.write_text(json.dumps(tokenizer), encoding="utf-8")
    job = make_job("b", f"init_from={folder}", f"data.tokenizer={other}")
    with pytest.raises(UserError, match=r"has another tokenizer than data\.tokenizer names; leave"):
        prepare_start(job, prepare_tokens(job, print), print)


def test_a_folder_without_one_needs_a_name(folder, make_job):
    (folder / "tokenizer.json").rename(folder.parent / "tokenizer.json")
    with pytest.raises(UserError, match=r"has no tokenizer\.json, and with other tokens"):
        make_job("b", f"init_from={folder}")
    job = make_job("b", f"init_from={folder}", f"data.tokenizer={folder.parent}")
    prepare_start(job, prepare_tokens(job, print), print)
