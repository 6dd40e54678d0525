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
