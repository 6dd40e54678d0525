"""The interface of engine.c: its numbers for operations, dtypes and failures, and its functions.

The lists are in the order of the enums of engine.c and engine_reduce.h.
"""

from collections.abc import Sequence
from ctypes import (
    CDLL,
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from struct import Struct

import torch

from howdah.comm.build import NoCompiler, engine_library, open_library
from howdah.comm.reduction import COMBINE, REDUCIBLE
from howdah.comm.settings import read_settings
from howdah.comm.signature import spell

RANKS = 64  # the most ranks, as in engine.c
SITE_BYTES = 512

KINDS = (
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "broadcast", "scatter"),
    *("all_to_all", "barrier", "send", "receive", "signal", "wait"),
)
REASONS = (
    *("fine", "died", "left", "stopped", "late", "disagree", "interrupted", "busy", "mismatch"),
    *("no memory", "gave up", "garbled", "elsewhere"),
)
OPERATIONS = tuple(COMBINE)
CODES = {name: code for code, name in enumerate(OPERATIONS)}
# Dtypes that are only moved, never reduced. Each has a number, which the ranks compare.
MOVED = (
    *(torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
DTYPES = {dtype: (code, dtype.itemsize) for code, dtype in enumerate((*REDUCIBLE, *MOVED))}

# The Op of engine.c: kind, dtype, op, width, peer, count, in, out, counts, received.
OP = Struct("IIIIqQQQQQ")
PULSE = CFUNCTYPE(c_int)


class Notice(Structure):
    """A rank's description of an operation, which the ranks compare: all fields but the last four
    must be equal on all ranks.
    """

    _fields_ = (
        ("sequence", c_uint64),
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("op", c_uint32),
        ("root", c_int),
        ("count", c_uint64),
        ("counts_hash", c_uint64),
        ("most", c_uint64),
        ("where", c_uint64),
        ("counts", c_int64 * RANKS),
        ("received", c_int64 * RANKS),
    )


class Label(Structure):
    """The header of each chunk of a message, which describes the complete message."""

    _fields_ = (("dtype", c_uint32), ("kind", c_uint32), ("count", c_uint64), ("where", c_uint64))


@cache
def load_library(path: Path) -> CDLL:
    """Loads a compiled engine.c. Its functions run without the interpreter's lock.

    The descriptor stays open: the loader identifies libraries by their path, here /proc/self/fd/N,
    and the number N of a closed descriptor could be used for another library. Raises NoCompiler.
    """
    library = CDLL(f"/proc/self/fd/{open_library(path)}")
    ints, size = POINTER(c_int), c_uint64
    for name, result, arguments in (
        ("arena_bytes", size, (c_int, size)),
        ("heap_offset", size, (c_int, size, c_int)),
        ("open", c_void_p, (c_void_p, size, c_int, c_int, ints, ints, c_double, c_double, PULSE)),
        ("run", c_int64, (c_void_p, c_char_p, c_int)),
        ("bytes_sent", size, (c_void_p, c_char_p)),
        ("explain", None, (c_void_p, ints, *[POINTER(Notice)] * 2, POINTER(Label))),
        ("tell", None, (c_void_p, c_char_p)),
        ("told", c_int, (c_void_p, c_int, c_char_p)),
        ("abort", None, (c_void_p,)),
        ("close", None, (c_void_p,)),
    ):
        function = getattr(library, f"howdah_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def library_if_there() -> CDLL | None:
    """The library, where it was compiled or installed before; nothing is compiled for this."""
    try:
        return load_library(engine_library(read_settings(), build=False))
    except NoCompiler:
        return None


def known(kind: int, dtype: int, op: int) -> bool:
    """Whether the engine's numbers for a call are valid. Those of another rank may be garbled."""
    return kind < len(KINDS) and dtype < len(DTYPES) and op < len(OPERATIONS)


def choice(kind: int, op: int, root: int) -> str:
    """The options of a call besides its tensor, as text: its reduction and its root, if any."""
    name = KINDS[kind]
    reduction = OPERATIONS[op] if name in ("all_reduce", "reduce", "reduce_scatter") else ""
    rooted = name in ("reduce", "gather", "broadcast", "scatter")
    return ", ".join(filter(None, [reduction, f"root {root}" if rooted else ""]))


def describe_call(kind: int, dtype: int, counts: Sequence[int], chosen: str = "") -> str:
    """A call as text, in the form of the error messages of all transports.

    kind, dtype  the engine's numbers for the operation and the dtype
    counts       numbers of elements
    chosen       the text of `choice`
    """
    name = KINDS[kind]
    if name in ("barrier", "signal", "wait"):
        return name
    return spell(name, (*REDUCIBLE, *MOVED)[dtype], counts, chosen)
