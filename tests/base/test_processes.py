"""Memory that a process has freed: kept, so that the kernel need not give it again, or not."""

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's malloc is asked"
)

START = """
import ctypes, resource, sys
from howdah.base.processes import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] != "by itself":
    keep_freed_memory(sys.argv[1] == "kept")
"""
COUNT = """
def round():
    there = [libc.malloc(24 << 20) for _ in range(4)]
    for one in there:
        ctypes.memset(one, 1, 24 << 20)
    for one in there:
        libc.free(one)
for _ in range(2):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HELD = """
def held():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) >> 10
libc.free(libc.malloc(30 << 20))  # from here on glibc keeps blocks of 30 MiB on its heap
before, there = held(), []
for _ in range(8):
    block = libc.malloc(16 << 20)
    ctypes.memset(block, 1, 16 << 20)
    there.append(block)
    ctypes.memset(libc.malloc(200 << 10), 1, 200 << 10)  # what is above a hole keeps it
for block in there:
    libc.free(block)
print(held() - before)
"""


def told(program, how):
    """The number that a program prints in a process of its own."""
    return int(subprocess.check_output([sys.executable, "-c", START + program, how], text=True))


def test_freed_memory_is_used_again():
    assert told(COUNT, "kept") < 100 < told(COUNT, "given back")


def test_freed_blocks_are_given_back_where_memory_is_scarce():
    """MiB that a process still holds of 128 that it has freed."""
    assert told(HELD, "given back") < 16 < told(HELD, "by itself")
