"""Programs on numbers: every operation, every algorithm, lengths that cannot be divided."""

from itertools import product

import numpy as np
import pytest

from howdah.base.errors import UserError
from howdah.collectives.execute import run
from howdah.collectives.program import split
from howdah.collectives.registry import ALGORITHMS, build

RANKS = (1, 2, 4, 6, 7, 8)


def vectors(ranks, length):
    numbers = np.random.default_rng(0)
    return [numbers.integers(-99, 99, length).astype(np.float64) for _ in range(ranks)]


def pieces(vector, ranks):
    return np.split(vector, np.cumsum(split(len(vector), ranks))[:-1])


def given_and_wanted(op, ranks, length):
    """The input of every rank, and its result, by the simplest means."""
    every = vectors(ranks, length)
    total, nothing = sum(every), np.zeros(0)
    blocks = pieces(every[0], ranks)
    roots = [every[0], *[nothing] * (ranks - 1)]
    if op == "all_to_all":
        rows = [pieces(vector, ranks) for vector in every]
        columns = [np.concatenate([row[rank] for row in rows]) for rank in range(ranks)]
        return every, columns
    return {
        "broadcast": (roots, [every[0]] * ranks),
        "scatter": (roots, blocks),
        "gather": (blocks, roots),
        "all_gather": (blocks, [every[0]] * ranks),
        "barrier": (blocks, [every[0]] * ranks),
        "reduce": (every, [total, *[nothing] * (ranks - 1)]),
        "all_reduce": (every, [total] * ranks),
        "reduce_scatter": (every, pieces(total, ranks)),
    }[op]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_results_are_those_of_numpy(name):
    """Chunks of a program may be finer than its blocks, so sizes are given by the blocks."""
    done = 0
    for ranks, length in product(RANKS, (0, 1, 5, 24, 67)):
        try:
            program = build(name, ranks)
        except UserError:
            continue
        inputs, wanted = given_and_wanted(program.op, ranks, length)
        outputs = run(program, inputs)
        for output, right in zip(outputs, wanted, strict=True):
            np.testing.assert_array_equal(output, right)
        done += 1
    assert done >= 20


@pytest.mark.parametrize("ranks", [3, 6, 8])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name.startswith("all_reduce/")])
def test_all_ranks_have_the_same_bits(name, ranks):
    try:
        program = build(name, ranks)
    except UserError:
        return
    numbers = np.random.default_rng(1)
    inputs = [numbers.normal(size=50).astype(np.float32) for _ in range(ranks)]
    outputs = run(program, inputs)
    assert all(output.tobytes() == outputs[0].tobytes() for output in outputs)
    np.testing.assert_allclose(outputs[0], np.sum(inputs, axis=0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("add", [np.maximum, np.minimum, np.multiply])
def test_other_reductions(add):
    inputs = vectors(5, 11)
    for output in run(build("ring", 5), inputs, add=add):
        np.testing.assert_array_equal(output, add.reduce(inputs))


def test_chunks_may_have_any_sizes():
    """An all-gather of shards of 3, 0 and 2 elements; in an all-to-all every pair has its own."""
    shards = [np.arange(3.0), np.zeros(0), np.array([7.0, 8.0])]
    for output in run(build("all_gather/ring", 3), shards):
        assert output.tolist() == [0, 1, 2, 7, 8]
    sizes = [1, 2, 0, 3]  # 0 for 0, 0 for 1, 1 for 0, 1 for 1
    rows = [np.array([1.0, 2, 3]), np.array([4.0, 5, 6])]
    first, second = run(build("all_to_all/pairwise", 2), rows, sizes=sizes)
    assert (first.tolist(), second.tolist()) == ([1.0], [2, 3, 4, 5, 6])


def test_inputs_that_do_not_fit_together():
    with pytest.raises(UserError, match=r"^ring has 3 ranks, and 2 inputs; give one for each$"):
        run(build("ring", 3), vectors(2, 4))
    with pytest.raises(UserError, match="rank 1 gives 5 elements, others 4"):
        run(build("ring", 2), [np.zeros(4), np.zeros(5)])
    with pytest.raises(UserError, match="rank 0 gives 4 elements, and its chunks have 5"):
        run(build("ring", 2), [np.zeros(4), np.zeros(4)], sizes=[2, 3])
