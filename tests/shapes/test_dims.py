"""A rank's part of a micro-batch, counted by hand, and all parts together."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from howdah.shapes.dims import CHUNK, Dim, Tokens, local
from howdah.shapes.shape import ModelShape

SHAPE = ModelShape(layers=2, width=16, heads=4, kv_heads=2, ffn_size=24, vocab=40, context=32)


def test_one_rank_has_everything():
    whole = local(SHAPE, Tokens(3, 8, source=5))
    assert whole.counts == {
        "token": 24,
        "sp_token": 24,
        "pair": 3 * 8 * 8,
        "source": 15,
        "sp_source": 15,
        "source_pair": 3 * 5 * 5,
        "cross_pair": 3 * 8 * 5,
        "expert_row": 0,
        "taken_row": 0,
        "chunk": 24,
        "once": 1,
    }
    assert whole.size(Dim("ffn", 24)) == 24


def test_the_picture_at_the_top_of_the_file():
    part = local(SHAPE, Tokens(1, 12), tp=4, cp=2, sp=True)
    assert part.counts["token"] == 6
    assert part.size(Dim("query", 16)) == 4
    assert part.counts["sp_token"] == 2
    assert part.size(Dim("width", 16)) == 16


def test_a_part_of_a_sequence_meets_all_its_keys():
    assert local(SHAPE, Tokens(2, 8), cp=4).counts["pair"] == 2 * 2 * 8


def test_without_sequence_parallelism_norms_see_all_tokens():
    assert local(SHAPE, Tokens(1, 12), tp=4).counts["sp_token"] == 12


def test_key_value_heads_are_copied_where_there_are_too_few():
    assert local(SHAPE, Tokens(1, 1), tp=4).size(Dim("key", 8)) == 4  # one head of two
    assert local(SHAPE, Tokens(1, 1), tp=4).shares["kv_heads"] == Fraction(1, 2)


def test_what_does_not_divide_is_the_largest_part():
    part = local(SHAPE, Tokens(1, 7), tp=3, cp=2)
    assert part.counts["token"] == 4
    assert part.size(Dim("query", 16)) == 8  # two of four heads
    assert part.size(Dim("vocab", 40)) == 14


def test_the_last_chunk_of_the_head_is_what_is_left_over():
    def chunk(tokens):
        return local(SHAPE, Tokens(1, tokens)).counts["chunk"]

    assert [chunk(n) for n in (1, CHUNK, CHUNK + 1, 2 * CHUNK)] == [1, CHUNK, 1, CHUNK]


@given(tp=st.integers(1, 4), cp=st.integers(1, 5), rows=st.integers(1, 3), length=st.integers(1, 9))
def test_the_parts_cover_the_whole(tp, cp, rows, length):
    whole = local(SHAPE, Tokens(rows, length))
    part = local(SHAPE, Tokens(rows, length), tp=tp, cp=cp, sp=True)
    assert cp * part.counts["token"] >= whole.counts["token"]
    assert tp * part.counts["sp_token"] >= part.counts["token"]
    for dim in (Dim("query", 16), Dim("key", 8), Dim("ffn", 24), Dim("vocab", 40)):
        assert dim.size <= tp * part.size(dim)
        assert part.size(dim) <= dim.size
