"""Places: where every chunk of a program is on one rank, and what each of its steps waits for.

A program (`program.py`) names chunks of the buffers x, work and out. Here it is found once, for
each program and sizes, where every chunk is at each step:

    given     the rank's input: the chunks with which it begins, one behind the other; only read
    kept      its result: the chunks with which it ends, one behind the other
    scratch   chunks that the result has no place for; what arrives to be added; what is packed

    x   | 0 | 1 | 2 | 3 |  reduce-scatter on rank 1, whose result is chunk 1: chunk 3 is sent from
    kept    | 1 |          the input; 3 + what arrives goes to scratch, and is sent from there

`given` and `kept` may be one tensor, or one a part of the other: a chunk is then at one place in
both. What arrives lands where it stays; only what is added to other elements lands in scratch
first, and only a message of chunks that do not lie side by side is packed there.

What was sent, landed or was computed before is known for every place, so each task knows which ones
it comes after: those that write what it reads or writes, and those that read what it writes. All of
them are in the turn before or earlier, or in its own turn earlier in the list. So turns one after
the other are one order that keeps to this, and tasks that start earlier can neither change a result
nor come to a standstill.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from howdah.collectives.meaning import begins, ends
from howdah.collectives.program import ADDS, Program, Spans, Step, X, chunks_of, sums

GIVEN, KEPT, SCRATCH = "given", "kept", "scratch"
AHEAD = 3  # turns in which what landed keeps its place: later ones need not wait for it

Slot = tuple[str, int]  # a chunk of given and kept, or an interval of scratch


class Piece(NamedTuple):
    """The elements [start, stop) of a memory."""

    memory: str
    start: int
    stop: int


class Effect(NamedTuple):
    """`into` becomes the reduction of `terms`, in their order; a copy of one."""

    into: Piece
    terms: tuple[Piece, ...]


class Transfer(NamedTuple):
    """A piece that is sent to a peer, or received from it."""

    peer: int
    piece: Piece
    sends: bool


class Turn(NamedTuple):
    """The steps of one turn: first what is packed, then the messages, then their effects."""

    packs: list[Effect]
    sends: list[Transfer]
    receives: list[Transfer]
    effects: list[Effect]


class Task(NamedTuple):
    """Something that a rank does in a turn; `after` has the numbers of the tasks before it."""

    turn: int
    does: Effect | Transfer
    after: tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """What a rank does in a program, for given sizes.

    turns    by number; one in which the rank does nothing is empty
    last     copies of what is not in `kept` at the end
    scratch  elements of scratch
    starts   where chunks begin in given and in kept, in order: (start, chunk)
    """

    program: Program
    turns: list[Turn]
    last: list[Effect]
    scratch: int
    starts: dict[str, list[tuple[int, int]]]

    @property
    def sent(self) -> int:
        """Elements that the rank sends."""
        moved = (one.piece for turn in self.turns for one in turn.sends)
        return sum(stop - start for _, start, stop in moved)

    @cached_property
    def tasks(self) -> list[Task]:
        """All tasks but the packs of the first turn, which wait for nothing."""
        return [*_ordered(self)]


def way_of(program: Program, rank: int, sizes: Sequence[int]) -> Way:
    """What `rank` does.

    sizes  elements of each chunk
    """
    return _Finder(program, rank, sizes).way()


# -- what comes before what ------------------------------------------------------------


def _ordered(way: Way) -> Iterator[Task]:
    """Yields the tasks of a way in the order of their turns."""
    slots = _Slots(way)
    wrote: dict[Slot, int] = {}
    read: defaultdict[Slot, set[int]] = defaultdict(set)
    turns = [*way.turns, Turn([], [], [], way.last)]
    number = 0
    for at, turn in enumerate(turns):
        packs = turn.packs if at else []
        listed: list[Effect | Transfer] = [*packs, *turn.sends, *turn.receives, *turn.effects]
        for does in listed:
            reads, writes = slots.touched_by(does)
            after = {wrote[slot] for slot in (*reads, *writes) if slot in wrote}
            after.update(*(read[slot] for slot in writes))
            yield Task(at, does, tuple(sorted(after)))
            for slot in writes:
                wrote[slot] = number
                read[slot].clear()
            for slot in reads:
                read[slot].add(number)
            number += 1


class _Slots:
    """The places of a way, cut so that every piece is some whole ones."""

    def __init__(self, way: Way) -> None:
        self._starts = way.starts
        every = (one for turn in way.turns for some in turn for one in some)
        pieces = (piece for one in (*every, *way.last) for piece in _pieces_of(one))
        cuts = {cut for memory, *both in pieces if memory == SCRATCH for cut in both}
        self._cuts = sorted(cuts)

    def touched_by(self, does: Effect | Transfer) -> tuple[set[Slot], set[Slot]]:
        """The places that are read, and those that are written."""
        if isinstance(does, Effect):
            reads = {slot for term in does.terms for slot in self._of(term)}
            return reads, {*self._of(does.into)}
        both = set[Slot](), {*self._of(does.piece)}
        return both[::-1] if does.sends else both

    def _of(self, piece: Piece) -> Iterator[Slot]:
        if piece.memory == SCRATCH:
            cells = range(*(bisect_left(self._cuts, cut) for cut in piece[1:]))
            yield from ((SCRATCH, cell) for cell in cells)
            return
        starts = self._starts[piece.memory]
        first = bisect_right(starts, (piece.start, -1))
        for start, chunk in starts[first:]:
            if start >= piece.stop:
                return
            yield X, chunk


def _pieces_of(does: Effect | Transfer) -> Iterable[Piece]:
    return (does.into, *does.terms) if isinstance(does, Effect) else (does.piece,)


# -- where chunks lie ------------------------------------------------------------------


class _Finder:
    """Finds where chunks lie, step by step.

    at      where a chunk of a buffer is now
    """

    def __init__(self, program: Program, rank: int, sizes: Sequence[int]) -> None:
        self.program, self.sizes, self.steps = program, sizes, program.steps[rank]
        final = [*ends(program, rank)]
        self._given, self._final = self._starts(begins(program, rank)), self._starts(final)
        self._kept = self._final if program.output == X else {}
        self.at = {(X, chunk): (GIVEN, start) for chunk, start in self._given.items()}
        self._scratch: dict[tuple[str, int], int] = {}
        self._lent: list[tuple[int, int, int]] = []  # (start, stop, turn) of what passes
        self._chunks = self._top = 0  # elements of chunks that stay, and of all
        for buffer in dict.fromkeys(step.buffer for step in self.steps):
            written = {c for s in self._writes(buffer) for c in chunks_of(s.spans)}
            apart = written - self._kept.keys() if buffer == X else written
            for chunk in sorted(apart):
                self._scratch[buffer, chunk] = self._chunks
                self._chunks += sizes[chunk]

    def way(self) -> Way:
        """All of it."""
        turns: list[Turn] = []
        listed: defaultdict[int, list[Step]] = defaultdict(list)
        for step in self.steps:
            listed[step.turn].append(step)
        for number in range(max(listed, default=-1) + 1):
            self._now = number
            self._lent = [one for one in self._lent if one[2] > number - AHEAD]
            turns.append(self._turn(listed[number]))
        starts = {
            memory: [(start, chunk) for chunk, start in of.items() if self.sizes[chunk]]
            for memory, of in ((GIVEN, self._given), (KEPT, self._final))
        }
        last = _merged([*self._last()])
        return Way(self.program, turns, last, max(self._top, self._chunks), starts)

    def _last(self) -> Iterator[Effect]:
        """Copies of the chunks of the result that lie elsewhere at the end."""
        for chunk, to in self._final.items():
            (memory, start), size = self.at[self.program.output, chunk], self.sizes[chunk]
            if (memory, start) != (KEPT, to) and size:
                yield Effect(Piece(KEPT, to, to + size), (Piece(memory, start, start + size),))

    def _turn(self, steps: Sequence[Step]) -> Turn:
        turn, touched = Turn([], [], [], []), set[tuple[str, int]]()
        for step in steps:
            if step.kind == "send":
                self._send(turn, step)
        for together in sums(steps):
            first, came = together[0], []
            chunks = chunks_of(first.spans)
            for step in together:
                if step.source:
                    came.append([self.at[step.source, chunk] for chunk in chunks])
                    touched |= {(step.source, chunk) for chunk in chunks}
                    continue
                free = touched.isdisjoint((step.buffer, chunk) for chunk in chunks)
                if not self._receives(turn, step, direct=free and step.kind == "receive"):
                    came.append(self._landing(turn, step))
            self._effects(turn, first, came)
            touched |= {(first.buffer, chunk) for chunk in chunks}
        return turn

    def _send(self, turn: Turn, step: Step) -> None:
        pieces = self._pieces(step.spans, [self.at[step.buffer, c] for c in chunks_of(step.spans)])
        if len(pieces) > 1:
            packed, used = [], self._lend(sum(stop - start for _, start, stop in pieces))
            for piece in pieces:
                to = Piece(SCRATCH, used, used + piece.stop - piece.start)
                packed.append(Effect(to, (piece,)))
                used = to.stop
            turn.packs.extend(packed)
            pieces = [Piece(SCRATCH, packed[0].into.start, used)]
        turn.sends.extend(Transfer(step.peer, piece, sends=True) for piece in pieces)

    def _receives(self, turn: Turn, step: Step, *, direct: bool) -> bool:
        """Whether what arrives lands where it stays."""
        homes = [self._home(step.buffer, c) for c in chunks_of(step.spans)]
        into = self._pieces(step.spans, homes)
        if direct and len(into) <= 1:
            turn.receives.extend(Transfer(step.peer, piece, sends=False) for piece in into)
            return True
        return False

    def _landing(self, turn: Turn, step: Step) -> list[tuple[str, int]]:
        """Where each chunk of what arrives lands in scratch."""
        sizes = [self.sizes[chunk] for chunk in chunks_of(step.spans)]
        start = self._lend(sum(sizes))
        if sum(sizes):
            piece = Piece(SCRATCH, start, start + sum(sizes))
            turn.receives.append(Transfer(step.peer, piece, sends=False))
        return [(SCRATCH, start + before) for before in accumulate(sizes[:-1], initial=0)]

    def _effects(self, turn: Turn, step: Step, came: Sequence[Sequence[tuple[str, int]]]) -> None:
        """What a step does with what came: keeps it, or adds it to what is there; with what came
        for several sums to the same chunks, all at once.
        """
        found = []
        for at, chunk in enumerate(chunks_of(step.spans) if came else ()):
            size, (home, to) = self.sizes[chunk], self._home(step.buffer, chunk)
            own = [self.at[step.buffer, chunk]] if step.kind in ADDS else []
            places = [*own, *(one[at] for one in came)]
            terms = tuple(Piece(memory, start, start + size) for memory, start in places)
            found.append(Effect(Piece(home, to, to + size), terms))
        turn.effects.extend(_merged([one for one in found if one.into.start < one.into.stop]))
        for chunk in chunks_of(step.spans):
            self.at[step.buffer, chunk] = self._home(step.buffer, chunk)

    def _home(self, buffer: str, chunk: int) -> tuple[str, int]:
        """Where a chunk is written."""
        if (buffer, chunk) in self._scratch:
            return SCRATCH, self._scratch[buffer, chunk]
        return KEPT, self._kept[chunk]

    def _pieces(self, spans: Spans, where: Sequence[tuple[str, int]]) -> list[Piece]:
        """The chunks of a message as few pieces, in its order; none for one without elements."""
        pieces: list[Piece] = []
        for chunk, (memory, start) in zip(chunks_of(spans), where, strict=True):
            stop = start + self.sizes[chunk]
            if start == stop:
                continue
            if pieces and pieces[-1][::2] == (memory, start):
                pieces[-1] = pieces[-1]._replace(stop=stop)
            else:
                pieces.append(Piece(memory, start, stop))
        return pieces

    def _starts(self, chunks: Sequence[int]) -> dict[int, int]:
        """Where chunks begin that lie one behind the other."""
        sizes = accumulate((self.sizes[chunk] for chunk in chunks), initial=0)
        return dict(zip(chunks, sizes, strict=False))

    def _writes(self, buffer: str) -> Iterator[Step]:
        return (step for step in self.steps if step.kind != "send" and step.buffer == buffer)

    def _lend(self, elements: int) -> int:
        """The first room behind the chunks that nothing of this turn and the last few has."""
        start = self._chunks
        for first, stop, _ in sorted(self._lent):
            if start + elements <= first:
                break
            start = max(start, stop)
        self._lent.append((start, start + elements, self._now))
        self._top = max(self._top, start + elements)
        return start


def _merged(effects: Sequence[Effect]) -> list[Effect]:
    """Effects on neighbouring elements made one."""
    found: list[Effect] = []
    for effect in effects:
        before = (found[-1].into, *found[-1].terms) if found else ()
        now = (effect.into, *effect.terms)
        if len(before) == len(now) and all(
            (a.memory, a.stop) == b[:2] for a, b in zip(before, now, strict=True)
        ):
            into, *terms = (a._replace(stop=b.stop) for a, b in zip(before, now, strict=True))
            found[-1] = Effect(into, tuple(terms))
        else:
            found.append(effect)
    return found
