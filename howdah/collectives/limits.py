"""Numbers of ranks that an algorithm cannot use: refused with the nearest that it can."""

from collections.abc import Callable
from math import prod

from howdah.base.errors import UserError


def require(ranks: int, fits: Callable[[int], bool], *, who: str, what: str, instead: str) -> None:
    """Raises UserError where `ranks` does not fit, with the nearest numbers that do."""
    if fits(ranks):
        return
    below = next((n for n in range(ranks - 1, 0, -1) if fits(n)), None)
    above = next(n for n in range(ranks + 1, 2 * ranks + 2) if fits(n))
    near = " or ".join(str(n) for n in (below, above) if n)
    raise UserError(f"{who} needs {what} of ranks, not {ranks}; use {near}, or {instead}")


def require_power_of_two(ranks: int, *, who: str, instead: str) -> None:
    """Raises UserError for numbers of ranks that are no power of two."""
    fits = lambda n: n & (n - 1) == 0  # noqa: E731
    require(ranks, fits, who=who, what="a power of two", instead=instead)


def require_root(ranks: int, root: int) -> None:
    """Raises UserError for a root that is no rank."""
    if not 0 <= root < ranks:
        raise UserError(f"root is {root}, and the ranks are 0 to {ranks - 1}")


MOST_PIECES = 1024  # a program lists every message


def require_pieces(pieces: int) -> None:
    """Raises UserError for fewer than one piece, or for very many."""
    if pieces > MOST_PIECES:
        raise UserError(f"pieces is {pieces:,}; at most {MOST_PIECES:,} are listed")
    if pieces < 1:
        raise UserError(f"pieces is {pieces}; a vector is cut into at least 1 piece")


def node_size(ranks: int, per_node: int | None, *, who: str) -> int:
    """Ranks of a node: as given, or the largest divisor of `ranks` that is at most its root.

    Raises UserError where nodes of this size do not make up the ranks.
    """
    if per_node is None:
        return max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)
    if per_node < 1 or ranks % per_node:
        sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
        near = sorted(sizes, key=lambda n: abs(n - per_node))[:2]
        raise UserError(
            f"{who} needs nodes of equal size, and {ranks} ranks are no whole number of nodes of "
            f"{per_node}; use per_node {' or '.join(map(str, sorted(near)))}"
        )
    return per_node


def grid_dims(ranks: int, dims: tuple[int, ...] | None, count: int, *, who: str) -> tuple[int, ...]:
    """Sizes of a grid: as given, or `count` factors of `ranks`, as equal as possible, large first.

    >>> grid_dims(12, None, 2, who="torus")
    (4, 3)
    """
    if dims is None:
        found: list[int] = []
        for left in range(count, 0, -1):
            rest = ranks // prod(found)
            fits = (n for n in range(1, rest + 1) if rest % n == 0 and n**left >= rest)
            found.append(min(fits))
        return tuple(found)
    if min(dims, default=0) < 1 or prod(dims) != ranks:
        spelled = "x".join(map(str, dims))
        near = "x".join(map(str, grid_dims(ranks, None, max(1, len(dims)), who=who)))
        raise UserError(f"{who}: a grid of {spelled} has not {ranks} devices; {near} has")
    return dims
