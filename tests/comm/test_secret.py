"""A run's secret: read from a file that nobody else can read, and from nothing else."""

import os
from pathlib import Path

import pytest

from howdah.base.errors import UserError
from howdah.comm.secret import LEAST, MOST, read_secret, secret_of
from howdah.comm.settings import Settings


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"s" * LEAST)
    path.chmod(0o600)
    return path


def settings(path=None):
    return Settings(("cc",), Path("/nowhere"), secret=path)


def test_a_file_of_ones_own_is_read(file):
    assert secret_of(settings(file), "secret") == b"s" * LEAST
    file.chmod(0o400)
    assert read_secret(file) == b"s" * LEAST


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o700, 0o601])
def test_a_file_that_is_open_to_others_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(UserError, match=rf"has mode {mode:04o}, so that others may have read it"):
        read_secret(file)


@pytest.mark.parametrize(
    ("contents", "said"),
    [(b"", "has 0 bytes"), (b"s" * (LEAST - 1), "has 31 bytes"), (b"s" * (MOST + 1), "over 1024")],
)
def test_a_size_that_cannot_be_a_secret_is_refused(file, contents, said):
    file.write_bytes(contents)
    with pytest.raises(UserError, match=said):
        read_secret(file)


def test_what_is_no_file_is_refused(file, tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_secret(tmp_path / "other")
    with pytest.raises(UserError, match="is no file"):
        read_secret(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UserError, match="is no file"):  # and nobody waits for its writer
        read_secret(tmp_path / "pipe")
    with pytest.raises(UserError, match="cannot be read"):
        read_secret(tmp_path / "a\0b")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away, which takes root")
def test_a_file_of_another_user_is_refused(file):
    os.chown(file, 12345, 12345)
    with pytest.raises(UserError, match="belongs to user 12345 and not to user 0"):
        read_secret(file)


def test_without_one_the_network_must_be_trusted(file):
    with pytest.raises(UserError, match="join by a secret"):
        secret_of(settings(), "secret")
    assert secret_of(settings(), "network") == b""
    assert secret_of(settings(file), "network") == b"s" * LEAST
