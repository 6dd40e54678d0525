"""Readers: each format gives its documents whole, and says where a file is wrong."""

import gzip
import io
import json
import sys

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet as format

from howdah.base.errors import UserError
from howdah.text import readers


def refuse(sentence):
    raise AssertionError(sentence)


# -- text ----------------------------------------------------------------------


@given(
    st.text(alphabet="aé😀\n\r\x00", max_size=200),
    st.integers(4, 40),
)
def test_a_cut_text_is_the_text_in_pieces_of_whole_characters(text, longest):
    raw = text.encode()
    blocks = list(readers._cut(io.BytesIO(raw), longest))
    assert b"".join(block for _, block in blocks) == raw
    assert all(raw[offset : offset + len(block)] == block for offset, block in blocks)
    assert all(0 < len(block) <= longest for _, block in blocks)
    for _, block in blocks:
        block.decode()


def test_a_text_is_cut_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\nthree\nfour\n\nfive")
    cut = list(readers.text(path, longest=14, bad=refuse))
    assert cut == ["one\ntwo\n\n", "three\nfour\n\n", "five"]
    assert list(readers.text(path, longest=25, bad=refuse)) == [path.read_text()]


def test_bytes_that_are_not_utf8_are_named_by_their_offset_in_the_file(tmp_path):
    path, told = tmp_path / "a.txt", []
    path.write_bytes(b"a fine line\n\nno\xfft this\n\nand this")
    got = list(readers.text(path, longest=13, bad=told.append))
    assert got == ["a fine line\n\n", "and this"]
    assert told == [f"{path}: the byte at offset 15 is not UTF-8"]


# -- JSON lines ----------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json.gz"])
def test_json_lines_give_their_field(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    lines = "\n".join(json.dumps({"body": text, "n": 1}) for text in ("é", "a\u2028b", "\n"))
    with (gzip.open if suffix.endswith(".gz") else open)(path, "wb") as file:
        file.write(f"{lines}\n\n".encode())
    assert list(readers.lines(path, field="body", bad=refuse)) == ["é", "a\u2028b", "\n"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{'text': 1}", "line 2: not JSON .* object with the field 'text'"),
        ('["text"]', "line 2: not an object"),
        ('{"txt": "a"}', "line 2: no field 'text'; did you mean 'txt'?"),
        ('{"text": 3}', "line 2: the field 'text' is of type int; it must be a string"),
        ('{"text": null}', "line 2: the field 'text' is empty"),
        ("[" * 100_000, "line 2: "),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, sentence):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    read = readers.lines(path, field="text", bad=refuse)
    assert next(read) == "fine"
    with pytest.raises(UserError, match=sentence) as refusal:
        next(read)
    assert str(path) in str(refusal.value)


def test_lines_that_are_not_utf8_are_told_and_passed_over(tmp_path):
    path, told = tmp_path / "a.jsonl", []
    path.write_bytes(b'{"text": "a\xff"}\n{"text": "\\ud800"}\n{"text": "fine"}\n')
    assert list(readers.lines(path, field="text", bad=told.append)) == ["fine"]
    assert [sentence.removeprefix(str(path)) for sentence in told] == [
        " line 1: the byte at offset 11 is not UTF-8",
        " line 2: the character at 0 is half of a surrogate pair, not UTF-8",
    ]


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_a_damaged_gzip_is_a_sentence(tmp_path, keep):
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b'{"text": "fine"}\n' * 100)
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl\.gz"):
        list(readers.lines(path, field="text", bad=refuse))
    path.write_bytes(b"not gzip")
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl\.gz"):
        list(readers.lines(path, field="text", bad=refuse))


def test_a_line_without_an_end_is_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST_LINE", 30)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + " " * 13 + '{"text": "fine"}\n{"text": "' + "x" * 30)
    read = readers.lines(path, field="text", bad=refuse)
    assert [next(read), next(read)] == ["fine", "fine"]
    with pytest.raises(
        UserError, match=r"a\.jsonl line 3: longer than 0 MiB; a line is one document"
    ):
        next(read)


def test_fields_of_any_length_leave_the_sentence_short(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"x" * 5000: 1, "a\nb": 2}) + "\n")
    with pytest.raises(UserError, match="no field 'y") as refused:
        list(readers.lines(path, field="y" * 5000, bad=refuse))
    assert len(str(refused.value)) < 400 and "\n" not in str(refused.value)


# -- Parquet -------------------------------------------------------------------


def table(path, **columns):
    format.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_parquet_gives_its_column(tmp_path):
    path = table(tmp_path / "a.parquet", body=["one", "é", "three"], n=[1, 2, 3])
    assert list(readers.parquet(path, field="body", bad=refuse)) == ["one", "é", "three"]


def test_bad_parquet_is_named_by_file_and_row(tmp_path):
    path = table(tmp_path / "a.parquet", text=["one", "two", None], n=[1, 2, 3])
    for field, sentence in (
        ("text", "row 3: the field 'text' is empty"),
        ("txt", "no column 'txt'; did you mean 'text'?"),
        ("n", "row 1: the field 'n' is of type int"),
    ):
        with pytest.raises(UserError, match=sentence):
            list(readers.parquet(path, field=field, bad=refuse))
    path.write_bytes(b"not parquet at all")
    with pytest.raises(UserError, match=r"cannot read .*a\.parquet as Parquet"):
        list(readers.parquet(path, field="text", bad=refuse))


def test_parquet_rows_that_are_not_utf8_are_told_and_passed_over(tmp_path):
    raw = pyarrow.array([b"a\xff", b"fine"]).view(pyarrow.string())
    path, told = table(tmp_path / "a.parquet", text=raw), []
    assert list(readers.parquet(path, field="text", bad=told.append)) == ["fine"]
    assert told == [f"{path} row 1: the byte at offset 1 is not UTF-8"]


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "a.parquet"
    with pytest.raises(UserError, match=r"needs the package pyarrow; .*howdah\[data\]"):
        list(readers.parquet(path, field="text", bad=refuse))
