"""stages=: how many blocks each pipeline stage has, where they are not divided by their FLOPs.

    stages=5,6,6,5     four stages; the embedding is on the first, the head on the last
    stages=0,8,8,0     the embedding alone, two stages of blocks, the head alone
    stages=5,6*10,5    twelve stages; 6*10 is 6 ten times

With several stages on a rank (v2) there are as many counts as stages, in forward order.
"""

from itertools import groupby

MOST_STAGES = 1 << 12


def read_counts(text: str) -> tuple[int, ...] | None:
    """The counts that `text` spells; None if it spells none."""
    found: list[int] = []
    for some in text.split(","):
        count, star, times = some.partition("*")
        numbers = [count, *([times] if star else [])]
        if not all(one.isascii() and one.isdigit() and len(one) <= 4 for one in numbers):
            return None
        found += [int(count)] * min(int(times) if star else 1, MOST_STAGES + 1)
        if len(found) > MOST_STAGES:
            return None
    return tuple(found)


def spell_counts(counts: tuple[int, ...]) -> str:
    """The spelling of counts, with equal neighbours in one word.

    >>> spell_counts((5, 6, 6, 6, 5))
    '5,6*3,5'
    """
    runs = ((count, len([*some])) for count, some in groupby(counts))
    return ",".join(f"{count}*{n}" if n > 2 else ",".join([str(count)] * n) for count, n in runs)


def counts_problem(counts: tuple[int, ...], pp: int, virtual: int) -> str:
    """What is wrong with the counts of a layout; empty if nothing is."""
    word, stages = f"stages={spell_counts(counts)}", pp * virtual
    if pp == 1:
        return f"{word} needs pipeline stages; add pp2 or more, or drop it"
    if len(counts) != stages:
        on = f" with {virtual} stages each" if virtual > 1 else ""
        return f"{word} has {len(counts)} stages, and pp{pp}{on} has {stages}; give {stages}"
    if 0 in counts[1:-1]:
        return f"{word} leaves a stage in the middle empty; only the first and the last may have 0"
    return ""


def blocks_problem(counts: tuple[int, ...], blocks: int) -> str:
    """What is wrong with counts for a model of so many blocks; empty if nothing is."""
    if (given := sum(counts)) == blocks:
        return ""
    return f"stages={spell_counts(counts)} has {given} blocks, and the model has {blocks}"
