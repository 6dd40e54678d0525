"""context=both: ranks of cp that trade heads, in groups among which keys and values go round.

    cp8 context=both:4      rank 0 1 2 3 | 4 5 6 7      heads inside a group, a ring between the two
    cp4 context=both             0 1 | 2 3              as many as half of them, if none is given

Neighbours are in one group, so heads are traded over the fastest wires (USP, Fang and Zhao 2024,
https://arxiv.org/abs/2405.07719; LoongTrain, https://arxiv.org/abs/2406.18485).
"""


def most_inside(cp: int) -> int:
    """The largest size of several groups; 1 where cp is a prime."""
    return max(n for n in range(1, cp // 2 + 1) if cp % n == 0) if cp > 1 else 1


def read_inside(text: str) -> int | None:
    """The size of a group that `text` spells; None if it spells none."""
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) <= 9 else None


def inside_problem(cp: int, inside: int) -> str:
    """What is wrong with groups of `inside` ranks; empty if nothing is."""
    fits = [n for n in range(2, cp // 2 + 1) if cp % n == 0]
    if not fits:
        return f"context=both needs groups of several ranks, and cp{cp} has none; use cp4 or a ring"
    if inside not in fits:
        near = min(fits, key=lambda n: abs(n - inside))
        if inside == cp:
            return (
                f"context=both:{cp} of cp{cp} would be one group, all-to-all alone; use "
                f"context=both:{near} or context=all-to-all"
            )
        if inside == 1:
            return f"context=both:1 would be a ring alone; use context=both:{near}, or no context="
        return (
            f"context=both:{inside} does not divide the {cp} ranks of cp; use context=both:{near}"
        )
    return ""
