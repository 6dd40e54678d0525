"""Packing: whole conversations in rows of a batch, as many as fit, each a document of its own.

    padded     a a a a .  |  b b b . .  |  c c c c c c*  |  d d . . .
    packed     a a a a .  |  b b b d d  |  c c c c c c*             .: padding   *: is cut

A conversation of n tokens takes n - 1 positions: its last token is predicted and not read. One that
is longer than a row is cut at the row's end, and one that has no trained token then is left out,
both as in TRL (truncation_mode keep_start, packing_strategy bfd). Rows are filled by best fit, the
longest conversation first (Johnson 1974: at most 11/9 of the fewest rows and a few more); they are
numbered by their first conversation, and have their conversations in the order of the source. So
what shares a row is a function of the text and of the row's length.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class Packed(NamedTuple):
    """Which conversations are in which row.

    documents  [n] numbers of conversations, row after row
    rows       [rows + 1] where the conversations of a row begin in `documents`
    sizes      [conversations] positions that each takes
    cut        how many are longer than a row; without: how many have nothing to train on
    """

    documents: Numbers
    rows: Numbers
    sizes: Numbers
    cut: int
    without: int

    def of(self, row: int) -> list[int]:
        """The conversations of a row."""
        found: list[int] = self.documents[self.rows[row] : self.rows[row + 1]].tolist()
        return found


def pack(trained: npt.NDArray[np.uint8], starts: Numbers, *, room: int, alone: bool) -> Packed:
    """Packs the conversations of a stream into rows of `room` positions.

    trained [tokens] 1 where the token of the stream is trained on
    starts  [conversations] where the end token in front of each is
    alone   whether each has a row of its own
    """
    stops = np.append(starts[1:], len(trained) - 1)
    lengths = stops - starts - 1
    kept = np.minimum(lengths, room + 1)
    edges = np.stack([starts + 1, starts + 1 + kept], 1).reshape(-1)
    good = np.flatnonzero(np.add.reduceat(trained, edges, dtype=np.int64)[::2] * (kept > 0))
    sizes = np.maximum(kept - 1, 0)
    rows = np.arange(len(good)) if alone else best_fit(sizes[good], room)
    _, first = np.unique(rows, return_index=True)
    number = np.argsort(np.argsort(first))[rows] if len(good) else rows
    order = np.argsort(number, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(number))]) if len(good) else np.zeros(1)
    return Packed(
        documents=good[order],
        rows=bounds.astype(np.int64),
        sizes=sizes,
        cut=int((lengths > room + 1).sum()),
        without=len(starts) - len(good),
    )


def best_fit(sizes: Numbers, room: int) -> Numbers:
    """The row [n] of each of n sizes, all at most `room`: the longest first, each to the row in
    which the least is left.

    >>> best_fit(np.array([4, 3, 6, 2]), 6).tolist()
    [1, 2, 0, 1]
    """
    found, count = np.zeros(len(sizes), np.int64), 0
    spaces: list[int] = []  # that some row has left, ascending, once each
    with_space: dict[int, list[int]] = {}
    for one in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[one])
        at = bisect_left(spaces, size)
        if at < len(spaces):
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del spaces[at]
        else:
            space, row, count = room, count, count + 1
        found[one], left = row, space - size
        rows = with_space.setdefault(left, [])
        if not rows:
            insort(spaces, left)
        rows.append(row)
    return found
