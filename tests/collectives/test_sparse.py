"""Sparse gradients: the sum is that of dense ones, bit for bit, and so are the bytes."""

import numpy as np
import pytest

from howdah.collectives.counts import sent
from howdah.collectives.registry import build
from howdah.collectives.sparse import pays_below, sparse_all_reduce

ROWS, WIDTH = 40, 3


def gradients(ranks, counts):
    random = np.random.default_rng(0)
    return [
        (
            random.integers(0, ROWS, counts[rank]),
            random.normal(size=(counts[rank], WIDTH)).astype(np.float32),
        )
        for rank in range(ranks)
    ]


def dense(rows):
    whole = np.zeros((ROWS, WIDTH), np.float32)
    for number, values in zip(*rows, strict=True):
        whole[number] += values
    return whole


@pytest.mark.parametrize("counts", [[5, 0, 9], [0, 0, 0], [1, 1, 1], [60, 3, 0]])
@pytest.mark.parametrize("name", ["ring", "bruck", "hierarchical"])
def test_the_sum_is_the_dense_one(name, counts):
    inputs = gradients(3, counts)
    outputs = sparse_all_reduce(build(f"all_gather/{name}", 3), inputs)
    in_order = (np.concatenate(parts) for parts in zip(*inputs, strict=True))
    right = dense(tuple(in_order))
    for numbers, values in outputs:
        assert numbers.tolist() == sorted({number for one, _ in inputs for number in one.tolist()})
        assert dense((numbers, values)).tobytes() == right.tobytes()


def test_where_it_pays():
    """At this density a rank sends as many bytes as in a dense all-reduce by a ring."""
    ranks, value_bytes, index_bytes, rows = 4, 24, 8, 1600
    density = pays_below(ranks, value_bytes=value_bytes, index_bytes=index_bytes)
    assert density == 2 * 24 / (4 * 32)
    own = int(density * rows) * (value_bytes + index_bytes)
    sparse = sent(build("all_gather/ring", ranks), [own] * ranks)
    assert sparse == sent(build("ring", ranks), [rows * value_bytes // ranks] * ranks)
