"""io_uring where there is none: a container that refuses it, and a ring that breaks."""

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from howdah.base.errors import Unfinished, UserError
from howdah.host import ring
from howdah.host.scratch import BLOCK, Pace, Scratch, ended
from howdah.parallel.homes import open_scratch
from howdah.plan.storage import Storage

# What docker does: a filter of system calls (seccomp) answers io_uring_setup with EPERM.
REFUSED = """
import ctypes, struct
load, jump, give = 0x20, 0x15, 0x06  # BPF_LD | BPF_ABS, BPF_JMP | BPF_JEQ, BPF_RET
steps = [(load, 0, 0, 0), (jump, 0, 1, 425), (give, 0, 0, 0x50001), (give, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, a filter
from howdah.host.ring import refused
print(repr(refused()))
"""


def test_a_container_that_refuses_io_uring_is_noticed():
    words = [sys.executable, "-c", REFUSED]
    told = subprocess.run(words, capture_output=True, text=True, check=False)
    assert told.stdout == "PermissionError(1, 'Operation not permitted')\n", told.stderr


def test_threads_move_what_io_uring_may_not_and_say_why(tmp_path):
    storage, why = partial(Storage, folder=str(tmp_path)), OSError(1, "Operation not permitted")
    with patch.object(ring, "refused", lambda: why):
        scratch, by = open_scratch(storage())
        scratch.close()
        with pytest.raises(UserError, match=r"^storage\.io=io_uring is .*permitted; use storage"):
            open_scratch(storage(io="io_uring"))
    assert by == "4 threads, for io_uring is not to be had here: Operation not permitted"
    scratch, by = open_scratch(storage(io="threads", threads=2))
    scratch.close()
    assert by == "2 threads"


def test_a_ring_that_breaks_ends_every_move(tmp_path):
    if ring.refused():
        pytest.skip("io_uring is refused here")

    def breaks(_):
        raise OSError(12, "Cannot allocate memory")

    scratch, by = open_scratch(Storage(folder=str(tmp_path)))
    assert by == "io_uring, 4 blocks at a time"
    place = scratch.allocate(10)
    with patch.object(ring.Requests, "wait", breaks):
        for _ in range(2):  # while it breaks, or behind that
            with pytest.raises(Unfinished, match=r"cannot write .*Cannot allocate memory"):
                ended(scratch.write(place, memoryview(b"x" * 10)))
        scratch.close()


def test_an_error_of_the_thread_itself_ends_every_move(tmp_path):
    """Only those of the system did: else all waits lasted forever."""
    if ring.refused():
        pytest.skip("io_uring is refused here")
    scratch, _ = open_scratch(Storage(folder=str(tmp_path), io="io_uring"))
    place = scratch.allocate(3 * BLOCK)
    with patch.object(ring.ByRing, "_advance", side_effect=KeyError("a tag")):
        jobs = scratch.write(place, memoryview(bytes(3 * BLOCK)))
        assert not wait(jobs, timeout=60).not_done
    assert {type(job.exception()) for job in jobs} == {KeyError}
    with pytest.raises(KeyError):
        ended(scratch.write(place, memoryview(bytes(3 * BLOCK))))
    scratch.close()


# -- a kernel that refuses a request ---------------------------------------------------

# In place of the C library's `syscall`: the kernel takes so many requests, then refuses so many.
FAILS = """
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
int taken_before, refusals, why;
long interposed(long number, long a, long b, long c, long d, long e, long f) {
    if (number == __NR_io_uring_enter && b && taken_before-- <= 0 && refusals > 0)
        return refusals--, errno = why, -1;
    return syscall(number, a, b, c, d, e, f);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A library with the functions of ring.c, whose system calls can fail."""
    if why := ring.refused():
        pytest.skip(f"io_uring is refused here: {why}")
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    folder, source = tmp_path_factory.mktemp("ring"), Path(ring.__file__).with_name("ring.c")
    (folder / "fails.c").write_text(FAILS)
    cc = ["cc", "-shared", "-fPIC"]
    subprocess.run([*cc, "-o", folder / "fails.so", folder / "fails.c"], check=True)
    made = [*cc, "-Dsyscall=interposed", "-o", folder / "ring.so", source, folder / "fails.so"]
    subprocess.run([*made, f"-Wl,-rpath,{folder}"], check=True)
    return ctypes.CDLL(folder / "ring.so"), ctypes.CDLL(folder / "fails.so")


def refuses(fails, count, why, *, behind=0):
    for name, value in (("why", why), ("refusals", count), ("taken_before", behind)):
        ctypes.c_int.in_dll(fails, name).value = value


@pytest.mark.parametrize("why", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
@pytest.mark.parametrize("behind", range(4))
def test_a_kernel_that_has_no_memory_for_now_is_asked_again(tmp_path, library, why, behind):
    """The request was given up, and given to the kernel with the next one: the thread ended with a
    KeyError, and writes never did.
    """
    calls, fails = library
    refuses(fails, 0, 0)
    scratch = Scratch(tmp_path, threads=2, direct=False, pace=Pace(0), library=calls)
    place, data = scratch.allocate(4 * BLOCK), os.urandom(4 * BLOCK)
    refuses(fails, 2, why, behind=behind)
    jobs = scratch.write(place, memoryview(data))
    assert not wait(jobs, timeout=60).not_done
    ended(jobs)
    assert ctypes.c_int.in_dll(fails, "refusals").value == 0
    out = bytearray(len(data))
    ended(scratch.read(place, memoryview(out)))
    assert out == data
    scratch.close()


def test_a_request_that_the_kernel_refuses_is_lost_alone(tmp_path, library):
    """It is not made later, when its memory may have other bytes."""
    calls, fails = library
    refuses(fails, 0, 0)
    scratch = Scratch(tmp_path, threads=1, direct=False, pace=Pace(0), library=calls)
    first, second = scratch.allocate(BLOCK), scratch.allocate(BLOCK)
    refuses(fails, 1, errno.EINVAL, behind=1)  # behind that of the next wake-up
    (job,) = scratch.write(first, memoryview(b"x" * BLOCK))
    assert not wait([job], timeout=60).not_done
    with pytest.raises(Unfinished, match=r"^cannot write .*Invalid argument"):
        job.result()
    jobs = scratch.write(second, memoryview(b"y" * BLOCK))
    assert not wait(jobs, timeout=60).not_done
    ended(jobs)
    assert os.pread(scratch._file, 1, first.start) == b"\0"
    assert os.pread(scratch._file, 1, second.start) == b"y"
    scratch.close()
