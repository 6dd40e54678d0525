"""Several small stages on every rank: a smaller bubble for more messages and more memory.

    stage     0  1  2  3  4  5        p = 3 ranks, v = 2 stages each:
    rank      0  1  2  0  1  2        stage s is on rank s mod p

The stages that fill the pipeline are v times as short, so the bubble is too.
Micro-batches run in groups: a rank runs all micro-batches of a group through its first stage, then
all of them through its second stage, and so on. A group of at least p leaves no gap in between.

Groups of exactly p are possible only if p divides the number of micro-batches. Otherwise the
remaining micro-batches are distributed over the groups, which become longer than p: a short group
at the end would leave a gap of its own at every stage of the rank. Fewer than p micro-batches form
one group, with gaps between its stages.
"""

from howdah.plan.schedule.actions import Action, Kind, Schedule
from howdah.plan.schedule.one_f_one_b import alternate


def interleaved(ranks: int, micros: int, virtual: int) -> Schedule:
    """1F1B with `virtual` stages on each rank: the bubble divided by v.

    Two ranks, two stages each, two micro-batches; 2F0 is stage 2, forward of micro-batch 0:

        0F0 0F1 2F0 2F1         2B0····     2B1···· 0B0···· 0B1····
            1F0 1F1 3F0 3B0···· 3F1 3B1···· 1B0···· 1B1····

    bubble  (p - 1)(F + B)/v for m ≥ p, where F and B cover all stages of a rank
    held    min(g(v - 1) + 2(p - 1 - r) + 1, mv) micro-batches of a single stage on rank r, where
            g is the longest group; for g = p on rank 0, as much as p(1 + (p - 1)/(pv))
            micro-batches of all its stages
    source  https://arxiv.org/abs/2104.04473, section 2.2, which requires that p divides m
    """
    groups = _groups(ranks, micros)
    longest = max(len(group) for group in groups)
    programs = []
    for rank in range(ranks):
        stages = [rank + ranks * turn for turn in range(virtual)]
        forwards = [Action(Kind.FORWARD, s, m) for group in groups for s in stages for m in group]
        backwards = [
            Action(Kind.BACKWARD, s, m) for group in groups for s in reversed(stages) for m in group
        ]
        # Before a rank's first backward, the first group must have passed all its stages but the
        # last. Each later rank adds two forwards: one while activations travel to it, and one
        # while gradients travel back.
        fill = (virtual - 1) * longest + 2 * (ranks - 1 - rank)
        programs.append(alternate(forwards, backwards, fill=fill))
    return Schedule("interleaved", ranks * virtual, micros, 1, tuple(programs))


def _groups(ranks: int, micros: int) -> list[range]:
    """The micro-batches in consecutive groups of at least `ranks`, as many groups as possible.

    The lengths of the groups differ by at most one. Fewer than `ranks` micro-batches are one group.
    """
    count = max(1, micros // ranks)
    cuts = [micros * group // count for group in range(count + 1)]
    return [range(cuts[group], cuts[group + 1]) for group in range(count)]
