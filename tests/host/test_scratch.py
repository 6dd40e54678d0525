"""The file of what has its home on a disk: bytes come back as they were, or the run ends."""

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from howdah.base.errors import Unfinished, UserError
from howdah.host.scratch import BLOCK, Pace, Scratch, ended, free_bytes, memory_behind


@pytest.fixture
def make(tmp_path):
    made = []

    def scratch(folder=tmp_path, *, direct=False, pace=0.0):
        made.append(Scratch(Path(folder), threads=2, direct=direct, pace=Pace(pace)))
        return made[-1]

    yield scratch
    for one in made:
        one.close()


def takes_direct(folder):
    try:
        Scratch(folder, threads=1, direct=True, pace=Pace(0)).close()
    except UserError:
        return False
    return True


def written(scratch, data):
    place = scratch.allocate(len(data))
    ended(scratch.write(place, memoryview(data)))
    return place


def read(scratch, place, at=0, length=None):
    out = bytearray(place.length - at if length is None else length)
    ended(scratch.read(place, memoryview(out), at))
    return bytes(out)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", [1, 4095, 4096, BLOCK, 2 * BLOCK + 77])
def test_bytes_come_back_whole_and_in_part(make, tmp_path, direct, size):
    if direct and not takes_direct(tmp_path):
        pytest.skip("this file system does not take O_DIRECT")
    scratch, data = make(direct=direct), os.urandom(size)
    other = written(scratch, os.urandom(100))
    place = written(scratch, data)
    kept = read(scratch, other)
    assert read(scratch, place) == data
    for at, length in ((0, 1), (size // 3, size // 2), (size - 1, 1)):
        assert read(scratch, place, at, length) == data[at : at + length]
    again = os.urandom(size)
    ended(scratch.write(place, memoryview(again)))
    assert read(scratch, place) == again and read(scratch, other) == kept


def test_what_was_never_written_is_zero_and_nothing_is_left_of_the_file(make, tmp_path):
    scratch = make()
    assert read(scratch, scratch.allocate(5000)) == bytes(5000)
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_comes_back_otherwise_ends_the_run(make):
    scratch = make()
    place = written(scratch, os.urandom(BLOCK + 9))
    os.pwrite(scratch._file, b"\0\1\2\3", place.start + BLOCK)
    assert len(read(scratch, place, 0, BLOCK)) == BLOCK  # the first block is whole
    with pytest.raises(Unfinished, match=r"other bytes than were written.*the last checkpoint"):
        read(scratch, place)


@pytest.mark.parametrize(("call", "verb"), [("pwrite", "write"), ("preadv", "read")])
def test_a_disk_that_fails_is_a_sentence(make, call, verb):
    scratch = make()
    place = written(scratch, b"x" * 10)

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    with patch.object(os, call, fails), pytest.raises(Unfinished, match=rf"cannot {verb} .*Input"):
        written(scratch, b"y" * 10) if verb == "write" else read(scratch, place)


def test_a_full_disk_is_told_before_anything_is_written(make):
    scratch = make()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    sentence = r"no room for 3 MB more \(No space left.*are free\); name a folder"
    with patch.object(os, "posix_fallocate", full), pytest.raises(UserError, match=sentence):
        scratch.allocate(3_000_000)


def test_folders_that_cannot_be_written_or_read_past_the_page_cache(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the home on the disk.*storage\.folder"):
        make(tmp_path / "file" / "in it")
    opened = os.open

    def no_direct(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest)

    with (
        patch.object(os, "open", no_direct),
        pytest.raises(UserError, match=r"does not take O_DIRECT.*storage\.direct=false"),
    ):
        make(direct=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_system_in_memory_is_recognised(tmp_path):
    if Path("/dev/shm").is_dir():
        assert memory_behind(Path("/dev/shm/not/there/yet")) == "tmpfs"
    assert memory_behind(Path("/proc")) is None
    assert free_bytes(tmp_path / "not there yet") > 0


def test_a_slow_link_lets_bytes_pass_one_after_the_other():
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    with (
        patch("howdah.host.scratch.sleep", sleep),
        patch("howdah.host.scratch.monotonic", lambda: now[0]),
    ):
        pace = Pace(100.0)
        pace.wait(50)
        now[0] += 0.25  # the link is idle, and that does not count
        pace.wait(100)
        Pace(0).wait(10**9)
    assert slept == pytest.approx([0.5, 1.0])
