"""The fallback's own: memory that is short, systems without memfd, nothing left behind.

What it computes is tested with the other transports, in test_transport.py.
"""

import gc
import os
import resource
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from howdah.comm import fallback
from howdah.comm.fallback import connect_fallback
from howdah.comm.spawn import HOST
from howdah.plan.problems import BadInput


@pytest.fixture
def small_files():
    """No file of this process may grow beyond a MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_memory_that_is_short_is_told_at_the_start(small_files):
    with pytest.raises(BadInput, match=r"^8 MiB of shared memory are needed and not there"):
        fallback._create(8 << 20)


def without_memfd(transport, port, folder):
    """Connects as on a system that has no memfd; the files that there were, and are."""
    kept = os.memfd_create
    tempfile.tempdir = folder
    del os.memfd_create
    try:
        store = dist.TCPStore(HOST, port, is_master=False)
        shared = connect_fallback(store, rank=transport.rank, size=transport.size)
    finally:
        os.memfd_create, tempfile.tempdir = kept, None
    x = torch.full((100_000,), shared.rank + 1.0)
    shared.all_reduce(x)
    left = os.listdir(folder)
    shared.barrier()
    shared.close()
    return x.unique().tolist(), left


def test_a_named_file_loses_its_name_when_all_have_it(workers, tmp_path):
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    results = workers.run(without_memfd, store.port, str(tmp_path), ranks=2, transport="torch")
    assert results[0] == ([3.0], [])
    assert results[1][0] == [3.0]
    assert os.listdir(tmp_path) == []


def files(transport):
    """Open files of fallbacks in this process."""
    gc.collect()
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own, or one that another thread closes
            names.append(os.readlink(entry))
    return sum("howdah-fallback" in name for name in names)


def test_runs_leave_no_file_open(workers):
    assert workers.run(files, transport="fallback") == [2] * 4  # a map keeps one of its own
    assert workers.run(files, transport="torch") == [0] * 4
