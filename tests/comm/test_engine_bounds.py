"""What another rank wrote into the arena is checked before it is used; waiting is counted in looks.

A rank does here what none does by itself: poke.c has the engine's source in it, and writes what it
likes where the engine writes its notices. The others must end with a sentence, not with a crash.
"""

import os
import signal
import subprocess
from ctypes import CDLL, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_engine import join, together  # noqa: F401
from test_engine_faults import arena_number, running  # noqa: F401

from howdah.comm import build
from howdah.comm.engine import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, SEND
from howdah.comm.engine import REDUCE_SCATTER as SCATTER
from howdah.comm.engine_abi import OP
from howdah.comm.settings import read_settings
from howdah.comm.transport import PeerLost

POKE = Path(__file__).with_name("poke.c")
WHERE, MOST, COUNT, STEP, KIND, SITE, ABORT = range(7)
LONG = 20_000  # elements: more than are reduced at once


@pytest.fixture(scope="module")
def poke(tmp_path_factory):
    """The path of the library that pokes."""
    made = tmp_path_factory.mktemp("poke") / "poke.so"
    flags = ["-std=gnu11", "-fPIC", "-shared", "-pthread", f"-I{build.HERE}"]
    subprocess.run([*read_settings().compiler, *flags, "-o", made, POKE], check=True)
    return str(made)


def poking(path):
    library, handle = CDLL(path), c_void_p
    library.poke_notice.argtypes = (handle, c_char_p, c_int, c_int64)
    library.poke_label.argtypes = (handle, c_char_p, c_uint64, c_uint32)
    library.poke_looks.argtypes = (handle, c_int, c_int, c_int64)
    return library


# -- notices and labels


