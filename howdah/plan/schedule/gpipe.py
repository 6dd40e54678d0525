"""The two simplest schedules: one micro-batch at a time, and all forwards before all backwards."""

from howdah.plan.schedule.actions import Kind, Schedule
from howdah.plan.schedule.one_f_one_b import alternate, each_micro


def naive(ranks: int, micros: int) -> Schedule:
    """One micro-batch runs forward and backward before the next starts: one rank works at a time.

    Three ranks, two micro-batches; a row is a rank, a backward takes as long as two forwards:

        F0                   B0··· F1                   B1···
           F0          B0···          F1          B1···
              F0 B0···                   F1 B1···

    bubble  (p - 1)(F + B) for each of m micro-batches: a fraction (p - 1)/p of the time
    held    one micro-batch
    source  model parallelism without a pipeline, figure 2b of https://arxiv.org/abs/1811.06965
    """
    return _filled("naive", ranks, micros, fill=0)


def gpipe(ranks: int, micros: int) -> Schedule:
    """All forwards, then all backwards. Each rank holds the activations of all micro-batches.

    Three ranks, four micro-batches; a row is a rank, a backward takes as long as two forwards:

        F0 F1 F2 F3                   B0··· B1··· B2··· B3···
           F0 F1 F2 F3          B0··· B1··· B2··· B3···
              F0 F1 F2 F3 B0··· B1··· B2··· B3···

    bubble  (p - 1)(F + B): a fraction (p - 1)/(m + p - 1) of the time
    held    m micro-batches on every rank
    source  https://arxiv.org/abs/1811.06965, whose backwards run from the last micro-batch to the
            first; the bubble is the same
    """
    return _filled("gpipe", ranks, micros, fill=micros)


def _filled(name: str, ranks: int, micros: int, *, fill: int) -> Schedule:
    programs = tuple(
        alternate(
            each_micro(Kind.FORWARD, rank, micros),
            each_micro(Kind.BACKWARD, rank, micros),
            fill=fill,
        )
        for rank in range(ranks)
    )
    return Schedule(name, ranks, micros, 1, programs)
