"""Signatures: what a rank says of an operation before it takes part in it.

Ranks of a group call the same operations in the same order. Where they do not (one took another
branch, or has a tensor of another size), most libraries hang or add numbers that have nothing to
do with each other. Here every operation carries a record, and the ranks compare them first:

    rank 0   #17 all_reduce(float32 [1000], sum)      at train.py:31
    rank 1   #17 broadcast(float32 [1000], root 0)    at other.py:9

MetricsWriter have a fixed size, so that they can be read whatever follows them: a checksum of the
call, the call and the place in the caller's code, cut where they are too long for a sentence.
Two calls that are cut may look alike (the counts of many ranks, many operations at once): then the
ranks tell each other the whole, and the sentence says where it differs.
"""

import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

BY_RANK = ("reduce_scatter", "all_gather", "gather", "scatter")  # have a count for each rank
SPELLED = re.compile(r"(?P<head>(?:#\d+ )?(?P<name>\w+)\(\w+ \[)(?P<counts>[\d ]*)(?P<tail>\].*)")
CALL, PLACE = 132, 120  # bytes of text
RECORD = 4 + CALL + PLACE

_INSIDE = (str(Path(__file__).parent), contextlib.__file__)  # that leaves a group of calls


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


def number(count: int, call: str) -> str:
    """The `count`-th call, as it is told and compared."""
    return f"#{count} {call}"


def pack(call: str, place: str) -> bytes:
    """The record of a numbered call; RECORD bytes."""
    text = call.encode()
    head = crc32(text).to_bytes(4, "little") + text[:CALL].ljust(CALL)
    return head + place.encode()[-PLACE:].ljust(PLACE)


def agree(mine: bytes, theirs: bytes) -> bool:
    """Whether two records are of the same call."""
    return mine[: 4 + CALL] == theirs[: 4 + CALL]


def look_alike(mine: bytes, theirs: bytes) -> bool:
    """Whether two records tell the same, for the calls were cut, and are not of the same call."""
    return not agree(mine, theirs) and mine[4 : 4 + CALL] == theirs[4 : 4 + CALL]


def disagreement(
    rank: int, mine: bytes, peer: int, theirs: bytes, wholes: tuple[str, str]
) -> Disagreement:
    """The error for two records that are not of the same call.

    `wholes` are both calls as they were before they were cut, for records that look alike.
    """
    where = difference(*wholes) if look_alike(mine, theirs) else ""
    said = f"rank {rank} called {_read(mine)}, but rank {peer} {_read(theirs)}"
    return Disagreement(said + where)


def difference(mine: str, theirs: str) -> str:
    """Where two calls differ, or two lists of calls that were started together.

    >>> difference("#1 all_gather(float32 [5 6 7])", "#1 all_gather(float32 [5 8 7])")
    '; the counts differ first for rank 1: 6 and 8'
    """
    for one, other in zip(mine.split("; "), theirs.split("; "), strict=False):
        if one == other:
            continue
        a, b = SPELLED.fullmatch(one), SPELLED.fullmatch(other)
        if a and b and a["name"] in BY_RANK and a.group("head", "tail") == b.group("head", "tail"):
            return different_counts(a["counts"].split(), b["counts"].split())
        return f"; the first that differ are {one} and {other}"
    return "; one of them goes on where the other ends" if mine != theirs else ""


def both_ways(rank: int, peer: int, counts: Sequence[int]) -> tuple[list[int], str]:
    """What a pair exchanges, as both spell it: to the peer and from it, the lower rank's first."""
    low, high = sorted((rank, peer))
    return list(counts if rank == low else reversed(counts)), f"{low} to {high} and back"


def different_counts(mine: Sequence[object], theirs: Sequence[object]) -> str:
    """The first rank for which two calls have different counts, to end a sentence with."""
    for rank, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            return f"; the counts differ first for rank {rank}: {one} and {other}"
    return ""


def _read(record: bytes) -> str:
    call, place = record[4 : 4 + CALL], record[4 + CALL :]
    return f"{call.decode(errors='replace').strip()} at {place.decode(errors='replace').strip()}"


def caller() -> str:
    """`file:line` of the code outside howdah.comm that asked for what is running."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
