"""Sources: which files are taken, in which order, and what identifies their contents."""

import os
import sys
from hashlib import blake2b

import pytest

from howdah.plan.problems import BadInput
from howdah.text import sources
from howdah.text.sources import Data, Source, contents, documents, files


def fill(folder, **texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)
    return Source(str(folder))


def test_the_standard_library_is_there_without_tests_and_packages():
    found = list(documents(Source()))
    unique = {blake2b(text.encode()).digest() for text in found}
    assert 500 < len(unique) < 1000
    assert 8e6 < sum(len(text.encode()) for text in found) < 16e6
    parts = {part for path in files(Source()) for part in path.parts}
    assert not parts & {"test", "tests", "site-packages", "dist-packages"}
    assert files(Source()) == files(Source())


def test_a_folder_gives_its_texts_by_name_and_nothing_hidden(tmp_path):
    source = fill(tmp_path, b_md="two", a_txt="one", c_bin="no", _hidden_txt="no", empty_txt="")
    fill(tmp_path / "deep", d_py="three")
    fill(tmp_path / ".git", e_txt="no")
    (tmp_path / "more.jsonl").write_text('{"text": "line"}\n')
    assert list(documents(source)) == ["one", "two", "line", "three"]


def test_a_file_may_have_any_name(tmp_path):
    (tmp_path / "book").write_text("once upon a time")
    assert list(documents(Source(str(tmp_path / "book")))) == ["once upon a time"]


def test_a_file_given_alone_is_cut_finer_than_one_in_a_folder(tmp_path):
    text = "a paragraph of a book\n\n" * 5000
    (tmp_path / "book.txt").write_text(text)
    alone = list(documents(Source(str(tmp_path / "book.txt"))))
    assert "".join(alone) == text and len(alone) > 5
    assert list(documents(Source(str(tmp_path)))) == [text]


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(BadInput, match="nowhere does not exist"):
        list(documents(Source(str(tmp_path / "nowhere"))))
    with pytest.raises(BadInput, match=r"holds no text; .*\.txt"):
        list(documents(Source(str(tmp_path))))


def test_undecodable_documents_are_skipped_and_told_or_stop(tmp_path):
    source = fill(tmp_path, a_txt="fine")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 au lait")
    told = []
    assert list(documents(source, skipped=told.append)) == ["fine"]
    assert told == [f"{tmp_path / 'b.txt'}: the byte at offset 3 is not UTF-8"]
    with pytest.raises(BadInput, match=r"b\.txt: the byte at offset 3 .* 'skip'"):
        list(documents(source, "stop"))


@pytest.mark.parametrize("path", ["hf:somebody/something", "saved"])
def test_the_datasets_library_is_asked_for_by_the_extra(tmp_path, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    if path == "saved":
        path = fill(tmp_path / path).path
        (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    with pytest.raises(BadInput, match=r"needs the package datasets; .*howdah\[data\]"):
        list(documents(Source(path)))


def test_contents_are_the_bytes_wherever_they_stand(tmp_path):
    here, there = fill(tmp_path / "here", a_txt="one"), fill(tmp_path / "there", a_txt="one")
    os.utime(tmp_path / "there" / "a.txt", ns=(1, 1))
    assert contents(here) == contents(there)
    before = contents(here)
    fill(tmp_path / "here", a_txt="two")
    assert contents(here) != before
    fill(tmp_path / "there", b_txt="")
    assert contents(there) != before


def test_contents_of_large_sources_are_sizes_and_times(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SMALL", 2)
    source, path = fill(tmp_path, a_txt="one"), tmp_path / "a.txt"
    os.utime(path, ns=(1, 1))
    before = contents(source)
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert contents(source) == before
    os.utime(path, ns=(2, 2))
    assert contents(source) != before


def test_the_field_is_part_of_the_contents(tmp_path):
    path = fill(tmp_path, a_txt="one").path
    assert contents(Source(path, field="a")) != contents(Source(path, field="b"))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Source(""), "a path is empty"),
        (lambda: Source("x", weight=0), "the weight of 'x' is 0"),
        (lambda: Source("x", weight=float("nan")), "the weight of 'x' is nan"),
        (lambda: Data(sources=()), "data.sources is empty"),
        (lambda: Data(sequence=0), "data.sequence is 0"),
        (lambda: Data(held_out=0.0), "data.held_out is 0.0"),
        (lambda: Data(held_out=1.0), "data.held_out is 1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, sentence):
    with pytest.raises(BadInput, match=sentence):
        make()
