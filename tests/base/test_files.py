"""Files are looked at before they are opened, and parsers get nothing that they stumble over."""

import os
from pathlib import Path

import pytest

from howdah.base.files import (
    kind_of,
    parse_json,
    parse_toml,
    path_problem,
    read_file,
    read_text,
    word_problem,
)


def test_a_file_is_read_whole(tmp_path):
    path = tmp_path / "a"
    path.write_text("é\n", "utf-8")
    assert (read_file(path), read_text(path, 3), kind_of(path)) == (b"\xc3\xa9\n", "é\n", "file")
    assert kind_of(tmp_path) == "folder"


@pytest.mark.parametrize(
    ("make", "kind", "reason"),
    [
        (lambda path: None, "does not exist", "No such file"),
        (lambda path: path.mkdir(), "folder", "Is a directory"),
        (os.mkfifo, "is a pipe, a socket or a device, and not a file", "it is a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "is a pipe, a socket or", "it is a pipe"),
        (lambda path: path.symlink_to("nowhere"), "does not exist", "No such file"),
        (lambda path: path.symlink_to("x"), "cannot be read (Too many levels", "Too many levels"),
        (lambda path: path.symlink_to("y" * 300), "cannot be read (File name", "File name too"),
        (lambda path: path.write_bytes(b"1234"), "file", "it has more than the 3 bytes"),
    ],
)
def test_what_is_no_file_is_never_opened(tmp_path, make, kind, reason):
    """A pipe would be waited for without end, and a device read without end."""
    path = tmp_path / "x"
    make(path)
    assert kind_of(path).startswith(kind)
    with pytest.raises(OSError) as refused:
        read_file(path, 3)
    assert reason in refused.value.strerror


def test_a_file_without_a_size_is_not_read_without_end():
    """Files of /proc say that they have no bytes, whatever they hold."""
    with pytest.raises(OSError, match="more than the 100 bytes"):
        read_file(Path("/proc/self/mountinfo"), 100)


def test_a_name_with_a_nul_has_no_file(tmp_path):
    assert kind_of(tmp_path / "a\0b") == "cannot be read (its name has a NUL)"
    with pytest.raises(OSError) as refused:
        read_file(tmp_path / "a\0b")
    assert refused.value.strerror == "it cannot be read (its name has a NUL)"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a = " + "[" * 100_000, "nested too deep"),
        ("a = " + "9" * 5000, "thousands of digits"),
        ("a." * 100_000 + "b = 1", "a line has 1,000 dots"),
        ("a = [", "Invalid value"),
    ],
)
def test_toml_that_breaks_a_parser_is_a_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        parse_toml(text)
    assert "\n" not in str(refused.value)
    assert parse_toml("a.b.c = 1.5\n") == {"a": {"b": {"c": 1.5}}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b"9" * 5000, "4300 digits"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"[-Infinity]", "-Infinity is no number"),
        (b"1e999", "1e999 is too large"),
        (b"{", "Expecting"),
    ],
)
def test_json_that_breaks_a_parser_is_a_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_json(text)
    assert parse_json(b'{"a": [1e3]}') == {"a": [1000.0]}


def test_words_and_paths_that_the_system_cannot_take():
    assert word_problem("é") == path_problem("a/é") == path_problem("") == ""
    assert word_problem("a\0b") == path_problem("a\0b") == "it has a NUL"
    assert word_problem("\ud800") == "it is not UTF-8"
    assert path_problem("a" * 256) == path_problem("a/" * 3000) != ""
    assert path_problem("a" * 255 + "/b") == ""
