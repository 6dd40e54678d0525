"""Which heads of attention a rank has: a head is never cut.

    tp                    key-value heads, each with its query heads; of more ranks than key-value
                          heads, several have the same one, and some of its query heads each
    context=all-to-all    the same once more, of what a tp rank has

With 6 query heads of 2 key-value heads, a to f of 0 and 1:

    tp2    0: a b c | 1: d e f            tp4    0: a b | 0: c | 1: d e | 1: f
"""

from howdah.plan.flat_buffers import share
from howdah.shapes.shape import ModelShape

Range = tuple[int, int]  # [start, stop)


def heads(shape: ModelShape, ways: int, index: int) -> Range:
    """The query heads of tp rank `index` of `ways`: those of whole key-value heads, or, where there
    are more tp ranks than key-value heads, a range of the query heads of one of them.
    """
    if shape.latent:
        return share(shape.heads, ways, index)
    return cut_heads(shape.heads, shape.k, ways, index)[0]


def kv_heads(shape: ModelShape, ways: int, index: int) -> Range:
    """The key-value heads of tp rank `index` of `ways`; one head if there are fewer than ranks."""
    return cut_heads(shape.heads, shape.k, ways, index)[1]


def held_heads(shape: ModelShape, ways: int, index: int) -> tuple[int, int]:
    """How many query and key-value heads tp rank `index` of `ways` has."""
    first, last = heads(shape, ways, index)
    start, stop = (first, last) if shape.latent else kv_heads(shape, ways, index)
    return last - first, stop - start


def cut_heads(queries: int, keys: int, ways: int, index: int) -> tuple[Range, Range]:
    """The query and the key-value heads of part `index` of `ways`."""
    group = queries // keys
    if ways <= keys:
        first, last = share(keys, ways, index)
        return (first * group, last * group), (first, last)
    head, sharer = divmod(index, ways // keys)
    first, last = share(group, ways // keys, sharer)
    return (head * group + first, head * group + last), (head, head + 1)
