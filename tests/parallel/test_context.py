"""What a rank of cp works on: chunks, masks of blocks, columns of samples."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from howdah.parallel.context_ring import blocks_of
from howdah.plan.heads import cut_heads, held_heads
from howdah.plan.layout import parse_layout
from howdah.plan.sharding import chunks
from howdah.text.batches import Micro
from howdah.train.feed import Columns, on_device, with_noise

CPU = torch.device("cpu")


def seen_by(blocks, index, ranks, documents, *, causal=True):
    """Which pairs (row, query, key) of whole samples the mask of a rank computes, how often."""
    rows, length = documents.shape
    found = np.zeros((rows, length, length), int)
    places = [np.concatenate([np.arange(*chunk) for chunk in some]) for some in ranks]
    for owner, rectangles in enumerate([*blocks.others, blocks.squares]):
        own = owner == len(ranks)
        keys = places[index if own else owner]
        for one in rectangles:
            asking, asked = places[index][one.queries], keys[one.keys]
            every = np.ones((len(asking), len(asked)), bool)
            pairs = asking[:, None] >= asked if own and causal else every
            found[one.rows, asking[:, None], asked] += pairs
    return found


@pytest.mark.parametrize("causal", [True, False])
@given(data=st.data(), ways=st.integers(2, 4), rows=st.integers(1, 3))
def test_masks_of_all_ranks_together_are_that_of_the_single_run(causal, data, ways, rows):
    """Every pair of a query and a token of its document, or an earlier one alone, is computed by
    one rank, once.
    """
    length = data.draw(st.integers(2 * ways, 4 * ways + 3))
    borders = st.lists(st.booleans(), min_size=length, max_size=length)
    documents = np.array([data.draw(borders) for _ in range(rows)], np.int32).cumsum(1)
    layout = parse_layout(f"cp{ways}")
    ranks = [chunks(layout, length, rank) for rank in range(ways)]
    found = [
        seen_by(
            blocks_of(documents, ranks, index, causal=causal),
            index,
            ranks,
            documents,
            causal=causal,
        )
        for index in range(ways)
    ]
    same = documents[:, :, None] == documents[:, None, :]
    wanted = same & np.tri(length, dtype=bool) if causal else same
    np.testing.assert_array_equal(sum(found), wanted)


def test_what_no_query_attends_to_is_left_out_and_ranks_have_as_much_to_do():
    layout, documents = parse_layout("cp4"), np.zeros((1, 32), np.int32)
    ranks = [chunks(layout, 32, rank) for rank in range(4)]
    counts = []
    for index in range(4):
        blocks = blocks_of(documents, ranks, index)
        assert not blocks.others[index]
        assert [len(one) for one in blocks.others] == [index != other for other in range(4)]
        counts.append(seen_by(blocks, index, ranks, documents).sum())
    assert len(set(counts)) == 1
    apart = np.repeat(np.arange(8, dtype=np.int32), 4)[None]  # a document for each chunk
    assert all(not any(blocks_of(apart, ranks, index).others) for index in range(4))


@given(ways=st.integers(1, 5), length=st.integers(10, 40))
def test_chunks_of_all_ranks_are_the_sample(ways, length):
    layout = parse_layout(f"cp{ways}" if ways > 1 else "single")
    every = [range(*chunk) for rank in range(ways) for chunk in chunks(layout, length, rank)]
    assert sorted(place for chunk in every for place in chunk) == list(range(length))


@given(group=st.integers(1, 4), keys=st.integers(1, 6), tp=st.integers(1, 4), cp=st.integers(1, 4))
def test_traded_heads_are_those_of_the_tp_rank_with_the_keys_they_use(group, keys, tp, cp):
    shape = SimpleNamespace(heads=group * keys, k=keys, latent=None)
    for index in range(tp if tp <= keys else 1):
        queries, held = held_heads(shape, min(tp, keys), index)
        if cp > held and (cp % held or cp // held > group):
            continue
        parts = [cut_heads(queries, held, cp, part) for part in range(cp)]
        assert [head for (a, b), _ in parts for head in range(a, b)] == list(range(queries))
        for (first, last), (start, stop) in parts:
            assert {head // group for head in range(first, last)} == set(range(start, stop))


def micro_of(length=11):
    at = np.tile(np.arange(length), (2, 1))
    return Micro(at + 100, at + 200, at, (at // 4).astype(np.int32), np.array([7, 8]))


@pytest.mark.parametrize("words", ["cp2", "cp2 context=all-to-all", "cp3"])
def test_a_rank_takes_its_columns_and_documents_stay_whole(words):
    layout, micro, seen = parse_layout(words), micro_of(), []
    for rank in range(layout.world):
        one = on_device(micro, CPU, Columns(layout, rank))
        places = one.places.tolist()
        assert places == one.given.positions[0].tolist() == sorted(places)
        assert (one.given.tokens[1] - 100).tolist() == (one.given.labels[0] - 200).tolist()
        assert (one.given.tokens[0] - 100).tolist() == places
        assert one.given.documents.shape == (2, 11) and one.length == 11
        seen += places
    assert sorted(seen) == list(range(11))


def test_noise_is_that_of_the_positions_of_a_slice_of_a_chunk():
    class Region:
        sliced, slice = True, (1, 4)

    one = on_device(micro_of(), CPU, Columns(parse_layout("cp2"), 0))
    noise = with_noise(one, seed=1, step=2, region=Region()).noise
    assert noise.positions.tolist() == one.places[1:4].tolist() and noise.length == 11
