"""The run folder's tokenizer: there whole, or a sentence before the first step."""

import pytest
from full_disk import fill, small_disk

from howdah.plan.problems import BadInput
from howdah.train.keep import keep_tokenizer


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.json"
    path.write_text("a tokenizer")
    return path


def test_it_is_copied_whole(tmp_path, source):
    for before in (None, "", "another"):
        if before is not None:
            (tmp_path / "tokenizer.json").write_text(before)
        keep_tokenizer(source, tmp_path / "tokenizer.json")
        assert (tmp_path / "tokenizer.json").read_text() == "a tokenizer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.json", "tokenizer.json"]


def test_one_that_is_there_is_not_written(tmp_path, source):
    keep_tokenizer(source, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json.part").mkdir()  # nothing can be written now
    keep_tokenizer(source, tmp_path / "tokenizer.json")
    source.write_text("another")
    with pytest.raises(
        BadInput, match=r"cannot copy the tokenizer .*\(Is a directory\); make room"
    ):
        keep_tokenizer(source, tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_text() == "a tokenizer"


def test_folders_that_are_gone_are_a_sentence(tmp_path, source):
    for source_, to in ((source, tmp_path / "gone" / "t"), (tmp_path / "gone", tmp_path / "t")):
        with pytest.raises(BadInput, match=r"\(No such file or directory\)"):
            keep_tokenizer(source_, to)


@pytest.mark.root
def test_on_a_full_disk_the_one_that_is_there_will_do(tmp_path):
    source, disk = tmp_path / "source.json", tmp_path / "disk"
    source.write_text("a" * 10_000)
    disk.mkdir()
    with small_disk(disk, 64 << 10):
        keep_tokenizer(source, disk / "there.json")
        fill(disk)
        keep_tokenizer(source, disk / "there.json")
        with pytest.raises(BadInput, match=r"\(No space left on device\); make room there"):
            keep_tokenizer(source, disk / "tokenizer.json")
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "there.json"]
