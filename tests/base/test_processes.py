"""Memory that a process keeps: counted in pages that the kernel had to give it."""

import ctypes
import subprocess
import sys

import pytest

COUNT = """
import ctypes, resource, sys
from howdah.base.processes import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "kept":
    keep_freed_memory()
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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's malloc is asked")
def test_freed_memory_is_used_again():
    words = [sys.executable, "-c", COUNT]
    kept, given_back = (
        int(subprocess.check_output([*words, word], text=True)) for word in ("kept", "given back")
    )
    assert kept < 100 < given_back


HELD = """
import ctypes, sys
from howdah.base.processes import give_freed_memory_back
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "given back":
    give_freed_memory_back()
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


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_freed_blocks_are_given_back_where_memory_is_scarce():
    """MiB that a process still holds of 128 that it has freed."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("malloc is not glibc's")
    held = {}
    for how in ("by itself", "given back"):
        command = [sys.executable, "-c", HELD, how]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        held[how] = int(done.stdout)
    assert held["given back"] < 16 < held["by itself"]
