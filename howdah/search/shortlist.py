"""Which layouts are worth a closed form: those whose passes alone are not slower than the best.

    1. groups   layouts that differ in states, homes and recomputation alone have the same passes
    2. bounds   seconds of these passes with nothing recomputed, gathered or summed: no layout of
                the group is faster
    3. prices   the groups of the least bounds first, until the next bound is over the time of the
                last layout that is wanted

What is left out is slower than all that is wanted, so the fastest are those of the whole space.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from howdah.search.closed_form import Closed, ClosedForm
from howdah.search.part_tables import Numbers
from howdah.search.space import COLUMNS, RECOMPUTE, Question, Rows, alike
from howdah.shapes.weights import parts

MEMORY_ERROR = 1.05  # the closed form is this far off as a rule; tests hold it
STATES = ("zero", "shard", "home", "recompute")  # what passes do not depend on, in their bounds
PASSES = tuple(name for name in COLUMNS if name not in STATES)
FIRST, MORE = 1 << 14, 4  # layouts that are priced without bounds, or first; then so many times it


class Shortlist(NamedTuple):
    """Layouts that were priced, and how many were not, because they are slower than those.

    rows    in the order of the space; behind them those that recompute some blocks
    closed  seconds and bytes of each
    slower  layouts that were left out
    """

    rows: Rows
    closed: Closed
    slower: int

    def fitting(self, capacity: float) -> NDArray[np.bool_]:
        """Whether each layout seems to fit into `capacity` bytes of a device."""
        return np.asarray(self.closed.memory <= capacity * MEMORY_ERROR)


def shortlist(form: ClosedForm, rows: Rows, wanted: int, capacity: float) -> Shortlist:
    """The layouts of a space among which are the `wanted` fastest that seem to fit.

    rows      of `space`
    capacity  bytes of a device
    """
    if len(rows) <= FIRST:
        return Shortlist(*with_blocks(form.question, rows, form.price(rows), capacity), 0)
    groups, number = alike(rows, PASSES)
    for name in STATES:
        groups[name] = 0
    least = form.least(groups)[number]
    order = np.argsort(least, kind="stable")
    bounds, done, step = least[order], 0, FIRST
    closed = Closed(np.zeros(len(rows)), np.zeros(len(rows)))
    limit, found = np.inf, Shortlist(rows[:0], Closed(np.zeros(0), np.zeros(0)), len(rows))
    while done < np.searchsorted(bounds, limit, side="right"):
        last = bounds[min(done + step, len(rows)) - 1]
        stop = int(np.searchsorted(bounds, min(last, limit), side="right"))  # whole groups
        some = np.sort(order[done:stop])
        closed.seconds[some], closed.memory[some] = form.price(rows[some])
        done, step = stop, step * MORE
        kept = np.sort(order[:done])
        here = Closed(closed.seconds[kept], closed.memory[kept])
        found = Shortlist(*with_blocks(form.question, rows[kept], here, capacity), len(rows) - done)
        times = np.sort(found.closed.seconds[found.fitting(capacity)])
        limit = times[wanted - 1] if len(times) >= wanted else np.inf
    return found


def with_blocks(
    question: Question, rows: Rows, closed: Closed, capacity: float
) -> tuple[Rows, Closed]:
    """The layouts, and those in between that recompute as few blocks as memory asks for, where a
    layout fits with all of its blocks recomputed and not with none: time and memory are between
    those of the two.
    """
    each = len(RECOMPUTE)
    seconds, memory = closed.seconds.reshape(-1, each), closed.memory.reshape(-1, each)
    blocks = blocks_of(question, rows[::each])
    none, full = memory[:, 0], memory[:, -1]
    some = np.flatnonzero((none > capacity) & (full <= capacity) & (blocks > 1))
    share = ((none - capacity) / (none - full).clip(1))[some]
    count = np.minimum(np.ceil(share * blocks[some]), blocks[some] - 1)
    between = rows[some * each + each - 1]
    between["blocks"] = count
    share = count / blocks[some]
    time = seconds[some, 0] + share * (seconds[some, -1] - seconds[some, 0])
    held = np.minimum(none[some] + share * (full - none)[some], capacity)
    more = Closed(np.append(closed.seconds, time), np.append(closed.memory, held))
    return np.append(rows, between), more


def blocks_of(question: Question, rows: Rows | np.void) -> Numbers:
    """The blocks of the largest stage of layouts."""
    count = sum(part.is_block for part in parts(question.shape))
    return -(-count // (rows["pp"] * rows["virtual"]))
