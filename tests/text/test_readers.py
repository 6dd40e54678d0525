"""Text files: documents whole, in any of their encodings, and what is no text left out."""

import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.text import readers


def refuse(sentence):
    raise AssertionError(sentence)


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


# -- encodings -----------------------------------------------------------------

RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая по-своему.\n"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("text", ["a line\r\n\nand another 😀\n" * 9, RUSSIAN * 9])
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_a_text_is_the_same_in_any_encoding(tmp_path, encoding, text, suffix):
    """Half of a UTF-16 file passed as UTF-8 with a zero byte in each pair, and was trained on."""
    path = tmp_path / f"a{suffix}"
    raw = text.encode(encoding)
    path.write_bytes(gzip.compress(raw) if suffix == ".txt.gz" else raw)
    found = list(readers.text(path, longest=100, bad=refuse))
    assert "".join(found) == text and len(found) > 1


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("one\n\ntwo".encode("utf-16") + b"\n", "it begins as UTF-16 and has bytes that are not"),
        (b"\xff\xfe" + b"a\0" * 3000 + b"\0\xd8" * 9, "it begins as UTF-16 and has bytes that"),
        ("one".encode("utf-32")[:-1], "it begins as UTF-32 and has bytes that are not"),
        (bytes(64), "its zero bytes are those of a binary file, not of text"),
        (b"PNG" * 20 + bytes(3) + b"and more", "its zero bytes are those of a binary file"),
    ],
)
def test_a_file_that_is_no_text_is_left_out_whole(tmp_path, raw, sentence):
    path, told = tmp_path / "a.txt", []
    path.write_bytes(raw)
    assert list(readers.text(path, longest=8, bad=told.append)) == []
    (found,) = told
    assert found.startswith(f"{path}: {sentence}")


def test_a_zero_byte_alone_makes_no_text_binary():
    assert readers.encoding_of(b"a line of a log\n" * 8 + b"\0") == "utf-8"
    assert readers.encoding_of(b"") == "utf-8"
