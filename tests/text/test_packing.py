"""Packed conversations: each is whole in one row, and few rows are needed; masks stay by tokens."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_corpus import END, corpus, stream

from howdah.base.errors import UserError
from howdah.plan.batch import MASKED
from howdah.text.batches import Rows, held_out_micros, micros, order_of
from howdah.text.packing import best_fit, pack
from howdah.text.tokens import packed


def chats(*lengths, asked=1, alone=False):
    """Conversations of these lengths, whose first `asked` tokens are not trained on."""
    made = stream(*lengths)
    trained = np.ones(len(made.ids), np.uint8)
    for start in made.starts:
        trained[start : start + 1 + asked] = 0
    trained[-1] = 0
    return replace(made, trained=trained, padded=alone)


def rows_of(made, length=6):
    """All rows of a source, as one micro-batch."""
    made = replace(corpus(made), order="sequential")
    order = order_of(made, sequence=length, seed=1)
    (micro,) = micros(made, order, Rows(order.samples[0]), first=0, size=order.samples[0])
    return micro


def test_conversations_share_rows_and_are_documents_of_their_own():
    micro = rows_of(chats(5, 4, 3))
    assert micro.tokens.tolist() == [[1, 2, 3, 4, 10, 11], [6, 7, 8, END, END, END]]
    assert micro.labels.tolist() == [[2, 3, 4, 5, 11, 12], [7, 8, 9, *[MASKED] * 3]]
    assert micro.documents.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert micro.positions.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]]


def test_padded_conversations_have_rows_of_their_own():
    micro = rows_of(chats(5, 3, alone=True))
    assert micro.tokens.tolist() == [[1, 2, 3, 4, END, END], [6, 7, END, END, END, END]]
    assert micro.documents.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]]


def test_tokens_that_are_not_trained_have_no_label():
    micro = rows_of(chats(5, asked=3))
    assert micro.labels.tolist() == [[MASKED, MASKED, 4, 5, MASKED, MASKED]]


def test_long_conversations_are_cut_and_those_without_an_answer_left_out():
    made = chats(9, 3, asked=2)
    assert rows_of(made, 4).labels.tolist() == [[MASKED, 3, 4, 5], [MASKED, 12, MASKED, MASKED]]
    found = packed(chats(9, 3, 8, asked=7), 6)
    assert (found.documents.tolist(), found.cut, found.without) == ([], 2, 3)
    with pytest.raises(UserError, match="no conversation of source 0 has an answer within 7 tok"):
        rows_of(chats(9, asked=7))


def test_held_out_conversations_are_packed_too():
    made = corpus(stream(9), held_out=chats(5, 4, 3))
    (micro,) = held_out_micros(made, Rows(2), sequence=6)
    assert (micro.labels != MASKED).sum() == made.held_out.predicted == 9


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    room=st.integers(1, 12),
    asked=st.integers(1, 4),
)
def test_each_answer_is_in_one_row_once(lengths, room, asked):
    made = chats(*lengths, asked=asked)
    found = pack(made.trained, made.starts, room=room, alone=False)
    rows = [found.of(row) for row in range(len(found.rows) - 1)]
    placed = [one for row in rows for one in row]
    good = [n for n, length in enumerate(lengths) if min(length, room + 1) > asked]
    assert sorted(placed) == good and len(good) + found.without == len(lengths)
    assert all(sum(found.sizes[row]) <= room and row == sorted(row) and row for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


@given(sizes=st.lists(st.integers(1, 10), max_size=30))
def test_best_fit_needs_few_rows(sizes):
    """At most 11/9 of what all sizes fill, and one row; no two rows could have been one."""
    rows = best_fit(np.array(sizes, np.int64), 10)
    used = np.bincount(rows, weights=sizes, minlength=0)
    assert (used <= 10).all() and (used > 0).all()
    assert len(used) < 2 or sum(sorted(used)[:2]) > 10


def test_a_row_is_filled_by_what_fits_best():
    assert best_fit(np.array([6, 5, 4, 3, 2]), 10).tolist() == [0, 1, 0, 1, 1]
