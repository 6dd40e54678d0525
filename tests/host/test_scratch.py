"""The file of what has its home on a disk: bytes come back as they were, or the run ends."""

import errno
import os
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest

from howdah.base.errors import Unfinished, UserError
from howdah.comm.build import engine_library
from howdah.comm.engine_abi import load_library
from howdah.comm.settings import read_settings
from howdah.host import ring
from howdah.host.scratch import BLOCK, Pace, Scratch, ended, free_bytes, memory_behind


@pytest.fixture(params=["threads", "io_uring"])
def make(tmp_path, request):
    made, library = [], None
    if request.param == "io_uring":
        if why := ring.refused():
            pytest.skip(f"io_uring is refused here: {why}")
        library = load_library(engine_library(read_settings()))

    def scratch(folder=tmp_path, *, direct=False):
        how = {"threads": 2, "direct": direct, "pace": Pace(0), "library": library}
        made.append(Scratch(Path(folder), **how))
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


@pytest.mark.parametrize(("verb", "only"), [("write", os.O_RDONLY), ("read", os.O_WRONLY)])
def test_a_disk_that_fails_is_a_sentence(make, tmp_path, verb, only):
    """In place of the file stands one that cannot be written, or not be read."""
    scratch = make()
    place = written(scratch, b"x" * 10)
    (tmp_path / "other").write_bytes(b"x" * 10)
    other = os.open(tmp_path / "other", only)
    os.dup2(other, scratch._file)
    os.close(other)
    with pytest.raises(Unfinished, match=rf"cannot {verb} .*Bad file descriptor; the last"):
        ended(scratch.write(place, memoryview(b"y" * 10))) if verb == "write" else read(
            scratch, place
        )


def test_a_file_that_was_cut_is_a_sentence(make):
    """The kernel gives half of the block, and then nothing."""
    scratch = make()
    place = written(scratch, os.urandom(BLOCK))
    os.truncate(scratch._file, place.start + BLOCK // 2)
    with pytest.raises(Unfinished, match=r"cannot read .*the file is shorter than it was"):
        read(scratch, place)


def test_more_moves_than_are_under_way_at_a_time_all_end(make):
    """And `close` ends those that nobody has waited for: what has not begun is cancelled, where it
    once took as long as a slow disk did.
    """
    scratch, data = make(), [os.urandom(5 * BLOCK + 1) for _ in range(3)]
    places = [scratch.allocate(len(one)) for one in data]
    jobs = [scratch.write(to, memoryview(one)) for to, one in zip(places, data, strict=True)]
    ended([*chain(*jobs)])
    out = [bytearray(len(one)) for one in data]
    jobs = [scratch.read(to, memoryview(one)) for to, one in zip(places, out, strict=True)]
    scratch.close()
    ran = [not job.cancelled() for job in chain(*jobs)]
    assert all(job.done() for job in chain(*jobs)) and ran == sorted(ran, reverse=True)
    for one, place, moved in zip(out, data, jobs, strict=True):
        for number, job in enumerate(moved):
            part = slice(number * BLOCK, (number + 1) * BLOCK)
            assert job.cancelled() or one[part] == place[part]


def test_a_full_disk_is_told_before_anything_is_written(make):
    scratch = make()

    sentence = r"no room for 3 MB more \(No space left.*are free\); name a folder"
    with (
        patch("howdah.host.scratch._fallocate", lambda *_: errno.ENOSPC),
        pytest.raises(UserError, match=sentence),
    ):
        scratch.allocate(3_000_000)


def test_a_file_system_that_sets_no_room_aside_is_asked_what_is_free(make):
    """The C library would write to each block of the file, and cannot past the page cache."""
    scratch = make()
    with patch("howdah.host.scratch._fallocate", lambda *_: errno.EOPNOTSUPP):
        data = os.urandom(2 * BLOCK + 5)
        assert read(scratch, written(scratch, data)) == data
        assert read(scratch, scratch.allocate(10)) == bytes(10)
        with pytest.raises(UserError, match=r"has no room for .* more \(No space left"):
            scratch.allocate(1 << 60)


def test_where_no_file_can_be_made_without_a_name_it_loses_it(make, tmp_path):
    opened = os.open

    def old(path, flags, *rest, **kept):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, *rest, **kept)

    with patch.object(os, "open", old):
        scratch = make()
    assert list(tmp_path.iterdir()) == []
    assert read(scratch, written(scratch, b"kept")) == b"kept"


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
