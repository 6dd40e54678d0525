"""Ranks meet in the file system: all parts are there, or there is no checkpoint."""

import multiprocessing
from itertools import permutations

import pytest
from sample_state import about, assert_holds, only, parts, save, savers, silent, state

from howdah.checkpoint.folders import draft_folder, step_folder, steps
from howdah.checkpoint.load import newest, open_checkpoint


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_ranks_come_in_any_order(tmp_path, order):
    team, entries = savers(tmp_path, 3), parts(state(), 3)
    for rank in order:
        team[rank].save(step=1, entries=entries[rank], about=about())
        if rank:
            team[rank].wait()
    team[0].wait()
    assert_holds(newest(tmp_path, silent), state())
    assert only(step_folder(tmp_path, 1)) == [
        "index.json",
        *(f"rank-0000{rank}.safetensors" for rank in range(3)),
    ]


def test_a_file_that_shrank_before_it_was_published(tmp_path):
    first, second = savers(tmp_path, 2, say=lambda sentence: None)
    mine, theirs = parts(state(), 2)
    second.save(step=1, entries=theirs, about=about())
    second.wait()
    file = draft_folder(tmp_path, 1) / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    first.save(step=1, entries=mine, about=about())
    first.wait()
    assert "rank-00001.safetensors has " in first.failed
    assert only(tmp_path) == []


def test_a_folder_that_is_removed_is_not_waited_for(tmp_path):
    """What the other rank wrote went with it: rank 0 waited ten minutes, and the next save for it.

    Without the mend the last wait ends after its hour.
    """
    folder = tmp_path / "checkpoints"
    first, _ = savers(folder, 2, say=lambda sentence: None, deadline=3600.0)
    first.save(step=1, entries=parts(state(), 2)[0], about=about())
    assert first.part()  # it has written, and waits for the other
    folder.rename(tmp_path / "away")  # at once: a removal file by file meets the saver's own
    first.wait()
    assert "rank-00000.safetensors was removed before the checkpoint was complete" in first.failed


def one_rank(folder, rank, world):
    saver = savers(folder, world)[rank]
    for step in (1, 2, 3):
        saver.save(step=step, entries=parts(state(seed=step), world)[rank], about=about())
    saver.wait()
    assert saver.failed is None


@pytest.mark.slow
def test_two_processes_save_into_one_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=one_rank, args=(tmp_path, 1, 2))
    other.start()
    one_rank(tmp_path, 0, 2)
    other.join()
    assert other.exitcode == 0
    for step in (1, 2, 3):
        checkpoint = open_checkpoint(step_folder(tmp_path, step))
        assert checkpoint.verify() == []
        assert_holds(checkpoint, state(seed=step))
    assert only(tmp_path) == [f"step-0000000{step}" for step in (1, 2, 3)]


def test_there_is_no_checkpoint_before_every_rank_is_done(tmp_path):
    # Rank 0's second save begins when rank 1's part of the first has come.
    first, second = savers(tmp_path, 2)
    mine, theirs = parts(state(), 2)
    first.save(step=1, entries=mine, about=about())
    assert steps(tmp_path) == []
    second.save(step=1, entries=theirs, about=about())
    first.save(step=2, entries=mine, about=about())
    assert steps(tmp_path) == [1]
    second.save(step=2, entries=theirs, about=about())
    first.wait()
    second.wait()
    assert steps(tmp_path) == [1, 2]


def test_a_rank_that_never_comes(tmp_path):
    save(tmp_path, 1, state(), world=2)
    said = []
    first = savers(tmp_path, 2, say=said.append, deadline=0.05)[0]
    first.save(step=2, entries=parts(state(), 2)[0], about=about())
    first.wait()
    (sentence,) = said
    assert first.failed in sentence
    assert "step 2 was not saved: rank 1 had not written its part after 0.05 s" in said[0]
    assert only(tmp_path) == ["step-00000001"]


def test_a_rank_that_cannot_write_is_not_waited_for(tmp_path):
    said = []
    first, second = savers(tmp_path, 2, say=said.append, deadline=60)
    mine, theirs = parts(state(), 2)
    blocked = tmp_path / "step-00000001.tmp" / "rank-00001.safetensors.part"
    blocked.mkdir(parents=True)
    second.save(step=1, entries=theirs, about=about())
    second.wait()
    assert "Is a directory" in second.failed
    first.save(step=1, entries=mine, about=about())
    first.wait()
    assert "rank 1 could not write: Is a directory" in first.failed
    assert only(tmp_path) == []
    for saver, entries in ((second, theirs), (first, mine)):  # training goes on
        saver.save(step=2, entries=entries, about=about())
    for saver in (first, second):
        saver.wait()
        assert saver.failed is None
    assert newest(tmp_path, silent).step == 2
    assert len(said) == 2


def test_a_rank_that_failed_may_try_again(tmp_path):
    first, second = savers(tmp_path, 2, say=lambda sentence: None)
    mine, theirs = parts(state(), 2)
    blocked = draft_folder(tmp_path, 1) / "rank-00001.safetensors.part"
    blocked.mkdir(parents=True)
    for _ in range(2):
        second.save(step=1, entries=theirs, about=about())
        second.wait()
        if blocked.exists():
            assert second.failed
            blocked.rmdir()
    first.save(step=1, entries=mine, about=about())
    first.wait()
    assert (first.failed, second.failed) == (None, None)
    assert_holds(newest(tmp_path, silent), state())


def test_ranks_that_save_different_states(tmp_path):
    said = []
    first, second = savers(tmp_path, 2, say=said.append)
    mine, theirs = parts(state(), 2)
    first.save(step=1, entries=mine, about=about())
    second.save(step=1, entries=theirs, about=about(samples=65))
    first.wait()
    second.wait()
    assert "must save the same state" in said[0]
    assert steps(tmp_path) == []


def test_a_state_with_a_hole_is_no_checkpoint(tmp_path):
    said = []
    (saver,) = savers(tmp_path, 1, say=said.append)
    saver.save(step=1, entries=parts(state(), 2)[0], about=about())
    saver.wait()
    assert "elements of weight of layers.0.q.weight were saved" in said[0]
    assert only(tmp_path) == []
