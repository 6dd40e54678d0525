"""Zero bubble in 1F1B's memory: two stages on every rank, going down and up again like a V.

    rank 0    stage 0           stage 2p-1     rank r has stage r, the way down ↓
    rank 1       stage 1     stage 2p-2        and stage 2p - 1 - r, the way up ↑
    rank 2          stage 2  stage 3

A micro-batch comes back to the rank where it began, so the first rank runs the last stage, and
its first backward after 2p short forwards. What the first rank holds long on the way down it
holds shortly on the way up, and the last rank the other way round: all hold the same.
"""

from howdah.plan.schedule.actions import Action, Kind, Schedule


def zero_bubble_v(ranks: int, micros: int) -> Schedule:
    """No bubble; every rank holds p micro-batches, as 1F1B's first rank does.

    Two ranks, three micro-batches; 3F0 is stage 3, forward of micro-batch 0; F = I = W:

        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
            1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    bubble  none for m ≥ 2p - 1 and F = I = W, counted on each rank from its first action to its
            last, as in `zero_bubble`
    held    2p stages of half a rank, on every rank, for m ≥ 2p - 1
    source  https://arxiv.org/abs/2405.15362, the schedule that it calls V-ZB
    """
    # The phases below need 2p - 1 micro-batches. Of fewer, the others are left out: those that
    # stay never waited for them.
    enough = max(micros, 2 * ranks - 1)
    programs = tuple(
        tuple(action for action in _program(rank, ranks, enough) if action.micro < micros)
        for rank in range(ranks)
    )
    return Schedule("zb-v", 2 * ranks, micros, 1, programs)


def _program(rank: int, ranks: int, micros: int) -> list[Action]:
    """The actions of one rank, with each kind and stage in the order of the micro-batches."""
    stage = {"↓": rank, "↑": 2 * ranks - 1 - rank}
    program = []
    done = dict.fromkeys((kind + way for kind in "FIW" for way in "↓↑"), 0)
    for times, phase in _phases(rank, ranks, micros):
        for word in phase.split() * times:
            program.append(Action(Kind(word[0]), stage[word[1]], done[word]))
            done[word] += 1
    return program


def _phases(rank: int, ranks: int, micros: int) -> list[tuple[int, str]]:
    """How often a rank repeats what. Each of the six words comes `micros` times in all.

    The first three fill the memory: a rank goes forward on the way down for as long as nothing
    comes up to it. The fourth is steady, and holds what it holds. The others drain: the last
    ranks have put off some W until nothing else is left.
    """
    return [
        (2 * (ranks - rank) - 1, "F↓"),
        (rank, "F↑ F↓"),
        (ranks - rank, "F↑ I↑ W↑"),
        (micros - 2 * ranks + 1 + rank, "F↓ I↓ W↓ F↑ I↑ W↑"),
        (ranks - 1 - rank, "I↓ W↓ F↑ I↑ W↑"),
        (rank, "I↓ I↑"),
        (ranks - rank, "I↓ W↓"),
        (rank, "W↑"),
        (rank, "W↓"),
    ]
