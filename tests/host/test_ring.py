"""io_uring where there is none: a container that refuses it, and a ring that breaks."""

import subprocess
import sys
from functools import partial
from unittest.mock import patch

import pytest

from howdah.base.errors import Unfinished, UserError
from howdah.host import ring
from howdah.host.scratch import ended
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
