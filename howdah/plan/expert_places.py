"""Which rank of ep should hold which experts, by how busy they were: a pure function of counts.

    tokens       90 10 40 40 15 5        by number: 140 | 60          by load: 105 | 95
    experts      0  1  2  3  4  5        0 1 2 | 3 4 5                0 1 5 | 2 3 4

A step lasts as long as that of the busiest rank. Each rank has as many experts as when they are
shared out by number; the busiest experts are placed first, each on the least busy rank that has
room (Graham 1969, https://doi.org/10.1137/0117039; DeepSeek's EPLB does the same with copies).
"""

from collections.abc import Mapping, Sequence

from howdah.plan.flat_buffers import Order, Orders, share, shares

Places = tuple[tuple[int, ...], ...]  # of each rank, the numbers of its experts


def by_number(experts: int, ranks: int) -> Places:
    """Neighbours together, as a run has them."""
    return tuple(tuple(range(*share(experts, ranks, rank))) for rank in range(ranks))


def by_load(tokens: Sequence[float], ranks: int) -> Places:
    """Experts shared out over `ranks` so that each has about as many of their `tokens`."""
    room = [int(count) for count in shares(len(tokens), ranks)]
    sums, found = [0.0] * ranks, [list[int]() for _ in range(ranks)]
    for expert in sorted(range(len(tokens)), key=lambda e: (-tokens[e], e)):
        rank = min((r for r in range(ranks) if len(found[r]) < room[r]), key=lambda r: (sums[r], r))
        sums[rank] += tokens[expert]
        found[rank].append(expert)
    return tuple(tuple(sorted(some)) for some in found)


def orders(blocks: Mapping[str, Sequence[float]], ranks: int) -> dict[str, Order]:
    """By block, the expert at each place, by the tokens that each of them had."""
    return {name: _in_a_row(by_load(tokens, ranks)) for name, tokens in blocks.items()}


def _in_a_row(places: Places) -> Order:
    return tuple(expert for some in places for expert in some)


def busiest(tokens: Sequence[float], places: Places) -> float:
    """The tokens of the busiest rank beside the mean of all; 1 where all are equally busy."""
    sums = [sum(tokens[expert] for expert in some) for some in places]
    return max(sums) * len(places) / total if (total := sum(sums)) else 1.0


def mean_busiest(blocks: Mapping[str, Sequence[float]], by: Orders, ranks: int) -> float:
    """The tokens of the busiest of `ranks` beside the mean, over all blocks; experts are by number
    where no order says another.
    """
    found = []
    for name, tokens in blocks.items():
        places = by_number(len(tokens), ranks)
        order = by.get(name) or _in_a_row(places)
        found.append(busiest(tokens, tuple(tuple(order[p] for p in some) for some in places)))
    return sum(found) / len(found)
