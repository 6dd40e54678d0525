"""Zero bubble in 1F1B's memory: two stages on every rank, going down and up again like a V.

    rank 0    stage 0           stage 2p-1     rank r has stage r, the way down ↓
    rank 1       stage 1     stage 2p-2        and stage 2p - 1 - r, the way up ↑
    rank 2          stage 2  stage 3

A micro-batch returns to the rank where it began, so the first rank also runs the last stage, and
runs its first backward after 2p short forwards. The first rank holds the activations of its stage
on the way down for long, and those of its stage on the way up only briefly. On later ranks the two
times are closer to each other. Their sum is the same, so all ranks hold the same amount.
"""

from howdah.plan.schedule.actions import Action, Kind, Schedule


def zero_bubble_v(ranks: int, micros: int) -> Schedule:
    """No bubble; every rank holds p micro-batches, as 1F1B's first rank does.

    Two ranks, three micro-batches; 3F0 is stage 3, forward of micro-batch 0; F = I = W:

        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
            1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    bubble  none for m ≥ 2p - 1 and F = I = W, counted on each rank from its first action to its
            last, as in `zero_bubble`
    held    2p micro-batches of a single stage, which is half a rank, on every rank, for m ≥ 2p - 1
    source  https://arxiv.org/abs/2405.15362, the schedule that it calls V-ZB
    """
    # The phases below need at least 2p - 1 micro-batches. The actions of surplus micro-batches are
    # removed afterwards: the remaining actions never wait for them.
    enough = max(micros, 2 * ranks - 1)
    programs = tuple(
        tuple(action for action in _program(rank, ranks, enough) if action.micro < micros)
        for rank in range(ranks)
    )
    return Schedule("zb-v", 2 * ranks, micros, 1, programs)


def _program(rank: int, ranks: int, micros: int) -> list[Action]:
    """The actions of one rank; for each kind and stage they are in the order of micro-batches."""
    stage = {"↓": rank, "↑": 2 * ranks - 1 - rank}
    program = []
    done = dict.fromkeys((kind + way for kind in "FIW" for way in "↓↑"), 0)
    for times, phase in _phases(rank, ranks, micros):
        for word in phase.split() * times:
            program.append(Action(Kind(word[0]), stage[word[1]], done[word]))
            done[word] += 1
    return program


def _phases(rank: int, ranks: int, micros: int) -> list[tuple[int, str]]:
    """The phases of a rank: (repetitions, actions). Each of the six actions runs `micros` times.

    The first three phases fill the memory: a rank runs forwards on the way down until activations
    reach it on the way up. The fourth is the steady state, in which the amount held stays constant.
    The others drain the pipeline: later ranks delay some W until nothing else is left to run.
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
