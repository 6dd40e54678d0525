"""Batches: the same samples for every layout, each token predicted once, documents marked."""

import sys
from collections import defaultdict
from subprocess import run

import numpy as np
import pytest
from made_corpus import END, corpus, stream

from howdah.base.errors import UserError
from howdah.model import loss
from howdah.plan.layout import parse_layout
from howdah.plan.mesh_axes import axis
from howdah.text.batches import MASKED, Rows, held_out_micros, micros, order_of, rows_of
from howdah.text.order import locate


def all_micros(made, *, micro, replicas, first, size, sequence=4, seed=3):
    """[replica][micro-step] of one global batch."""
    order = order_of(made, sequence=sequence, seed=seed)
    return [
        micros(made, order, Rows(micro, replicas, replica), first=first, size=size)
        for replica in range(replicas)
    ]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 6, 7])
def test_every_layout_takes_the_same_samples_in_equal_shapes(replicas, micro, size):
    made = corpus(stream(*[5] * 12), stream(*[7] * 5, first=500), weights=(2.0, 1.0))
    got = all_micros(made, micro=micro, replicas=replicas, first=9, size=size)
    single = all_micros(made, micro=size, replicas=1, first=9, size=size)[0][0]
    assert len({len(one) for one in got}) == 1
    # row j: micro-step j // (replicas·micro), replica (j % (replicas·micro)) // micro
    flat = [got[replica][step] for step in range(len(got[0])) for replica in range(replicas)]
    for one in flat:
        assert one.tokens.shape == one.labels.shape == one.positions.shape == (micro, 4)
        assert one.documents.shape == (micro, 4) and one.samples.shape == (micro,)
    for name in ("tokens", "labels", "positions", "documents", "samples"):
        rows = np.concatenate([getattr(one, name) for one in flat])
        np.testing.assert_array_equal(rows[:size], getattr(single, name))
    assert single.samples.tolist() == list(range(9, 9 + size))


@pytest.mark.parametrize("words", ["dp2 cp2 tp2", "pp2 dp3 cp2", "cp4", "dp4 ep2 tp2"])
def test_ranks_of_one_replica_read_the_same_samples(words):
    """The ranks of cp hold the same weights, and yet read what their neighbours in cp read."""
    layout, made = parse_layout(words), corpus(stream(400))
    order, read = order_of(made, sequence=5, seed=3), defaultdict(set)
    for rank in range(layout.world):
        found = micros(made, order, rows_of(layout, rank, micro=2), first=0, size=12)
        taken = tuple(int(n) for micro in found for n in micro.samples if n >= 0)
        read[axis(layout, "dp").index_of(rank)].add(taken)
    assert all(len(found) == 1 for found in read.values()) and len(read) == layout.dp
    assert sorted(n for found in read.values() for n in next(iter(found))) == list(range(12))


def test_rows_of_padding_count_for_nothing():
    got = all_micros(corpus(stream(40)), micro=2, replicas=2, first=0, size=3)
    padding = got[1][0]
    assert padding.samples.tolist() == [2, -1]
    assert padding.tokens[1].tolist() == [END] * 4
    assert padding.labels[1].tolist() == [MASKED] * 4
    assert padding.positions[1].tolist() == [0, 1, 2, 3]
    assert padding.documents[1].tolist() == [0] * 4
    assert (padding.labels[0] != MASKED).all()


def test_a_run_that_stops_goes_on_with_the_very_next_sample():
    made = corpus(stream(*[5] * 12))
    whole = all_micros(made, micro=10, replicas=1, first=0, size=10)[0][0]
    start = all_micros(made, micro=4, replicas=1, first=0, size=4)[0][0]
    rest = all_micros(made, micro=1, replicas=3, first=4, size=6)
    after = [rest[replica][step] for step in range(2) for replica in range(3)]
    tokens = np.concatenate([start.tokens, *(one.tokens for one in after)])
    np.testing.assert_array_equal(tokens, whole.tokens)


