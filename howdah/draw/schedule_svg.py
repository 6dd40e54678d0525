"""Pipelines drawn as SVG from their timeline: a lane for each rank, time to the right.

                                                     held
    rank 0   |F0|F1|F2|        |  B0  |F3|  B1  |    3
             ====                      ======
    rank 1      |F0|F1|  |  B0  |F2|  B1  |          2
             0       5 s     10 s    15 s    20 s

A box is a computation: its color shows the kind, its shade the stage among those of the rank, and
its number the micro-batch. A strip below is a collective, which runs while the rank computes. At
the right are the most micro-batches whose activations the rank holds at once.
"""

from collections.abc import Iterator, Sequence

from howdah.draw.lanes import Box, Chart, Drawing, Lane, Note, draw_lanes
from howdah.draw.palette import BLUE, FAINT, GREEN, GREY, ORANGE, PINK, RED, TEAL
from howdah.draw.schedule import NAMES, Computation, computations, figures, title
from howdah.draw.svg import blend
from howdah.plan.recording import Span
from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.held import peak_held
from howdah.plan.schedule.lowering import Verb
from howdah.sim.timeline import Timeline

COLORS = {
    Kind.FORWARD: BLUE,
    Kind.BACKWARD: ORANGE,
    Kind.INPUT: RED,
    Kind.WEIGHT: GREEN,
    Kind.UPDATE: GREY,
}
STRIPS = {Verb.REDUCE: TEAL, Verb.TIE: PINK}
PLOT, RIGHT = 1180, 64  # pixels of the axis, and to the right of it


def draw_svg(timeline: Timeline) -> str:
    """The drawing as SVG, with its axis in seconds, a legend and the figures of the timeline."""
    return draw_beside([("", timeline)])


def draw_beside(parts: Sequence[tuple[str, Timeline]]) -> str:
    """Several drawings with the same time axis, one below the other, each with its name."""
    longest = max(timeline.makespan for _, timeline in parts)
    drawings = (_drawing(timeline, longest, name) for name, timeline in parts)
    return draw_lanes(*drawings, width=PLOT, right=RIGHT)


def _drawing(timeline: Timeline, seconds: float, name: str) -> Drawing:
    """A timeline on an axis of `seconds`."""
    drawn = [list(computations(timeline, rank)) for rank in range(len(timeline.spans))]
    lanes = [_lane(timeline, rank, each) for rank, each in enumerate(drawn)]
    turns = max((each.turns for rank in drawn for each in rank), default=1)
    kinds = {each.action.kind for rank in drawn for each in rank}
    verbs = {span.instruction.verb for spans in timeline.spans for span in spans}
    shades = {kind: [_shade(kind, turn, turns) for turn in range(turns)] for kind in COLORS}
    return Drawing(
        f"{name}: {title(timeline.schedule)}" if name else title(timeline.schedule),
        figures(timeline),
        [Chart(lanes, seconds, "seconds", headers=[Note(12, "held", anchor="start")])],
        [
            *((NAMES[kind], shades[kind]) for kind in COLORS if kind in kinds),
            *((verb, [color]) for verb, color in STRIPS.items() if verb in verbs),
        ],
        "lighter: later stages of a rank" if turns > 1 else "",
    )


def _lane(timeline: Timeline, rank: int, drawn: Sequence[Computation]) -> Lane:
    boxes = [
        Box(
            each.start,
            each.end,
            _shade(each.action.kind, each.turn, each.turns),
            f"{each.action}: {each.start:.6g} to {each.end:.6g} s",
            each.number,
        )
        for each in drawn
    ]
    held = Note(12, str(peak_held(timeline.schedule, rank)), FAINT, "start")
    return Lane(f"rank {rank}", boxes, list(_strip(timeline.spans[rank])), [held])


def _strip(spans: Sequence[Span]) -> Iterator[Box]:
    """The collectives of a rank."""
    for instruction, start, end in spans:
        if instruction.verb in STRIPS:
            told = f"{instruction}: {start:.6g} to {end:.6g} s"
            yield Box(start, end, STRIPS[instruction.verb], told)


def _shade(kind: Kind, turn: int, turns: int) -> str:
    """The color of a kind; lighter for the later stages of a rank."""
    return blend(COLORS[kind], "#ffffff", 0.52 * turn / max(1, turns - 1))