def called(engine, x, out):
    """Each operation as rank 0 calls it, on tensors of the arena; and as it is packed."""
    at, to, half = x.data_ptr(), out.data_ptr(), [LONG // 2] * 2
    counts = torch.tensor(half)
    cut = counts.data_ptr()
    return {
        ALL_GATHER: (
            lambda: engine.all_gather(out, x[: LONG // 2], half),
            OP.pack(ALL_GATHER, 0, 0, 4, 0, LONG, at, to, cut, 0),
        ),
        ALL_REDUCE: (
            lambda: engine.all_reduce(x),
            OP.pack(ALL_REDUCE, 0, 0, 4, 0, LONG, at, at, 0, 0),
        ),
        SCATTER: (
            lambda: engine.reduce_scatter(out[: LONG // 2], x, half),
            OP.pack(SCATTER, 0, 0, 4, 0, LONG, at, to, cut, 0),
        ),
        BROADCAST: (
            lambda: engine.broadcast(x, 1),
            OP.pack(BROADCAST, 0, 0, 4, 1, LONG, at, at, 0, 0),
        ),
        ALL_TO_ALL: (
            lambda: engine.all_to_all(out, x, half, half),
            OP.pack(ALL_TO_ALL, 0, 0, 4, 0, LONG, at, to, cut, cut),
        ),
        BARRIER: (engine.barrier, OP.pack(BARRIER, 0, 0, 1, 0, 0, 0, 0, 0, 0)),
        SEND: (
            lambda: engine.receive(x, 1),
            OP.pack(SEND, 0, 0, 4, 0, LONG, at, 0, 0, 0),
        ),
        "counts": counts,  # lives as long as the packed calls
    }


def places(engine, x):
    """Offsets where no input of rank 1 is, however much of the memory is mapped there."""
    heaps = [engine._functions.howdah_heap_offset(2, engine._heap, rank) for rank in range(3)]
    return {
        "the header": 1,
        "before the heap": heaps[1] - 4,
        "another's heap": heaps[0],
        "over the end": heaps[2] - x.nbytes // 2 + 4,
        "behind the arena": heaps[2] + 4,
        "far away": 1 << 62,
        "below zero": -64,
    }


def garble(engine, path, kind, field, value):
    """Rank 1 pokes instead of taking part; what each is told."""
    x = engine.allocate(LONG, torch.float32)
    out = engine.allocate(LONG, torch.float32)
    calls = called(engine, x, out)
    call, packed = calls[kind]
    if engine.rank == 1:
        value = places(engine, x).get(value, value)
        if kind == SEND:
            poking(path).poke_label(engine._handle, packed, *value)
        else:
            poking(path).poke_notice(engine._handle, packed, field, value)
        call = engine.barrier if field != SITE else lambda: None  # it would tell its own place
    try:
        call()
    except (PeerLost, RuntimeError) as error:
        return str(error)
    return "nothing"


OFFSETS = [
    "the header", "before the heap", "another's heap", "over the end", "behind the arena",
    "far away", "below zero",
]  # fmt: skip


def is_told(sentences):
    for sentence in sentences:
        assert sentence.startswith("rank 1 (process "), sentence
        assert ") has numbers in the arena that cannot be (they were overwritten), as" in sentence


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", [ALL_GATHER, ALL_REDUCE, SCATTER, BROADCAST, ALL_TO_ALL])
def test_a_wild_offset_is_told_and_not_read(together, poke, kind):  # noqa: F811
    for offset in OFFSETS:
        is_told(together(garble, poke, kind, WHERE, offset, ranks=2))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *((kind, MOST, most) for kind in (ALL_GATHER, ALL_TO_ALL, ALL_REDUCE) for most in (0, -1)),
        *((ALL_TO_ALL, COUNT, count) for count in (-1, -(2**63), 2**63 - 1, LONG)),
        (BARRIER, STEP, 1000),
    ],
)
def test_other_wild_numbers_are_told(together, poke, kind, field, value):  # noqa: F811
    is_told(together(garble, poke, kind, field, value, ranks=2))


def test_a_call_that_none_can_make_is_told(together, poke):  # noqa: F811
    is_told(together(garble, poke, BARRIER, KIND, 1000, ranks=2)[:1])


@pytest.mark.parametrize("value", [1, -1, 1 << 60, (3 << 32) | (999 << 16), (999 << 32)])
def test_a_wild_reason_to_stop_is_told(together, poke, value):  # noqa: F811
    for sentence in together(garble, poke, BARRIER, ABORT, value, ranks=2):
        assert "has numbers in the arena that cannot be" in sentence


def test_a_place_without_an_end_is_cut(together, poke):  # noqa: F811
    told, _ = together(garble, poke, BARRIER, SITE, 0, ranks=2)
    assert "x" * 500 in told
    assert "x" * 512 not in told


@pytest.mark.parametrize("label", [(1, 0), (1 << 62, 0), (1 << 20, 0), (0, 1000)])
def test_a_wild_label_is_told_and_not_read(together, poke, label):  # noqa: F811
    is_told(together(garble, poke, SEND, None, label, ranks=2))


# -- time


def look_after(engine, path, looks, apart):
    found = None
    if engine.rank == 0:
        found = poking(path).poke_looks(engine._handle, 1, looks, apart)
    engine.barrier()
    return found


look_after.deadline = 60


def test_an_hour_in_which_all_were_suspended_is_not_waited_for(together, poke):  # noqa: F811
    """The deadline is a minute, which is 1500 looks of 40 ms, however late they come."""
    hour, late = 3600 * 10**9, -4
    for looks, found in ((1, 0), (1490, 0), (1501, late)):
        assert together(look_after, poke, looks, hour, ranks=2)[0] == found


def wait_for_word(met, name, rank, size, pipe):
    """Rank 0 waits in an all-reduce; rank 1 comes when it is told to."""
    store = dist.PrefixStore(name, dist.FileStore(met))
    engine = join(store, rank=rank, size=size, arena_bytes=1 << 20, deadline=2)
    pipe.send(arena_number())
    if rank == 1:
        pipe.recv()
    x = torch.full((3,), rank + 1.0)
    try:
        engine.all_reduce(x)
        pipe.send(x.tolist())
    except PeerLost as error:
        pipe.send(str(error))
    engine.close()


def test_ranks_that_are_suspended_together_go_on(running):  # noqa: F811
    """Ctrl-Z, and fg after more than the deadline."""
    ranks, _ = running("suspended", 2, wait_for_word)
    assert not ranks[0][1].poll(0.2)  # it waits
    for process, _ in ranks:
        os.kill(process.pid, signal.SIGSTOP)
    assert not ranks[0][1].poll(2.5)
    for process, _ in reversed(ranks):
        os.kill(process.pid, signal.SIGCONT)
    assert not ranks[0][1].poll(0.1)  # it has looked again
    ranks[1][1].send("come")
    assert [pipe.recv() for _, pipe in ranks] == [[3.0] * 3] * 2
