"""Which checkpoints stay and which go."""

import os

import pytest
from sample_state import only, save, silent, state

from howdah.base.errors import UserError
from howdah.checkpoint.folders import best_step, clean, numbered, step_folder, steps
from howdah.checkpoint.load import newest


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step, state(seed=step), keep=2, best=step == 2)
    assert steps(tmp_path) == [2, 5, 6]
    save(tmp_path, 7, state(seed=7), keep=2, best=True)
    assert steps(tmp_path) == [6, 7]
    assert best_step(tmp_path) == 7
    assert only(tmp_path) == ["best.json", "step-00000006", "step-00000007"]


def test_a_later_damaged_checkpoint_does_not_push_out_the_one_just_saved(tmp_path):
    # A run that passed over a damaged step 30 resumes from 10 and saves 20, keeping two.
    for step in (5, 10, 30):
        save(tmp_path, step, state(seed=step))
    (step_folder(tmp_path, 30) / "index.json").write_text("{")
    save(tmp_path, 20, state(seed=20), keep=2)
    assert steps(tmp_path) == [10, 20, 30]
    said = []
    assert newest(tmp_path, said.append).step == 20
    assert len(said) == 1


def test_trouble_with_tidying_up_does_not_cost_the_checkpoint(tmp_path):
    (tmp_path / "best.json").write_text("{")
    said = []
    save(tmp_path, 1, state(), say=said.append)
    assert "step 1 is saved, but tidying up after it failed" in said[0]
    assert newest(tmp_path, silent).step == 1


@pytest.mark.parametrize(
    "text",
    [
        *('{"step": 1e999}', '{"step": true}', '{"step": -1}', '{"step": "1"}', '{"step": 1.0}'),
        *('{"step": 99999999999}', '{"step": ' + "9" * 5000 + "}", "[" * 100_000, "[1]", "{}", "0"),
    ],
)
def test_a_damaged_mark_is_a_sentence(tmp_path, text):
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(UserError, match=r"best\.json is damaged; write"):
        best_step(tmp_path)


def test_a_mark_that_is_no_file_is_damaged(tmp_path):
    os.mkfifo(tmp_path / "best.json")
    with pytest.raises(UserError, match=r"best\.json is damaged"):
        best_step(tmp_path)


@pytest.mark.parametrize(
    "name", ["step-1", "step-0000000020", "step-٠٠٠٠٠٠٢٠", "step-00000001.tmp", "step-" + "9" * 200]
)
def test_names_that_no_checkpoint_has(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "step-00000007").mkdir()
    assert numbered(tmp_path) == [7]


def test_clean_removes_what_died_and_nothing_else(tmp_path):
    save(tmp_path, 1, state(), best=True)
    before = only(tmp_path)
    for name in ("step-00000002.tmp", "step-00000001.old.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.done").write_text("{}")
    (tmp_path / "best.json.part").write_text("{")
    (tmp_path / "notes.txt").write_text("mine")
    clean(tmp_path)
    assert only(tmp_path) == sorted([*before, "notes.txt"])
    clean(tmp_path / "not there")


def test_a_draft_that_was_given_up_goes_with_a_later_save(tmp_path):
    for step in (1, 9):
        (tmp_path / f"step-0000000{step}.tmp").mkdir(parents=True)
    save(tmp_path, 5, state())  # a rank may already be at step 9
    assert only(tmp_path) == ["step-00000005", "step-00000009.tmp"]


def test_steps_are_ordered_by_number(tmp_path):
    for step in (123456789, 5, 99999999):
        save(tmp_path, step, state())
    (tmp_path / "step-abc").mkdir()
    assert steps(tmp_path) == [5, 99999999, 123456789]
