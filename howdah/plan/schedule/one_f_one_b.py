"""One forward, one backward: hold few micro-batches, by taking them back as soon as they return.

A rank first fills the pipeline below it, then runs a forward and a backward in turn, then drains.
Most schedules are of this family. They differ in the order of the forwards, in the order of the
backwards, and in how many forwards fill the pipeline: `alternate` makes them all.

Backwards run in the order of the micro-batches, here as in every schedule of this folder, so that
gradients are added up in the order of one device.
"""

from collections.abc import Sequence

from howdah.plan.schedule.actions import Action, Kind, Schedule


def one_f_one_b(ranks: int, micros: int) -> Schedule:
    """GPipe's bubble; rank r holds p - r micro-batches at most.

    Three ranks, four micro-batches; a row is a rank, a backward takes two forwards:

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
    """The action of one stage for every micro-batch, in order."""
    return [Action(kind, stage, micro) for micro in range(micros)]


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], *, fill: int
) -> tuple[Action, ...]:
    """`fill` forwards, then one forward and one backward in turn, then the backwards left over.

    Both sequences are equally long; a `fill` past their end is all forwards, then all backwards.
    """
    fill = min(fill, len(forwards))
    pairs = zip(forwards[fill:], backwards, strict=False)  # the last `fill` backwards drain
    turns = [action for pair in pairs for action in pair]
    return (*forwards[:fill], *turns, *backwards[len(backwards) - fill :])
