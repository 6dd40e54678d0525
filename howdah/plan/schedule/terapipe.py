"""Token slices: cut each micro-batch along its tokens, and pipeline the slices.

A token needs only the tokens before it, so slice t can enter a stage while slice t + 1 is still
in the previous stage. With M slices, the actions that fill the pipeline are M times as short.

    forward   slice 0, 1 … M-1    slice t attends to the keys and values of slices 0 … t
    backward  slice M-1 … 1, 0    those keys and values get gradients from slices t … M-1

The backward of a micro-batch can start only after the forward of its last slice. Until then the
rank holds all of its slices. TeraPipe runs all forwards of a step before all backwards. This
schedule starts backwards as early as possible: it is 1F1B with slices in place of micro-batches
(Seq1F1B, https://arxiv.org/abs/2406.03488). The bubble is the same, and rank r holds M + p - 1 - r
slices instead of all mM. With one micro-batch both are the same schedule.
"""

from howdah.plan.schedule.actions import Action, Kind, Schedule
from howdah.plan.schedule.one_f_one_b import alternate


def terapipe(ranks: int, micros: int, slices: int) -> Schedule:
    """1F1B over token slices: the bubble divided by M.

    Three ranks, two micro-batches of two slices; F0.1 is the forward of slice 1 of micro-batch 0:

        F0·· F0.1 F1·· F1.1                     B0.1·····      B0·······      B1.1····· B1·······
             F0·· F0.1 F1··           B0.1····· F1.1 B0·······      B1.1····· B1·······
                  F0·· F0.1 B0.1····· F1·· B0······· F1.1 B1.1····· B1·······

    bubble  (p - 1)(F + B)/M, where F and B are of a whole micro-batch, and slices take equal time
    held    min(M + p - 1 - r, mM) slices on rank r
    source  https://arxiv.org/abs/2102.07988
    """
    programs = []
    for stage in range(ranks):
        parts = range(slices)
        forwards = [Action(Kind.FORWARD, stage, m, t) for m in range(micros) for t in parts]
        backwards = [
            Action(Kind.BACKWARD, stage, m, t) for m in range(micros) for t in reversed(parts)
        ]
        programs.append(alternate(forwards, backwards, fill=slices - 1 + ranks - 1 - stage))
    return Schedule("terapipe", ranks, micros, slices, tuple(programs))
