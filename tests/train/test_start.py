"""The start of a run, before its first step: what cannot be written is a sentence."""

import os

import pytest
from full_disk import FULL

from howdah.base.errors import UserError
from howdah.cli import train as cli_train
from howdah.config.recipe import load_run
from howdah.train.checkpointing import keep_tokenizer
from howdah.train.run_folder import _locked, lock
from howdah.train.start import prepare_tokens, vocab_note


def test_a_disk_that_is_full_before_the_first_step(make_job, recipe, tmp_path):
    """The run's own recipe is the first that is written there: it was a traceback."""
    job, run = make_job("a"), load_run(recipe, [f"folder={tmp_path / 'a'}"])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.toml.part").symlink_to(FULL)
    sentence = r"cannot write .*/a/run\.toml: No space left on device; make room there, or give an"
    with pytest.raises(UserError, match=sentence):
        cli_train._make_ready(run, job, first=True)
    assert [*(tmp_path / "a").iterdir()] == []


def test_a_start_that_fails_leaves_no_folder(make_job, recipe, tmp_path):
    """Failed starts left run folders with nothing in them but a lock."""
    words = [f"data.tokenizer={tmp_path}", f"folder={tmp_path / 'runs' / 'a'}"]
    with pytest.raises(UserError, match="does not exist"):
        cli_train._make_ready(load_run(recipe, words), make_job("runs/a", *words), first=True)
    assert not (tmp_path / "runs").exists()
    with lock(tmp_path / "b"):
        with pytest.raises(UserError, match="another live run"), lock(tmp_path / "b"):
            pass
        assert (tmp_path / "b" / "lock").exists()  # it is the other run's


def test_a_tokenizer_of_terabytes_in_the_run_folder_is_replaced(tmp_path):
    """It was read to be compared, and the run ended for want of memory."""
    (tmp_path / "source").write_text("{}")
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", 1 << 40)
    keep_tokenizer(tmp_path / "source", tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lock_that_is_no_file_is_a_sentence(tmp_path, make):
    """It was a traceback of io, or exit code 1 without what to do."""
    make(tmp_path / "lock")
    with pytest.raises(UserError, match=r"lock is a (pipe|folder).*; remove it"), lock(tmp_path):
        pass


def test_a_lock_that_was_removed_is_not_held(tmp_path):
    """A start that fails removes its lock; another start may have opened the file before."""
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("r+") as file:
        (tmp_path / "lock").unlink()
        assert not _locked(file, tmp_path / "lock")
        (tmp_path / "lock").touch()
        assert not _locked(file, tmp_path / "lock")


def test_a_model_with_rows_that_no_token_has_is_noted(make_job):
    """300,000 of them were trained on a text of 0.3 MB, and nothing said what the tokenizer has."""
    said = []
    corpus = prepare_tokens(make_job("a", "model.vocab=5000"), said.append)
    assert said[-1] == (
        f"note        the tokenizer has {corpus.entries:,} entries and model.vocab is 5,000: "
        f"{5000 - corpus.entries:,} rows of the embedding stand for no token; "
        f"model.vocab={corpus.entries} leaves them out"
    )
    said.clear()
    prepare_tokens(make_job("a", f"model.vocab={corpus.entries}"), said.append)
    assert not any("note" in line for line in said)
    assert vocab_note(50257, 50304) == "" and vocab_note(151669, 151936) == ""
