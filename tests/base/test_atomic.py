"""A file is the old one or the new one."""

import pytest

from howdah.base.atomic import replacing, write_text


def test_the_new_file_takes_the_name_at_the_end(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as file:
        file.write(b"ne")
        raise error
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_text(tmp_path):
    write_text(tmp_path / "a", "näme\n")
    assert (tmp_path / "a").read_bytes() == "näme\n".encode()
    with pytest.raises(OSError):
        write_text(tmp_path / "not there" / "a", "")
