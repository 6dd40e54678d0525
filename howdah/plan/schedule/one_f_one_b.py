"""One forward, one backward (1F1B): run each backward as soon as possible, to hold few activations.

A rank first runs enough forwards to fill the later stages, then one forward and one backward in
turn, then the remaining backwards, which drain the pipeline. Most schedules are of this family.
They differ in the order of the forwards, in the order of the backwards, and in how many forwards
fill the pipeline: `alternate` builds all of them.

Backwards run in the order of the micro-batches, as in every schedule of this package, so that
gradients are summed in the same order as on one device.
"""

from collections.abc import Sequence

from howdah.plan.schedule.actions import Action, Kind, Schedule


def one_f_one_b(ranks: int, micros: int) -> Schedule:
    """1F1B: the bubble of GPipe, but rank r holds at most p - r micro-batches.

    Three ranks, four micro-batches; a row is a rank, a backward takes as long as two forwards:

        F0 F1 F2             B0··· F3 B1···    B2···    B3···
           F0 F1       B0··· F2 B1··· F3 B2···    B3···
              F0 B0··· F1 B1··· F2 B2··· F3 B3···

    bubble  (p - 1)(F + B) on p ranks
    held    min(p - r, m) micro-batches on rank r
    source  PipeDream-Flush, https://arxiv.org/abs/2006.09503
    """
    programs = tuple(
        alternate(
            each_micro(Kind.FORWARD, rank, micros),
            each_micro(Kind.BACKWARD, rank, micros),
            fill=ranks - 1 - rank,
        )
        for rank in range(ranks)
    )
    return Schedule("1f1b", ranks, micros, 1, programs)


def each_micro(kind: Kind, stage: int, micros: int) -> list[Action]:
    """The actions of one kind and one stage for all micro-batches, in order."""
    return [Action(kind, stage, micro) for micro in range(micros)]


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], *, fill: int
) -> tuple[Action, ...]:
    """A program: `fill` forwards, one forward and one backward in turn, the remaining backwards.

    Both sequences must be equally long. With a `fill` beyond their length, all forwards run first,
    then all backwards.
    """
    fill = min(fill, len(forwards))
    pairs = zip(forwards[fill:], backwards, strict=False)  # without the last `fill` backwards
    turns = [action for pair in pairs for action in pair]
    return (*forwards[:fill], *turns, *backwards[len(backwards) - fill :])
