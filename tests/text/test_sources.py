"""Sources: which files are taken, in which order, and what identifies their contents."""

import gzip
import os
import re
import sys
from hashlib import blake2b
from pathlib import Path
from socket import AF_UNIX, socket

import pytest

from howdah.base.errors import UserError
from howdah.text import contents as identity
from howdah.text import sources, walking
from howdah.text.contents import contents
from howdah.text.sources import (
    Data,
    Source,
    Text,
    beside_text,
    check_sources,
    documents,
    files,
    unreadable,
)


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
    with pytest.raises(UserError, match="nowhere does not exist"):
        list(documents(Source(str(tmp_path / "nowhere"))))
    with pytest.raises(UserError, match=r"holds no text; .*\.txt"):
        list(documents(Source(str(tmp_path))))


def test_undecodable_documents_are_skipped_and_told_or_stop(tmp_path):
    source = fill(tmp_path, a_txt="fine")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 au lait")
    told = []
    assert list(documents(source, skipped=told.append)) == ["fine"]
    assert told == [f"{tmp_path / 'b.txt'}: the byte at offset 3 is not UTF-8"]
    with pytest.raises(UserError, match=r"b\.txt: the byte at offset 3 .* 'skip'"):
        list(documents(source, "stop"))


@pytest.mark.parametrize("path", ["hf:somebody/something", "saved"])
def test_the_datasets_library_is_asked_for_by_its_name(tmp_path, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    if path == "saved":
        path = fill(tmp_path / path).path
        (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    with pytest.raises(UserError, match=r"needs the package datasets; pip install datasets$"):
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
    monkeypatch.setattr(identity, "SMALL", 2)
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
    ("data", "sentence"),
    [
        (Data((Source(""),)), "data.sources[0].path is empty; name a file, a folder or 'stdlib'"),
        (Data((Source(), Source(" "))), "data.sources[1].path is empty"),
        (Data((Source("a\0b"),)), "data.sources[0].path is 'a\\x00b', and it has a NUL"),
        (Data((Source("x" * 300),)), "and a path has at most 4,096 characters, and 255 in each"),
        (
            Data((Source("https://example.com/a.txt"),)),
            "data.sources[0].path is 'https://example.com/a.txt', an address; download it and name",
        ),
        (Data(validation=(Text(""),)), "data.validation[0].path is empty; name a file"),
        (
            Data(validation=(Text("a"),), validation_share=0.1),
            "data.validation names the text to hold out, and data.validation_share (0.1) holds out",
        ),
        (Data(end_token="[SEP]"), "data.end_token names a token of data.tokenizer, which is not "),
        (Data(()), "data.sources is empty; name at least one, such as 'stdlib'"),
        (Data((Source(),) * 1001), "data.sources names 1,001 places; at most 1,000 are mixed"),
        (Data(tokenizer="\ud800"), "data.tokenizer is '\\ud800', and it is not UTF-8"),
    ],
)
def test_names_that_cannot_work_are_told(data, sentence):
    (problem,) = check_sources(data)
    assert sentence in problem


def test_all_texts_that_cannot_be_read_are_told_at_once(tmp_path, monkeypatch):
    """Before any of them is read to its end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"txt": "one"}\n')
    (tmp_path / "b.csv").write_text("text\n")
    (tmp_path / "c.txt").write_bytes(bytes(99))
    fill(tmp_path / "d", a_txt="fine")
    found = ("a.jsonl", "nowhere", "d", "hf:none/such", "https://example.com")
    data = Data(tuple(map(Source, found)), validation=(Text("b.csv"), Text("c.txt")))
    assert unreadable(data) == [
        "data.validation: b.csv holds no document that is not empty or a copy; add text, or remove "
        "it; data.validation: c.txt holds no document that is not empty or a copy (1 skipped: "
        "c.txt: its zero bytes are those of a binary file, not of text); add text, or remove it; "
        "data.sources: a.jsonl line 1: no field 'text'; did you mean 'txt'?; "
        "data.sources: nowhere does not exist; name a file, a folder or 'stdlib', or hf:NAME for a "
        "dataset of the hub"
    ]
    assert unreadable(Data((Source("d"),))) == []


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.tsv.gz"])
def test_tables_in_a_folder_are_read_where_it_holds_no_other_text(tmp_path, name):
    """Beside text they are its settings and figures: a package.json has no field 'text'."""
    raw = b'[{"text": "one"}]' if name == "a.json" else b"text\none\n"
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    source = Source(str(tmp_path))
    assert list(documents(source)) == ["one"]
    before = contents(source)
    fill(tmp_path, b_txt="two")
    assert list(documents(source)) == ["two"]
    assert contents(source) != before


def test_the_endings_that_are_read_from_a_folder_are_documented():
    page = Path(__file__).parents[2] / "docs" / "text.md"
    part = page.read_text("utf-8").partition("| endings that are read from a folder |")[2]
    named = re.findall(r"`(\.[\w.]+)`", part.partition("\n\n")[0].partition("none of the")[0])
    assert sorted(named) == sorted(sources.KNOWN)
    mixed = part.partition("none of the endings above |")[2].partition("\n")[0]
    assert re.findall(r"`(\.[\w.]+)`", mixed) == [*sources.MIXED]


# -- folders that hold more than text ------------------------------------------


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkfifo, "is a pipe, a socket or a device, and not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a pipe, a socket or a device, and not a"),
        (lambda path: path.symlink_to("nowhere"), "does not exist"),
        (lambda path: path.symlink_to("b.txt"), "cannot be read (Too many levels of symbolic"),
        (lambda path: path.symlink_to("x" * 300), "cannot be read (File name too long)"),
        (lambda path: socket(AF_UNIX).bind(str(path)), "is a pipe, a socket or a device, and not"),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_only_has_the_name_of_a_file_is_left_out_and_told(tmp_path, monkeypatch, make, what):
    """A pipe would be waited for; a link to what may not be looked at was a PermissionError."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, a_txt="one", c_txt="three")
    make(Path("b.txt"))
    told = []
    assert list(documents(Source("."), skipped=told.append)) == ["one", "three"]
    (sentence,) = told
    assert sentence.startswith(f"b.txt {what}")
    with pytest.raises(
        UserError, match=r"b\.txt .*; repair it, or set data\.undecodable to 'skip'"
    ):
        list(documents(Source("."), "stop"))
    assert contents(Source(".")) == contents(Source(str(tmp_path)))


def test_a_source_that_is_no_file_is_told(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(
        UserError, match="is a pipe, a socket or a device, and not a file; name a f"
    ):
        files(Source(str(tmp_path / "a.txt")))
    (tmp_path / "b.txt").symlink_to("x" * 300)
    with pytest.raises(
        UserError, match=r"b\.txt cannot be read \(File name too long\); name a file"
    ):
        files(Source(str(tmp_path / "b.txt")))


@pytest.mark.parametrize("path", ["/", "/tmp/.."])
def test_the_whole_disk_is_no_source(path):
    with pytest.raises(UserError, match="is the whole disk; name a folder of text in it"):
        files(Source(path))


def test_a_folder_of_too_many_files_is_no_source(tmp_path, monkeypatch):
    monkeypatch.setattr(walking, "MANY_FILES", 3)
    fill(tmp_path, a_txt="", b_txt="", c_bin="")
    assert len(files(Source(str(tmp_path)))) == 2
    fill(tmp_path / "d", e_txt="")
    with pytest.raises(UserError, match="holds more than 3 files; name a folder of text in it"):
        files(Source(str(tmp_path)))


def test_folders_that_lead_to_themselves_are_read_once(tmp_path):
    source = fill(tmp_path / "in", a_txt="one")
    (tmp_path / "in" / "again").symlink_to(tmp_path)
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "in")  # a folder with a file's name
    assert list(documents(source, "stop")) == ["one"]


def test_a_file_that_vanishes_while_it_is_read_is_a_sentence(tmp_path):
    source = fill(tmp_path, a_txt="one", b_txt="two")
    read = documents(source)
    assert next(read) == "one"
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UserError, match=r"cannot read .*b\.txt: No such file or directory"):
        next(read)


def test_a_name_that_is_not_utf8_has_contents(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("one")
    assert list(documents(Source(str(tmp_path)))) == ["one"]
    assert contents(Source(str(tmp_path)))


def test_records_beside_text_are_found(tmp_path):
    """A CSV in a folder of Markdown was left out without a word."""
    fill(tmp_path, a_md="one", posts_csv="body", b_json="[]")
    assert [path.name for path in beside_text(Text(str(tmp_path)))] == ["b.json", "posts.csv"]
    (tmp_path / "a.md").unlink()
    assert beside_text(Text(str(tmp_path))) == beside_text(Text("stdlib")) == []


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no such file here")
def test_a_file_that_fails_while_it_is_read_is_named(tmp_path):
    """It was called None: the system names the file where it cannot be opened."""
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")
    with pytest.raises(
        UserError, match=rf"^cannot read {tmp_path / 'a.txt'}: .*; make it readable"
    ):
        contents(Source(str(tmp_path / "a.txt")))
