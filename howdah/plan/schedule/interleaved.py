"""Several small stages on every rank: a smaller bubble for more messages and more memory.

    stage     0  1  2  3  4  5        p = 3 ranks, v = 2 stages each:
    rank      0  1  2  0  1  2        stage s is on rank s mod p

The pipeline fills with stages that are v times as short, so the bubble is v times as short.
Micro-batches go around in groups: all of a group through the first stage of a rank, then all of
it through the second. A group of at least p comes around without a gap.

Groups of exactly p need micro-batches that divide by p. Here the rest is shared out over the
groups, which become longer than p; a short group at the end would leave a gap of its own at every
stage of the rank. Fewer than p micro-batches are one group, and wait for each other.
"""

from howdah.plan.schedule.actions import Action, Kind, Schedule
from howdah.plan.schedule.one_f_one_b import alternate


def interleaved(ranks: int, micros: int, virtual: int) -> Schedule:
    """1F1B with `virtual` stages on each rank: the bubble divided by v.

    Two ranks, two stages each, two micro-batches; 2F0 is stage 2, forward of micro-batch 0:

        0F0 0F1 2F0 2F1         2B0····     2B1···· 0B0···· 0B1····
            1F0 1F1 3F0 3B0···· 3F1 3B1···· 1B0···· 1B1····

    bubble  (p - 1)(F + B)/v for m ≥ p, with F and B of all stages of a rank
    held    min(g(v - 1) + 2(p - 1 - r) + 1, mv) times one of its stages on rank r, where g is the
            longest group; for g = p on rank 0, that is p(1 + (p - 1)/(pv)) micro-batches
    source  https://arxiv.org/abs/2104.04473, section 2.2, which wants p to divide m
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
        # The first group must be through all stages of the rank but the last one, and each rank
        # below adds a forward on the way down and one on the way up.
        fill = (virtual - 1) * longest + 2 * (ranks - 1 - rank)
        programs.append(alternate(forwards, backwards, fill=fill))
    return Schedule("interleaved", ranks * virtual, micros, 1, tuple(programs))


def _groups(ranks: int, micros: int) -> list[range]:
    """As many groups of at least `ranks` micro-batches as there can be; lengths differ by one."""
    count = max(1, micros // ranks)
    cuts = [micros * group // count for group in range(count + 1)]
    return [range(cuts[group], cuts[group + 1]) for group in range(count)]
