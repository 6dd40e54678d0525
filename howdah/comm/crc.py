"""CRC-32, that of zlib: of what goes over a wire, and of what is kept in files.

Long buffers are folded by the engine's library (`engine_crc.h`), where it is there and the
processor can; all else is zlib's, whose numbers are the same. Nothing is compiled for this: where a
run has no use for the engine, zlib will do.
"""

import zlib
from collections.abc import Callable
from ctypes import c_uint32, c_uint64, c_void_p
from functools import cache

import numpy as np

from howdah.comm.engine_abi import library_if_there

SHORT = 1 << 14  # bytes below which to call the library takes longer than it gains


def crc32(data: bytes | memoryview, before: int = 0) -> int:
    """The CRC-32 of contiguous bytes, behind others of which it is `before`. Long ones are read
    without the interpreter's lock.
    """
    if len(data) < SHORT or (fold := _folder()) is None:
        return zlib.crc32(data, before)
    flat = np.frombuffer(data, np.uint8)
    return fold(before, flat.ctypes.data, flat.nbytes)


@cache
def _folder() -> Callable[[int, int, int], int] | None:
    """The library's function; None: there is none that this processor can run."""
    library = library_if_there()
    folds = getattr(library, "howdah_folds", None)  # what was installed before has none
    if library is None or folds is None or not folds():
        return None
    fold = library.howdah_crc32
    fold.restype, fold.argtypes = c_uint32, (c_uint32, c_void_p, c_uint64)
    return fold
