"""engine.c as Python sees it: its numbers for operations, dtypes and failures, and its functions.

The lists stand in the order of the enums of engine.c and engine_reduce.h.
"""

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

from howdah.comm.reduction import COMBINE, REDUCIBLE
from howdah.comm.signature import spell

KINDS = (
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "broadcast", "scatter"),
    *("all_to_all", "barrier", "send", "receive", "signal", "wait"),
)
REASONS = (
    *("fine", "died", "left", "stopped", "late", "disagree", "interrupted", "busy", "mismatch"),
    *("no memory", "gave up"),
)
OPERATIONS = tuple(COMBINE)
CODES = {name: code for code, name in enumerate(OPERATIONS)}
# Anything else is moved as it is, never added: a number for each, to be compared between ranks.
MOVED = (
    *(torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
DTYPES = {dtype: (code, dtype.itemsize) for code, dtype in enumerate((*REDUCIBLE, *MOVED))}

# The Op of engine.c: kind, dtype, op, width, peer, count, in, out, counts, received.
OP = Struct("IIIIqQQQQQ")
PULSE = CFUNCTYPE(c_int)


class Notice(Structure):
    """The part of a rank's notice that must be equal on all ranks."""

    _fields_ = (
        ("sequence", c_uint64),
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("op", c_uint32),
        ("root", c_int),
        ("count", c_uint64),
        ("counts_hash", c_uint64),
    )


class Label(Structure):
    """What a chunk of a message says about the whole."""

    _fields_ = (("dtype", c_uint32), ("kind", c_uint32), ("count", c_uint64), ("where", c_uint64))


@cache
def load_library(path: Path) -> CDLL:
    """The functions of a compiled engine.c. They run without the interpreter's lock."""
    library = CDLL(str(path))
    ints, size = POINTER(c_int), c_uint64
    for name, result, arguments in (
        ("arena_bytes", size, (c_int, size)),
        ("heap_offset", size, (c_int, size, c_int)),
        ("open", c_void_p, (c_void_p, size, c_int, c_int, ints, ints, c_double, c_double, PULSE)),
        ("run", c_int64, (c_void_p, c_char_p, c_int)),
        ("explain", None, (c_void_p, ints, *[POINTER(Notice)] * 2, POINTER(Label))),
        ("tell", None, (c_void_p, c_char_p)),
        ("told", c_char_p, (c_void_p, c_int)),
        ("give_up", None, (c_void_p,)),
        ("close", None, (c_void_p,)),
    ):
        function = getattr(library, f"howdah_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def words(kind: int, dtype: int, op: int, root: int, count: int) -> str:
    """A call as the errors of all transports spell it, from the engine's numbers for it."""
    name = KINDS[kind]
    if name in ("barrier", "signal", "wait"):
        return name
    choice = f"root {root}" if name in ("reduce", "gather", "broadcast", "scatter") else ""
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        choice = f"{OPERATIONS[op]}, {choice}".removesuffix(", ")
    counts = [] if name == "all_to_all" else [count]  # which may differ from rank to rank
    return spell(name, (*REDUCIBLE, *MOVED)[dtype], counts, choice)
