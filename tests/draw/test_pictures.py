"""A drawing goes where it was asked to go, or the folder is named before anything is computed."""

import os
from pathlib import Path

import pytest

from howdah.base.errors import UserError
from howdah.draw.pictures import put, require_place, require_svg


def test_without_a_file_it_is_printed(capsys):
    require_place(None)
    put("a drawing", None)
    assert capsys.readouterr().out == "a drawing\n"


def test_a_file_is_written_and_written_over(tmp_path):
    for text in ("a long drawing", "é"):
        put(text, tmp_path / "a.svg")
        assert (tmp_path / "a.svg").read_text("utf-8") == text


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere/a.svg", "nowhere does not exist; make it first"),
        ("file/a.svg", "file is a file, and no folder"),
        ("folder", "folder: it is a folder; name a file in it"),
        ("a" * 300, "a path has at most 4,096 characters, and 255 in each name"),
        ("a\0b", "it has a NUL"),
    ],
)
def test_a_place_that_cannot_be_written_is_known_before(tmp_path, path, sentence):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for write in (require_place, lambda file: put("x", file)):
        with pytest.raises(UserError, match=r"^cannot write ") as refused:
            write(tmp_path / path)
        assert sentence in str(refused.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_known_before(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="you may not; name a file elsewhere"):
        require_place(tmp_path / "a.svg")


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/dev/full", "No space left on device"), ("/proc/a.svg", "No such file or directory")],
)
def test_a_disk_that_refuses_is_a_sentence(path, reason):
    with pytest.raises(UserError, match=f"^cannot write {path}: {reason}; name a file elsewhere$"):
        put("x", Path(path))


def test_a_drawing_is_not_written_under_the_name_of_another_format(tmp_path):
    for name in ("a.svg", "a.SVG", "a", ".hidden"):
        require_svg(tmp_path / name)
    require_svg(None)
    for name in ("a.png", "a.b.PDF", "a.svg.gz"):
        with pytest.raises(UserError, match=r"drawings are SVG; name it .*\.svg$"):
            require_svg(tmp_path / name)


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: No such device or address"):
        put("x", tmp_path / "pipe")


def test_a_pipe_that_somebody_reads_gets_all_of_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    put("x" * 4096, tmp_path / "pipe")
    assert os.read(reader, 8192) == b"x" * 4096
    os.close(reader)