def test_an_epoch_predicts_each_token_of_its_windows_once():
    made = corpus(stream(9, 4, 1, 20))
    n = made.sources[0].samples(4)
    batch = all_micros(made, micro=n, replicas=1, first=0, size=n)[0][0]
    assert sorted(batch.labels.ravel()) == sorted(made.sources[0].ids[1 : 4 * n + 1])
    assert sorted(batch.tokens.ravel()) == sorted(made.sources[0].ids[: 4 * n])


def test_documents_and_positions_follow_the_ends():
    """
    stream      E 1 2 E 3 E E 4 5 6 E      documents of 2, 1, 0 and 3 tokens; samples of 5
    document    0 0 0 1 1 | 0 1 1 1 1
    position    0 1 2 0 1 | 0 0 1 2 3
    """
    made = corpus(stream(30), held_out=stream(2, 1, 0, 3))
    batch = next(held_out_micros(made, Rows(2), sequence=5))
    assert batch.tokens.tolist() == [[END, 1, 2, END, 3], [END, END, 4, 5, 6]]
    assert batch.labels.tolist() == [[1, 2, END, 3, END], [END, 4, 5, 6, END]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]


def test_positions_start_at_the_row_where_a_document_is_cut():
    batch = next(held_out_micros(corpus(stream(9), held_out=stream(7)), Rows(2), sequence=4))
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.documents.tolist() == [[0] * 4, [0] * 4]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2, 5])
@pytest.mark.parametrize("sequence", [1, 3, 4, 100])
def test_held_out_text_is_predicted_whole_exactly_once(replicas, micro, sequence):
    made = corpus(stream(9), held_out=stream(4, 3, 6))
    shards = [
        list(held_out_micros(made, Rows(micro, replicas, r), sequence=sequence))
        for r in range(replicas)
    ]
    assert len({len(shard) for shard in shards}) == 1
    rows = [row for step in zip(*shards, strict=True) for one in step for row in one.labels]
    labels = np.concatenate(rows)
    assert labels[labels != MASKED].tolist() == made.held_out.ids[1:].tolist()
    samples = np.concatenate([one.samples for step in zip(*shards, strict=True) for one in step])
    total = made.held_out.windows(sequence)
    assert samples[samples >= 0].tolist() == list(range(total))


def test_held_out_text_can_be_read_in_part():
    made = corpus(stream(9), held_out=stream(30))
    read = list(held_out_micros(made, Rows(2), sequence=4, limit=3))
    assert [one.samples.tolist() for one in read] == [[0, 1], [2, -1]]
    # the windows begin at 0, 4, 8, ... 28: three of eight, spread over the text
    assert [int(one.tokens[row, 0]) for one in read for row in (0, 1)][:3] == [
        int(made.held_out.ids[4 * window]) for window in (0, 2, 5)
    ]


def test_sources_are_read_where_the_order_says():
    made = corpus(stream(40), stream(40, first=1000), weights=(3.0, 1.0))
    order = order_of(made, sequence=4, seed=3)
    batch = micros(made, order, Rows(30), first=100, size=30)[0]
    source, index = locate(order, np.arange(100, 130))
    assert set(source.tolist()) == {0, 1}
    for row, one, at in zip(batch.tokens, source, index, strict=True):
        assert row.tolist() == made.sources[one].ids[at * 4 : at * 4 + 4].tolist()


def test_a_source_without_a_sample_has_no_order():
    with pytest.raises(UserError, match="source 1 has 4 tokens"):
        order_of(corpus(stream(9), stream(2)), sequence=4, seed=0)


def test_the_masked_label_is_the_loss_functions():
    assert loss.MASKED == MASKED


def test_the_text_pipeline_loads_no_torch():
    code = "import sys, howdah.text.batches, howdah.text.prefetch; print('torch' in sys.modules)"
    printed = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "False"
