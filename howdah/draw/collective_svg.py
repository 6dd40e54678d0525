"""Collective algorithms as SVG: a line for each rank, a column for each round, an arrow a message.

rank 0 ---.---.---      An arrow begins at the rank that sends and ends in a dot at the one that
           \\   \\         receives. Its color tells the chunk, or the first of several. What
rank 1 ----.\\---.--      arrives is added (full line) or kept (dashed).
"""

from collections import defaultdict, deque
from collections.abc import Iterator

from howdah.collectives.program import Program, Spans, chunks_of
from howdah.collectives.walk import walk
from howdah.draw.collective import spell_chunks, title
from howdah.draw.palette import FAINT, GRID, HUES, INK, TOP, head
from howdah.draw.svg import document, element, hint, text_at, words

LEFT, RIGHT, BELOW = 92, 24, 48  # pixels around the plot
LEGEND = 680.0  # pixels of its text
PITCH, WIDE, NARROW = 44.0, 120.0, 28.0  # of ranks; of rounds, at most and at least
MOST = 900.0  # pixels of the plot, if rounds can be so narrow
GAP = 8.0  # pixels between the arrows of two rounds


def draw_svg(program: Program) -> str:
    """The drawing. Its height grows with the ranks, its width with the rounds."""
    order = walk(program)
    pitch = max(NARROW, min(WIDE, MOST / max(1, order.rounds)))
    right = LEFT + pitch * order.rounds
    bottom = TOP + PITCH * program.ranks
    name, _, figures = title(program, order.rounds).partition(": ")
    inside = list(head(LEFT, name, figures))
    for rank in range(program.ranks):
        y = _y(rank)
        inside.append(text_at(LEFT - 12, y, f"rank {rank}", size=13, fill=INK, text_anchor="end"))
        inside.append(element("line", x1=LEFT, x2=right, y1=y, y2=y, stroke=GRID))
    for number in range(order.rounds):
        at = LEFT + (number + 0.5) * pitch, TOP - 4
        inside.append(words(*at, str(number + 1), font_size=11, fill=FAINT, text_anchor="middle"))
    adds = _adds(program)
    for number, source, target, spans in order.sent:
        x = LEFT + (number - 1) * pitch
        is_added = adds[source, target].popleft()
        inside += _arrow(program, (x, x + pitch - GAP), (source, target), spans, is_added)
    legend = "full line: added to what is there; dashed: kept; the color is that of the first chunk"
    inside.append(words(LEFT, bottom + 14, legend, font_size=13, fill=FAINT))
    return document(max(right, LEFT + LEGEND) + RIGHT, bottom + BELOW, *inside)


def _y(rank: int) -> float:
    return TOP + PITCH * (rank + 0.5)


def _adds(program: Program) -> defaultdict[tuple[int, int], deque[bool]]:
    """For each pair of ranks, whether the first, second, … message between them is added."""
    found: defaultdict[tuple[int, int], deque[bool]] = defaultdict(deque)
    for rank, steps in enumerate(program.steps):
        for step in steps:
            if step.kind in ("receive", "add"):
                found[step.peer, rank].append(step.kind == "add")
    return found


def _arrow(
    program: Program,
    x: tuple[float, float],
    ranks: tuple[int, int],
    spans: Spans,
    is_added: bool,
) -> Iterator[str]:
    (source, target), color = ranks, HUES[chunks_of(spans)[0] % len(HUES)]
    verb = "adds" if is_added else "keeps"
    told = f"rank {source} sends {spell_chunks(program, spans)} to rank {target}, which {verb} it"
    look = {} if is_added else {"stroke_dasharray": "5 3"}
    ends = {"x1": x[0], "x2": x[1], "y1": _y(source), "y2": _y(target)}
    yield element("line", hint(told), **ends, stroke=color, stroke_width=2, **look)
    yield element("circle", hint(told), cx=x[1], cy=_y(target), r=3.5, fill=color)
