"""Runs a program's steps of one rank on tensors, as rounds of messages.

A program (`collectives/program.py`) names chunks of the buffers x, work and out. Here it is found
once, for each program and sizes, where every chunk is at each step:

    given     the rank's input: the chunks with which it begins, one behind the other; only read
    kept      its result: the chunks with which it ends, one behind the other
    scratch   chunks that the result has no place for; what arrives to be added; what is packed

    x   | 0 | 1 | 2 | 3 |  reduce-scatter on rank 1, whose result is chunk 1: chunk 3 is sent from
    kept    | 1 |          the input; 3 + what arrives goes to scratch, and is sent from there

`given` and `kept` may be one tensor, or one a part of the other. What arrives lands where it stays;
only what is added to other elements lands in scratch first, and only a message of chunks that do
not lie side by side is packed there. Additions are those of the lists, in their order: the bits are
those of `collectives/execute.py`. bf16 and fp16 are added in float32 and rounded at each addition,
because a partial sum travels in the dtype of the tensors.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from howdah.collectives.meaning import begins, ends
from howdah.collectives.program import Program, Spans, Step, X, chunks_of
from howdah.comm.reduction import COMBINE
from howdah.comm.rounds import Message, Round

GIVEN, KEPT, SCRATCH = "given", "kept", "scratch"
ADDS = ("add", "reduce")


class Piece(NamedTuple):
    """The elements [start, stop) of a memory."""

    memory: str
    start: int
    stop: int


class Effect(NamedTuple):
    """`into` becomes `one`, or the reduction of `one` and `other`."""

    into: Piece
    one: Piece
    other: Piece | None = None


class Turn(NamedTuple):
    """The steps of one turn: first what is packed, then the messages, then their effects."""

    packs: list[Effect]
    sends: list[tuple[int, Piece]]
    receives: list[tuple[int, Piece]]
    effects: list[Effect]


class Way(NamedTuple):
    """What a rank does in a program, for given sizes.

    turns    by number; one in which the rank does nothing is empty
    last     copies of what is not in `kept` at the end
    scratch  elements of scratch
    """

    program: Program
    turns: list[Turn]
    last: list[Effect]
    scratch: int


def way_of(program: Program, rank: int, sizes: Sequence[int]) -> Way:
    """What `rank` does.

    sizes  elements of each chunk
    """
    return _Finder(program, rank, sizes).way()


def rounds_of(
    way: Way,
    memories: Mapping[str, Tensor],
    *,
    op: str = "sum",
    finish: Callable[[], object] = lambda: None,
) -> list[Round]:
    """The rounds of a way on tensors. What the first round packs is packed now.

    memories  flat tensors by name
    op        the reduction; a mean is a sum, which `finish` divides
    finish    called at the end
    """
    combine = COMBINE[op]

    def view(piece: Piece) -> Tensor:
        return memories[piece.memory][piece.start : piece.stop]

    def messages(listed: Sequence[tuple[int, Piece]]) -> list[Message]:
        return [(view(piece), peer) for peer, piece in listed]

    def happen(effects: Sequence[Effect]) -> None:
        for into, one, other in effects:
            to = view(into)
            if other is not None:
                combine(view(one), view(other), out=to)
            elif to.data_ptr() != (source := view(one)).data_ptr():
                to.copy_(source)

    def end() -> None:
        happen(way.last)
        finish()

    happen(way.turns[0].packs if way.turns else ())
    rounds = []
    for turn, after in zip(way.turns, [*way.turns[1:], None], strict=True):
        then = partial(happen, [*turn.effects, *(after.packs if after else ())])
        rounds.append(Round(messages(turn.sends), messages(turn.receives), then))
    return [*rounds, Round(after=end)]


class _Finder:
    """Finds where chunks lie, step by step.

    at      where a chunk of a buffer is now
    place   where each chunk of each memory begins
    """

    def __init__(self, program: Program, rank: int, sizes: Sequence[int]) -> None:
        self.program, self.sizes, self.steps = program, sizes, program.steps[rank]
        kept = [*ends(program, rank)] if program.output == X else []
        self._final, self._own = [*ends(program, rank)], begins(program, rank)
        self._given, self._kept = self._starts(self._own), self._starts(kept)
        self.at = {(X, chunk): (GIVEN, start) for chunk, start in self._given.items()}
        self._scratch: dict[tuple[str, int], int] = {}
        self._used = 0
        for buffer in dict.fromkeys(step.buffer for step in self.steps):
            written = {c for s in self._writes(buffer) for c in chunks_of(s.spans)}
            apart = written - self._kept.keys() if buffer == X else written
            for chunk in sorted(apart):
                self._scratch[buffer, chunk] = self._lend(sizes[chunk])

    def way(self) -> Way:
        """All of it."""
        turns, chunks, most = [], self._used, self._used
        listed: defaultdict[int, list[Step]] = defaultdict(list)
        for step in self.steps:
            listed[step.turn].append(step)
        for number in range(max(listed, default=-1) + 1):
            self._used = chunks
            turns.append(self._turn(listed[number]))
            most = max(most, self._used)
        return Way(self.program, turns, _merged([*self._last()]), most)

    def _last(self) -> Iterator[Effect]:
        """Copies of the chunks of the result that lie elsewhere at the end."""
        for chunk, to in self._starts(self._final).items():
            (memory, start), size = self.at[self.program.output, chunk], self.sizes[chunk]
            if (memory, start) != (KEPT, to) and size:
                yield Effect(Piece(KEPT, to, to + size), Piece(memory, start, start + size))

    def _turn(self, steps: Sequence[Step]) -> Turn:
        turn, touched = Turn([], [], [], []), set[tuple[str, int]]()
        for step in steps:
            if step.kind == "send":
                self._send(turn, step)
        for step in steps:
            if step.kind == "send":
                continue
            chunks = chunks_of(step.spans)
            if step.kind in ("copy", "reduce"):
                self._effects(turn, step, [self.at[step.source, chunk] for chunk in chunks])
                touched |= {(step.source, chunk) for chunk in chunks}
            else:
                first = touched.isdisjoint((step.buffer, chunk) for chunk in chunks)
                self._receive(turn, step, direct=first and step.kind == "receive")
            touched |= {(step.buffer, chunk) for chunk in chunks}
        return turn

    def _send(self, turn: Turn, step: Step) -> None:
        pieces = self._pieces(step.spans, [self.at[step.buffer, c] for c in chunks_of(step.spans)])
        if len(pieces) > 1:
            packed, used = [], self._lend(sum(stop - start for _, start, stop in pieces))
            for piece in pieces:
                to = Piece(SCRATCH, used, used + piece.stop - piece.start)
                packed.append(Effect(to, piece))
                used = to.stop
            turn.packs.extend(packed)
            pieces = [Piece(SCRATCH, packed[0].into.start, used)]
        turn.sends.extend((step.peer, piece) for piece in pieces)

    def _receive(self, turn: Turn, step: Step, *, direct: bool) -> None:
        chunks = chunks_of(step.spans)
        into = self._pieces(step.spans, [self._home(step.buffer, c) for c in chunks])
        if direct and len(into) <= 1:
            turn.receives.extend((step.peer, piece) for piece in into)
            self._move(step)
            return
        sizes = [self.sizes[chunk] for chunk in chunks]
        start = self._lend(sum(sizes))
        turn.receives.append((step.peer, Piece(SCRATCH, start, start + sum(sizes))))
        landed = [(SCRATCH, start + before) for before in accumulate(sizes[:-1], initial=0)]
        self._effects(turn, step, landed)

    def _effects(self, turn: Turn, step: Step, came: Sequence[tuple[str, int]]) -> None:
        """What a step does with what came: keeps it, or adds it to what is there."""
        found = []
        for chunk, (memory, start) in zip(chunks_of(step.spans), came, strict=True):
            size, (home, to) = self.sizes[chunk], self._home(step.buffer, chunk)
            into, value = Piece(home, to, to + size), Piece(memory, start, start + size)
            if step.kind in ADDS:
                now, at = self.at[step.buffer, chunk]
                found.append(Effect(into, Piece(now, at, at + size), value))
            else:
                found.append(Effect(into, value))
        turn.effects.extend(_merged([one for one in found if one.into.start < one.into.stop]))
        self._move(step)

    def _move(self, step: Step) -> None:
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
        start, self._used = self._used, self._used + elements
        return start


def _merged(effects: Sequence[Effect]) -> list[Effect]:
    """Effects on neighbouring elements made one."""
    found: list[Effect] = []
    for effect in effects:
        pairs = [pair for pair in zip(found[-1], effect, strict=True) if any(pair)] if found else []
        if pairs and all(a and b and (a.memory, a.stop) == b[:2] for a, b in pairs):
            found[-1] = Effect(*(a._replace(stop=b.stop) for a, b in pairs if a and b))
        else:
            found.append(effect)
    return found
