"""Zero bubble: split the backward in two halves, and fill gaps with the half that can wait.

    B  =  I, the gradient of the input, which the previous stage waits for
        + W, the gradient of the weights, which only the update waits for

Gradients travel back through the ranks faster with I than with B, and W runs where a rank would
be idle. Rank r delays W by a number of micro-batches that grows with r: the last rank reaches its
first I early and has its gaps at the end, and the first rank has its gaps before its first I.

The bubble of a rank is counted from its first action to its last. Each rank starts later and ends
later than the previous rank, and can start the next step later by the same time: a parallelogram
of work has no bubble, if nothing makes all ranks wait for each other between two steps. With such
a wait (clipping by the global norm, for instance), p - 1 forwards are lost again, and H2 gains
nothing over H1.

The formulas hold if W is not longer than F and I. With a longer W the schedules are still correct,
but their bubble is larger than in the formulas.
"""

from howdah.plan.schedule.actions import Action, Kind, Schedule
from howdah.plan.schedule.one_f_one_b import alternate, each_micro


def zero_bubble_h1(ranks: int, micros: int) -> Schedule:
    """1F1B with split backwards: a third of 1F1B's bubble, in 1F1B's memory.

    Three ranks, four micro-batches; a row is a rank, all actions take equal time:

        F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
           F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
              F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    bubble  (p - 1)(F + I - W) for m ≥ p
    held    min(p, m) micro-batches on every rank, as many as on 1F1B's first rank
    source  https://arxiv.org/abs/2401.10241, section 2.1
    """
    programs = tuple(
        _split(rank, micros, fill=ranks - 1 - rank, late=rank) for rank in range(ranks)
    )
    return Schedule("zb-h1", ranks, micros, 1, programs)


def zero_bubble_h2(ranks: int, micros: int) -> Schedule:
    """Twice as many forwards fill the pipeline: no bubble, in twice the memory of 1F1B.

    Three ranks, five micro-batches; a row is a rank, all actions take equal time:

        F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
           F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
              F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    bubble  (p - 1)(F + I - 2W) for m ≥ 2p - 1: none where F = I = W
    held    min(2p - 1, m) micro-batches on every rank
    source  https://arxiv.org/abs/2401.10241, section 2.2
    """
    programs = tuple(
        _split(rank, micros, fill=2 * (ranks - 1 - rank), late=2 * rank) for rank in range(ranks)
    )
    return Schedule("zb-h2", ranks, micros, 1, programs)


def _split(stage: int, micros: int, *, fill: int, late: int) -> tuple[Action, ...]:
    """A program of 1F1B with I in place of B; each W runs `late` micro-batches later, or last."""
    program = []
    inputs = each_micro(Kind.INPUT, stage, micros)
    for action in alternate(each_micro(Kind.FORWARD, stage, micros), inputs, fill=fill):
        program.append(action)
        if action.kind is Kind.INPUT and action.micro >= late:
            program.append(Action(Kind.WEIGHT, stage, action.micro - late))
    return (*program, *each_micro(Kind.WEIGHT, stage, micros)[max(micros - late, 0) :])
