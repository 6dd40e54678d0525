"""Which checkpoints stay and which go."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from sample_state import about, only, parts, save, savers, silent, state

from howdah.base.errors import UserError
from howdah.checkpoint import save as saving
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


def test_a_folder_that_may_not_be_seen_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=PermissionError(13, "not for you")))
    with pytest.raises(UserError, match=f"^cannot read {tmp_path}: not for you; make it readable"):
        numbered(tmp_path)


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


def test_a_damaged_checkpoint_does_not_push_out_the_one_that_was_gone_on_from(tmp_path):
    """Of 45, a damaged 48 and 49 the newest two were kept, and 45 went."""
    for step in (40, 45, 48):
        save(tmp_path, step, state(seed=step))
    (step_folder(tmp_path, 48) / "index.json").write_text("{")
    (saver,) = savers(tmp_path, 1, keep=2, start=45)

    def saved(step):
        saver.save(step=step, entries=parts(state(seed=step), 1)[0], about=about())
        saver.wait()
        return [int(path.name[5:]) for path in sorted(tmp_path.glob("step-*"))]

    assert saved(49) == [45, 48, 49]
    assert saved(50) == [49, 50]  # both are newer
    assert saved(51) == [50, 51]


def saved_by_one(folder, said, *rows, keep=1):
    """One process saves rows of (step, whether it is the best); what is there after each."""
    (saver,) = savers(folder, 1, keep=keep, say=said.append)
    there = []
    for step, best in rows:
        saver.save(step=step, entries=parts(state(seed=step), 1)[0], about=about(), best=best)
        saver.wait()
        there.append(steps(folder))
    return there


def test_a_checkpoint_that_is_a_link_goes_without_what_it_leads_to(tmp_path):
    """The link stayed, under another name."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for step in (1, 2):
        save(folder, step, state(seed=step), keep=5)
    (folder / "step-00000001").rename(elsewhere)
    (folder / "step-00000001").symlink_to(elsewhere)
    save(folder, 3, state(seed=3), keep=1)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    assert (elsewhere / "index.json").is_file()


def test_a_damaged_mark_is_said_once_and_old_checkpoints_go(tmp_path):
    """Nothing was removed any more, with a sentence at each save, until the disk was full."""
    for step in (1, 2, 3):
        save(tmp_path, step, state(seed=step), keep=2, best=step == 1)
    (tmp_path / "best.json").write_text("{")
    said = []
    there = saved_by_one(tmp_path, said, (4, False), (5, False), (6, False), (7, True), (8, False))
    # Each of 1 to 4 may be the best: 5 and 6 were saved by a run that knows they are not.
    assert there == [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7], [7, 8]]
    path = tmp_path / "best.json"
    assert said == [
        f'{path} is damaged; write {{"step": N}} into it, or delete it; until then checkpoints '
        "stay of which one may be best: 1, 2, 3, 4"
    ]
    assert best_step(tmp_path) == 7


def test_whoever_repairs_the_mark_says_what_stays(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, state(seed=step))
    (saver,) = savers(tmp_path, 1, keep=1, say=(said := []).append)
    for step, mark in ((4, "{"), (5, '{"step": 2}'), (6, "["), (7, None)):
        (tmp_path / "best.json").write_text(mark) if mark else (tmp_path / "best.json").unlink()
        saver.save(step=step, entries=parts(state(), 1)[0], about=about())
        saver.wait()
        assert steps(tmp_path) == {4: [1, 2, 3, 4], 5: [2, 5], 6: [2, 5, 6], 7: [7]}[step]
    assert [sentence.rpartition("best: ")[2] for sentence in said] == ["1, 2, 3, 4", "2, 5, 6"]


def test_a_best_that_cannot_be_marked_stays_and_is_marked_later(tmp_path):
    """A mark that failed left nothing removed; and its checkpoint was nobody's, and went."""
    (tmp_path / "best.json").mkdir()
    said = []
    (saver,) = savers(tmp_path, 1, keep=1, say=said.append)
    for step, best in ((1, False), (2, True), (3, False), (4, False)):
        if step == 4:
            (tmp_path / "best.json").rmdir()
        saver.save(step=step, entries=parts(state(), 1)[0], about=about(), best=best)
        saver.wait()
        assert steps(tmp_path) == {1: [1], 2: [2], 3: [2, 3], 4: [2, 4]}[step]
    assert best_step(tmp_path) == 2
    assert len(said) == 2
    assert said[0].startswith(f"{tmp_path / 'best.json'} is damaged; ")
    assert said[1].startswith("step 2 is saved, but tidying up after it failed: Is a directory")


def test_trouble_with_tidying_up_does_not_cost_the_checkpoint(tmp_path, monkeypatch):
    """It is said once, although every save has it."""
    monkeypatch.setattr(saving, "prune", Mock(side_effect=OSError(5, "Input/output error")))
    said = []
    assert saved_by_one(tmp_path, said, (1, False), (2, False)) == [[1], [1, 2]]
    assert said == ["step 1 is saved, but tidying up after it failed: Input/output error"]
    assert newest(tmp_path, silent).step == 2


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
