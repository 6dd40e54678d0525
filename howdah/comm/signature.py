"""Signatures: descriptions of operations, which the ranks compare before they take part in them.

All ranks of a group must call the same operations in the same order. If they do not (a rank took
another branch, or has a tensor of another size), most libraries hang or add unrelated numbers. Here
every operation sends a record of its call, and the ranks compare the records first:

    rank 0   #17 all_reduce(float32 [1000], sum)      at train.py:31
    rank 1   #17 broadcast(float32 [1000], root 0)    at other.py:9

Records have a fixed size, so that they can be read without knowing the call. A record holds a
checksum of the call, its text, and the line of the caller's code; both are cut if they are too
long. Two different calls may look equal when they are cut (counts of many ranks, many operations
at once). Then the ranks exchange the full calls, and the error names the difference.
"""

import contextlib
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from zlib import crc32

import torch

BY_RANK = ("reduce_scatter", "all_gather", "gather", "scatter")  # with a count for each rank
SPELLED = re.compile(r"(?P<head>(?:#\d+ )?(?P<name>\w+)\(\w+ \[)(?P<counts>[\d ]*)(?P<tail>\].*)")
CALL, SITE = 132, 120  # bytes of text
RECORD = 4 + CALL + SITE

# Whose frames are skipped: those of this floor, and of torch where it calls the backend.
_TORCH = f"{Path(torch.__file__).parent}/"
_INSIDE = (str(Path(__file__).parent), contextlib.__file__, _TORCH)


class Disagreement(RuntimeError):
    """Two ranks called different operations; the message names both calls and both lines."""


def spell(operation: str, dtype: object, counts: Sequence[int], choice: str = "") -> str:
    """A call as text, without its number.

    >>> spell("broadcast", "torch.float32", [1000], "root 0")
    'broadcast(float32 [1000], root 0)'
    """
    sizes = " ".join(map(str, counts))
    after = f", {choice}" if choice else ""
    return f"{operation}({str(dtype).removeprefix('torch.')} [{sizes}]{after})"


def number(count: int, call: str) -> str:
    """A call as text with its number, as it is compared and shown in errors."""
    return f"#{count} {call}"


def pack(call: str, site: str) -> bytes:
    """The record (RECORD bytes) of a numbered call that was made at `site`, a file and line."""
    text = call.encode()
    head = crc32(text).to_bytes(4, "little") + text[:CALL].ljust(CALL)
    return head + site.encode()[-SITE:].ljust(SITE)


def agree(mine: bytes, theirs: bytes) -> bool:
    """Whether two records describe the same call."""
    return mine[: 4 + CALL] == theirs[: 4 + CALL]


def look_alike(mine: bytes, theirs: bytes) -> bool:
    """Whether two records describe different calls, but with equal texts, because they are cut."""
    return not agree(mine, theirs) and mine[4 : 4 + CALL] == theirs[4 : 4 + CALL]


def disagreement(
    rank: int, mine: bytes, peer: int, theirs: bytes, wholes: tuple[str, str]
) -> Disagreement:
    """The error for two records that describe different calls.

    rank, mine    this rank and its record
    peer, theirs  another rank and its record
    wholes        both calls in full, for records that look equal because they are cut
    """
    where = difference(*wholes) if look_alike(mine, theirs) else ""
    said = f"rank {rank} called {_read(mine)}, but rank {peer} {_read(theirs)}"
    return Disagreement(said + where)


def difference(mine: str, theirs: str) -> str:
    """The difference of two calls, or of two lists of calls started together, to end an error with.

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
    """The counts and the text of an exchange between two ranks, equal on both of them.

    counts  elements from `rank` to `peer`, and from `peer` to `rank`; returned with that of the
            lower rank first
    """
    low, high = sorted((rank, peer))
    return list(counts if rank == low else reversed(counts)), f"{low} to {high} and back"


def is_message(call: str) -> bool:
    """Whether a call, as text, is a message between two ranks."""
    return call.startswith("send(")


def in_one_order(calls: Sequence[str], pair: Collection[int]) -> list[str]:
    """The calls that two ranks start together, in one order on both: messages from the lower rank,
    those from the higher one, everything else.
    """
    back = f" {max(pair)} to {min(pair)})"
    return sorted(calls, key=lambda call: (not is_message(call), call.endswith(back)))


def different_counts(mine: Sequence[object], theirs: Sequence[object]) -> str:
    """The first rank for which two calls have different counts, as the end of an error message."""
    for rank, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            return f"; the counts differ first for rank {rank}: {one} and {other}"
    return ""


def _read(record: bytes) -> str:
    call, site = record[4 : 4 + CALL], record[4 + CALL :]
    return f"{call.decode(errors='replace').strip()} at {site.decode(errors='replace').strip()}"


def caller() -> str:
    """`file:line` of the innermost caller outside of howdah.comm and torch."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
