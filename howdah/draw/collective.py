"""Collective algorithms drawn as text: a row for each rank, a column for each round.

    all_gather/ring: 3 ranks, 3 chunks, 2 rounds, each rank sends 2/3 of the vector
            1       2
    rank 0  0>1 =2  2>1 =1
    rank 1  1>2 =0  0>2 =2
    rank 2  2>0 =1  1>0 =0
    0>1: chunk to rank 1, =: kept

In an all-to-all, chunk 1.2 is what rank 1 has for rank 2.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from fractions import Fraction

from howdah.collectives.counts import even_sizes, sent
from howdah.collectives.program import Program, Spans, Step, X, chunks_of
from howdah.collectives.walk import Walk, walk

Cells = dict[int, list[str]]  # by round


def title(program: Program, rounds: int) -> str:
    """The name, sizes, rounds, and what the ranks send."""
    ranks, chunks = program.ranks, program.chunks
    told = [f"{ranks} rank{'s' * (ranks != 1)}", f"{chunks} chunk{'s' * (chunks != 1)}"]
    told += [f"{rounds} round{'s' * (rounds != 1)}"]
    if program.op != "barrier":
        told.append(_volume(program))
    return f"{program.op}/{program.name}: {', '.join(told)}"


def _volume(program: Program) -> str:
    """What the ranks send, in vectors: the input of a rank, or in a gather the result."""
    size = Fraction(program.ranks if program.op == "all_to_all" else 1)
    volumes = [size * volume for volume in sent(program, even_sizes(program.chunks))]
    least, most = min(volumes), max(volumes)
    times = "of the vector" if most < 1 else "vector" if least == most == 1 else "vectors"
    if least == most:
        return f"each rank sends {most} {times}"
    return f"a rank sends {least} to {most} {times}"


def draw(program: Program) -> str:
    """The drawing, with a legend of what occurs in it."""
    order = walk(program)
    rows = [_cells(program, rank, order) for rank in range(program.ranks)]
    columns = range(1, order.rounds + 1)
    head = [str(column) for column in columns]
    texts = [[" ".join(row[column]) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *texts, strict=True)]
    margin = len(f"rank {program.ranks - 1}")
    lines = [title(program, order.rounds)]
    if order.rounds:
        lines.append(_row(" " * margin, head, widths))
        lines += [_row(f"rank {r}".ljust(margin), text, widths) for r, text in enumerate(texts)]
        lines.append(", ".join(_legend(program)))
    return "\n".join(lines)


def _row(name: str, texts: list[str], widths: list[int]) -> str:
    cells = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
    return "  ".join([name, *cells]).rstrip()


def _cells(program: Program, rank: int, order: Walk) -> Cells:
    """What a rank does in each round: first what it sends, then what becomes of what arrives."""
    out: defaultdict[int, deque[int]] = defaultdict(deque)  # rounds of the messages to each peer
    into: defaultdict[int, deque[int]] = defaultdict(deque)
    for number, source, target, _ in order.sent:
        if source == rank:
            out[target].append(number)
        if target == rank:
            into[source].append(number)
    sends: defaultdict[int, dict[str, list[int]]] = defaultdict(dict)  # round: chunks: targets
    writes: defaultdict[int, list[str]] = defaultdict(list)
    column = 1
    for step in program.steps[rank]:
        sign, chunks = "+" if step.kind in ("add", "reduce") else "=", spelled(program, step)
        if step.kind == "send":
            column = max(column, number := out[step.peer].popleft())
            sends[number].setdefault(chunks, []).append(step.peer)
        elif step.source:
            writes[column].append(f"{sign}{chunks}<{step.source[0]}")
        else:
            column = max(column, number := into[step.peer].popleft())
            writes[number].append(sign + chunks)
    return {
        number: [
            *(f"{chunks}>{','.join(map(str, to))}" for chunks, to in sends[number].items()),
            *writes[number],
        ]
        for number in range(1, order.rounds + 1)
    }


def spelled(program: Program, step: Step) -> str:
    """The chunks of a step, and the first letter of its buffer if that is not x."""
    return spell_chunks(program, step.spans) + (step.buffer[:1] if step.buffer != X else "")


def spell_chunks(program: Program, spans: Spans) -> str:
    """The chunks as in the drawing: 0-3, or 1.2 in an all-to-all."""
    if program.op == "all_to_all":
        pairs = (divmod(chunk, program.ranks) for chunk in chunks_of(spans))
        return ",".join(f"{source}.{target}" for source, target in pairs)
    return ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in spans)


def _legend(program: Program) -> Iterator[str]:
    """What the signs mean that occur in the drawing."""
    steps = [step for one in program.steps for step in one]
    kinds = {step.kind for step in steps}
    if first := next((step for step in steps if step.kind == "send"), None):
        many = "s" * (len(chunks_of(first.spans)) > 1)
        yield f"{spelled(program, first)}>{first.peer}: chunk{many} to rank {first.peer}"
    if kinds & {"add", "reduce"}:
        yield "+: added to what is there"
    if kinds & {"receive", "copy"}:
        yield "=: kept"
    names = {name for step in steps for name in (step.buffer, step.source) if name not in ("", X)}
    if kinds & {"copy", "reduce"}:
        yield "<: from its own buffer"
    yield from (f"{name[0]}: buffer {name}" for name in sorted(names))
