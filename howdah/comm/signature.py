"""Signatures: what a rank says of an operation before it takes part in it.

Ranks of a group call the same operations in the same order. Where they do not (one took another
branch, or has a tensor of another size), most libraries hang or add numbers that have nothing to
do with each other. Here every operation carries a record, and the ranks compare them first:

    rank 0   #17 all_reduce(float32 [1000], sum)      at train.py:31
    rank 1   #17 broadcast(float32 [1000], root 0)    at other.py:9

Records have a fixed size, so that they can be read whatever follows them: a checksum of the
call, the call and the place in the caller's code, cut where they are too long for a sentence.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

CALL, PLACE = 132, 120  # bytes of text
RECORD = 4 + CALL + PLACE

_FOLDER = str(Path(__file__).parent)


class Disagreement(RuntimeError):
    """Two ranks called different operations; the sentence names both calls and both places."""


def spell(operation: str, dtype: object, counts: Sequence[int], choice: str = "") -> str:
    """One call, without its number.

    >>> spell("broadcast", "torch.float32", [1000], "root 0")
    'broadcast(float32 [1000], root 0)'
    """
    sizes = " ".join(map(str, counts))
    after = f", {choice}" if choice else ""
    return f"{operation}({str(dtype).removeprefix('torch.')} [{sizes}]{after})"


def pack(number: int, call: str, place: str) -> bytes:
    """The record of the `number`-th operation; RECORD bytes."""
    text = f"#{number} {call}".encode()
    head = crc32(text).to_bytes(4, "little") + text[:CALL].ljust(CALL)
    return head + place.encode()[-PLACE:].ljust(PLACE)


def compare(rank: int, mine: bytes, peer: int, theirs: bytes) -> None:
    """Raises Disagreement where two records are not of the same call."""
    if mine[: 4 + CALL] != theirs[: 4 + CALL]:
        raise Disagreement(f"rank {rank} called {_read(mine)}, but rank {peer} {_read(theirs)}")


def _read(record: bytes) -> str:
    call, place = record[4 : 4 + CALL], record[4 + CALL :]
    return f"{call.decode(errors='replace').strip()} at {place.decode(errors='replace').strip()}"


def caller() -> str:
    """`file:line` of the code outside howdah.comm that asked for what is running."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
