"""The proof of a program: it is carried out for all ranks at once, on symbols in place of numbers.

A chunk holds a *term*: the input of a rank, or the sum of two terms. Every term knows the set of
ranks that are in it, so at the end each chunk of the result can be compared with what the operation
means. `problems` finds, as sentences:

  - a send without its receive, other chunks at its two ends, ranks that wait for each other
  - chunks that are read before anything was written there
  - a sum that has the input of one rank twice
  - chunks that are written while a send of the same turn may still read them
  - chunks that are overwritten, or left at the end, though what arrived in them was never read,
    and chunks that arrive where they are already
  - a result that is not exactly the sum, or the piece, that it must be
  - an all-reduce whose ranks add in another order. IEEE addition is commutative, but not
    associative: equal terms, with a + b the same as b + a, are equal bits on all ranks.
"""

from collections.abc import Iterator

from howdah.collectives.meaning import OPERATIONS, begins, ends
from howdah.collectives.program import Program, Step, X, chunks_of
from howdah.collectives.walk import Event, Standstill, walk

Slot = tuple[int, str, int]  # rank, buffer, chunk


class Terms:
    """All terms, by number: equal sums have one number. Number 0 is the unknown."""

    def __init__(self, ranks: int) -> None:
        self.ranks_in = [0, *(1 << rank for rank in range(ranks))]
        self._sums: dict[tuple[int, int], int] = {}

    def of(self, rank: int) -> int:
        """The input of a rank."""
        return rank + 1

    def add(self, a: int, b: int) -> int:
        """The sum of two terms."""
        pair = (a, b) if a < b else (b, a)
        if pair not in self._sums:
            self._sums[pair] = len(self.ranks_in)
            self.ranks_in.append(self.ranks_in[a] | self.ranks_in[b])
        return self._sums[pair]


def problems(program: Program) -> list[str]:
    """What is wrong with a program, as sentences; an empty list is the proof that nothing is."""
    if wrong := list(_malformed(program)):
        return wrong
    try:
        order = walk(program)
    except Standstill as stuck:
        return [str(stuck)]
    proof = _Proof(program)
    found = list(dict.fromkeys(sentence for event in order.events for sentence in proof.at(event)))
    return found + list(proof.at_the_end())


def _malformed(program: Program) -> Iterator[str]:
    """What keeps a program from being carried out, or from meaning anything."""
    if program.op not in OPERATIONS:
        yield f"{program.op!r} is no operation"
        return
    blocks = program.ranks ** OPERATIONS[program.op].blocks
    if program.chunks < 1 or program.chunks % blocks:
        yield f"{program.chunks} chunks are not cut into the {blocks} blocks of {program.op}"
    if len(program.steps) != program.ranks:
        yield f"{len(program.steps)} lists of steps are for {program.ranks} ranks"
    for rank, steps in enumerate(program.steps):
        if any(not 0 <= step.peer < program.ranks for step in steps):
            yield f"rank {rank} has a step with a rank that does not exist"


class _Proof:
    """The state of all ranks, while the program is carried out event by event."""

    def __init__(self, program: Program) -> None:
        self.program, self.terms = program, Terms(program.ranks)
        self.held: dict[Slot, int] = {}  # the term in each slot
        self.unread: set[Slot] = set()  # written, and not read since
        self.flying: dict[tuple[int, int], list[list[int]]] = {}  # terms of sends, by pair
        for rank in range(program.ranks):
            for chunk in begins(program, rank):
                self.held[rank, X, chunk] = self.terms.of(rank)

    def at(self, event: Event) -> Iterator[str]:
        rank, turn = event.rank, event.turn
        steps = self.program.turns[rank][turn]
        where = f"rank {rank}, turn {steps[0].turn}"
        if event.begins:
            for step in steps:
                if step.kind == "send":
                    terms = [
                        self._read((rank, step.buffer, chunk)) for chunk in chunks_of(step.spans)
                    ]
                    if not all(terms):
                        yield f"{where}: sends chunks of {step.spans} that nothing was written to"
                    self.flying.setdefault((rank, step.peer), []).append(terms)
            return
        sent = {
            (rank, step.buffer, chunk)
            for step in steps
            if step.kind == "send"
            for chunk in chunks_of(step.spans)
        }
        for step in steps:
            if step.kind != "send":
                yield from self._write(step, rank, where, sent)

    def _read(self, slot: Slot) -> int:
        self.unread.discard(slot)
        return self.held.get(slot, 0)

    def _write(self, step: Step, rank: int, where: str, sent: set[Slot]) -> Iterator[str]:
        """What a receive, add, copy or reduce does."""
        chunks, local = chunks_of(step.spans), step.kind in ("copy", "reduce")
        if local:
            terms = [self._read((rank, step.source, chunk)) for chunk in chunks]
        else:
            terms = self.flying[step.peer, rank].pop(0)
        for chunk, term in zip(chunks, terms, strict=True):
            slot, what = (rank, step.buffer, chunk), f"chunk {chunk} of {step.buffer}"
            if slot in sent:
                yield f"{where}: writes {what} while it is sent"
            if local and not term:
                yield f"{where}: reads chunk {chunk} of {step.source}, which nothing was written to"
            if step.kind in ("add", "reduce"):
                before = self._read(slot)
                if not before:
                    yield f"{where}: adds to {what}, which nothing was written to"
                if self.terms.ranks_in[before] & self.terms.ranks_in[term]:
                    yield f"{where}: adds the input of a rank to {what} a second time"
                self.held[slot] = self.terms.add(before, term)
            else:
                if self.held.get(slot) == term:
                    yield f"{where}: gets {what}, which it has already"
                elif slot in self.unread:
                    yield f"{where}: overwrites {what}, which was not read yet"
                self.held[slot] = term
            self.unread.add(slot)

    def at_the_end(self) -> Iterator[str]:
        program, terms = self.program, self.terms
        first: dict[int, int] = {}
        for rank in range(program.ranks):
            for chunk, wanted in ends(program, rank).items():
                slot = (rank, program.output, chunk)
                held = self.held.get(slot, 0)
                self.unread.discard(slot)
                if terms.ranks_in[held] != wanted:
                    yield (
                        f"rank {rank} ends with {_named(terms.ranks_in[held])} in chunk {chunk}; "
                        f"it must have {_named(wanted)}"
                    )
                elif first.setdefault(chunk, held) != held and program.op == "all_reduce":
                    yield f"rank {rank} adds chunk {chunk} in another order than rank 0"
        for rank, buffer, chunk in sorted(self.unread):
            yield f"rank {rank} never reads what was written to chunk {chunk} of {buffer}"


def _named(ranks: int) -> str:
    """The ranks in a set of bits."""
    names = [str(rank) for rank in range(ranks.bit_length()) if ranks >> rank & 1]
    return f"the input of {' + '.join(names)}" if names else "nothing"
