"""Program: a collective algorithm as data. For each rank a list of steps, each with one peer.

A vector is cut into *chunks*. A step names a buffer and ranges of chunks of it; how many elements a
chunk has is said when the program is run or priced, so one program serves every length, also one
that cannot be divided evenly. A chunk keeps its place: chunk 3 of any buffer of any rank has room
for chunk 3 of the vector, and a message of chunks arrives in the same chunks.

    rank 0                  rank 1
    turn 0  send    0 -> 1  turn 0  add 0 (from rank 0)     the chunks 0 and 1 of x are swapped
            add 1                   send 1 -> 0             and added, then given back
    turn 1  send    1 -> 1  turn 1  receive 1
            receive 0               send 0 -> 0

What the lists mean:

  - Steps of a rank that have the same turn are under way together. A rank begins its next turn
    when all messages of its turn have passed. No rank knows the turns of another.
  - A send waits for its receive, and a receive for its send. The first send from one rank to
    another belongs to the first receive there from that rank, and so on: there are no tags.
  - A send reads its buffer at any moment of its turn, so nothing may write there in this turn.
  - What arrives in one turn, and what `copy` and `reduce` do in it, takes effect in the order of
    the list. So a sum has the same order of additions, and the same bits, in every run.
  - Additions to the same chunks that follow each other in a turn are one sum (`sums`): in bf16 and
    fp16 it is made in float32 and rounded once.

Generators write neither sends nor receives, but *parts*: lists of `Message`, from which `program`
makes both ends. Parts can be put one after the other (`then`) and reversed in time (`mirror`): a
broadcast backwards is a reduce, an all-gather backwards is a reduce-scatter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

Spans = tuple[tuple[int, int], ...]  # ranges [start, stop) of chunks, in order, apart
Kind = Literal["send", "receive", "add", "copy", "reduce"]

X, WORK, OUT = "x", "work", "out"
ADDS = ("add", "reduce")


class Step(NamedTuple):
    """What a rank does with one peer.

    kind    send; receive: keep what arrives; add: add it to what is there; copy, reduce: the same
            with another buffer of the rank itself
    turn    steps with the same turn are under way together
    peer    the rank at the other end; the rank itself for copy and reduce
    spans   the chunks
    buffer  what a send reads, and what all others write
    source  what copy and reduce read; empty for messages
    """

    kind: Kind
    turn: int
    peer: int
    spans: Spans
    buffer: str = X
    source: str = ""


class Message(NamedTuple):
    """Chunks that go from a buffer of a rank to one of another rank, or of the same, in a turn."""

    turn: int
    source: int
    target: int
    spans: Spans
    add: bool = False
    reads: str = X
    writes: str = X


Part = list[Message]


@dataclass(frozen=True)
class Program:
    """A collective on `ranks` ranks; `steps[rank]` are in the order of their turns.

    op      what it does: a key of `collectives.meaning.OPERATIONS`
    chunks   number of pieces into which the vector is cut
    root    the rank that a broadcast, reduce, scatter or gather begins or ends at
    output  the buffer with the result; the input is in x
    """

    op: str
    name: str
    ranks: int
    chunks: int
    steps: tuple[tuple[Step, ...], ...]
    root: int = 0
    output: str = X

    @cached_property
    def turns(self) -> list[list[list[Step]]]:
        """The steps of each rank, grouped by turn: [rank][number of the turn][step]."""
        return [
            [list(steps) for _, steps in groupby(one, key=lambda step: step.turn)]
            for one in self.steps
        ]


def program(  # noqa: PLR0913  what a Program has
    op: str,
    name: str,
    ranks: int,
    chunks: int,
    part: Part,
    *,
    root: int = 0,
    output: str = X,
) -> Program:
    """The Program whose messages are those of `part`; empty messages are left out."""
    steps: list[list[Step]] = [[] for _ in range(ranks)]
    for turn, source, target, spans, add, reads, writes in sorted(part, key=lambda m: m.turn):
        if not spans:
            continue
        if source == target:
            kind: Kind = "reduce" if add else "copy"
            steps[target].append(Step(kind, turn, target, spans, writes, reads))
            continue
        steps[source].append(Step("send", turn, target, spans, reads))
        kind = "add" if add else "receive"
        steps[target].append(Step(kind, turn, source, spans, writes))
    return Program(op, name, ranks, chunks, tuple(map(tuple, steps)), root, output)


def sums(steps: Iterable[Step]) -> list[list[Step]]:
    """The steps of a turn but its sends, in order; additions to the same chunks of a buffer that
    follow each other are together.
    """
    found: list[list[Step]] = []
    for step in steps:
        last = found[-1][-1] if found else None
        if step.kind == "send":
            continue
        if (
            last
            and {last.kind, step.kind} <= {*ADDS}
            and (last.spans, last.buffer) == (step.spans, step.buffer)
            and step.source != step.buffer
        ):
            found[-1].append(step)
        else:
            found.append([step])
    return found


# -- parts -----------------------------------------------------------------------------


def length(part: Part) -> int:
    """Number of turns of a part that begins at turn 0."""
    return 1 + max((message.turn for message in part), default=-1)


def shift(part: Iterable[Message], turns: int) -> Part:
    """The same part, `turns` turns later."""
    return [message._replace(turn=message.turn + turns) for message in part]


def then(*parts: Part) -> Part:
    """Parts one after the other."""
    whole: Part = []
    for part in parts:
        whole += shift(part, length(whole))
    return whole


def mirror(part: Part, *, add: bool) -> Part:
    """The part backwards in time, in x, each message from its target to its source.

    add  what arrives is added: the mirror of a broadcast is a reduce
    """
    last = length(part) - 1
    return [
        Message(last - message.turn, message.target, message.source, message.spans, add)
        for message in reversed(part)
    ]


# -- chunks -----------------------------------------------------------------------------


def span(start: int, stop: int) -> Spans:
    """The chunks from `start` to before `stop`."""
    return ((start, stop),) if stop > start else ()


def chunk(number: int) -> Spans:
    """One chunk."""
    return ((number, number + 1),)


def cut(spans: Spans, parts: int) -> list[Spans]:
    """One range of chunks in equal parts; its length must be a multiple of `parts`."""
    ((start, stop),) = spans
    size, rest = divmod(stop - start, parts)
    if rest:
        raise ValueError(f"{stop - start} chunks cannot be cut into {parts} equal parts")
    return [span(start + i * size, start + (i + 1) * size) for i in range(parts)]


def join(shares: Iterable[Spans]) -> Spans:
    """The chunks of all shares, in order, with ranges that touch made one.

    >>> join([((4, 6),), ((0, 1),), ((1, 2),)])
    ((0, 2), (4, 6))
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted({one for spans in shares for one in spans}):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def chunks_of(spans: Spans) -> list[int]:
    """The numbers of all chunks in `spans`."""
    return [chunk for start, stop in spans for chunk in range(start, stop)]


def split(length: int, parts: int) -> list[int]:
    """Sizes of `parts` parts of `length` elements that differ by at most one.

    >>> split(7, 3)
    [2, 2, 3]
    """
    return [length * (i + 1) // parts - length * i // parts for i in range(parts)]
