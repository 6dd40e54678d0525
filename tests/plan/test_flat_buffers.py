"""Flat buffers: what lies where, and that shares of a buffer lose and repeat nothing."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from howdah.plan.boxes import Box, Piece, whole
from howdah.plan.flat_buffers import ALIGN, Buffer, Segment, buffers, gaps, pieces, share
from howdah.shapes.weights import Weight


def weight(name, shape, *, unit="layers.0", decay=True):
    dims = tuple("dim" for _ in shape)
    return Weight(name, dims, tuple(shape), unit, decay=decay, mean=0.0, spread=0.0)


@st.composite
def tables(draw):
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=8))
    return [
        weight(
            f"w{number}",
            shape,
            unit=draw(st.sampled_from(["embedding", "layers.0", "head"])),
            decay=draw(st.booleans()),
        )
        for number, shape in enumerate(shapes)
    ]


@given(tables())
def test_each_weight_has_one_segment_in_its_unit(table):
    built = buffers(table)
    assert [b.unit for b in built] == list(dict.fromkeys(w.unit for w in table))
    for buffer in built:
        members = [w for w in table if w.unit == buffer.unit]
        # Decaying weights first, and otherwise the order of the table.
        expected = [w for w in members if w.decay] + [w for w in members if not w.decay]
        assert [(s.name, s.shape) for s in buffer.segments] == [(w.name, w.shape) for w in expected]
        assert [s.stop - s.start for s in buffer.segments] == [w.elements for w in expected]


@given(tables())
def test_segments_are_aligned_and_closely_packed(table):
    for buffer in buffers(table):
        end = 0
        for segment in buffer.segments:
            assert segment.start % ALIGN == 0
            assert 0 <= segment.start - end < ALIGN
            end = segment.stop
        assert 0 <= buffer.length - end < ALIGN
        assert buffer.length % ALIGN == 0


@given(tables())
def test_decay_is_a_range(table):
    decays = {w.name: w.decay for w in table}
    for buffer in buffers(table):
        assert 0 <= buffer.decay_stop <= buffer.length
        for segment in buffer.segments:
            inside = segment.stop <= buffer.decay_stop
            outside = segment.start >= buffer.decay_stop
            assert (inside, outside) == (decays[segment.name], not decays[segment.name])


@given(st.integers(0, 10_000), st.integers(1, 70))
def test_shares_split_a_range(length, parts):
    cuts = [share(length, parts, index) for index in range(parts)]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == length
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    sizes = {stop - start for start, stop in cuts}
    assert max(sizes) - min(sizes) <= 1


@given(tables(), st.integers(1, 12))
def test_shares_of_a_buffer_hold_every_element_once(table, parts):
    for buffer in buffers(table):
        held = []
        for index in range(parts):
            start, stop = share(buffer.length, parts, index)
            for piece, first, last in pieces(buffer, start, stop):
                assert start <= first < last <= stop
                assert piece.elements == last - first
                held += [(piece.name, n) for n in range(piece.start, piece.stop)]
        expected = [(s.name, n) for s in buffer.segments for n in range(s.stop - s.start)]
        assert held == expected


@given(tables(), st.data())
def test_a_piece_stands_where_its_segment_does(table, data):
    for buffer in buffers(table):
        start = data.draw(st.integers(0, buffer.length))
        stop = data.draw(st.integers(start, buffer.length))
        segments = {s.name: s for s in buffer.segments}
        for piece, first, last in pieces(buffer, start, stop):
            segment = segments[piece.name]
            assert (piece.shape, piece.box) == (segment.shape, whole(segment.shape))
            assert (first, last) == (segment.start + piece.start, segment.start + piece.stop)


def test_an_example_by_hand():
    table = [
        weight("norm.weight", [5], decay=False),
        weight("q.weight", [4, 5]),
        weight("k.weight", [2, 5]),
    ]
    (buffer,) = buffers(table)
    segments = (
        Segment("q.weight", (4, 5), whole((4, 5)), 0, 20),
        Segment("k.weight", (2, 5), whole((2, 5)), 32, 42),
        Segment("norm.weight", (5,), whole((5,)), 48, 53),
    )
    assert buffer == Buffer("layers.0", segments, decay_stop=48, length=64)
    q = Piece("q.weight", (4, 5), whole((4, 5)), 10, 20)
    k = Piece("k.weight", (2, 5), whole((2, 5)), 0, 3)
    assert list(pieces(buffer, 10, 35)) == [(q, 10, 20), (k, 32, 35)]
    assert list(pieces(buffer, 20, 32)) == []  # padding belongs to no piece


def test_a_unit_without_decay():
    (buffer,) = buffers([weight("norm.weight", [3], decay=False)])
    assert (buffer.decay_stop, buffer.length) == (0, 16)


def test_a_rank_that_holds_boxes_lays_them_and_leaves_out_what_it_does_not_hold():
    table = [weight("q.weight", [4, 5]), weight("k.weight", [2, 5]), weight("o.weight", [5, 4])]
    boxes = {"q.weight": Box((2, 0), (2, 5)), "o.weight": Box((0, 2), (5, 2))}
    (buffer,) = buffers(table, boxes)
    assert [(s.name, s.shape, s.box, s.start) for s in buffer.segments] == [
        ("q.weight", (4, 5), boxes["q.weight"], 0),
        ("o.weight", (5, 4), boxes["o.weight"], 16),
    ]
    assert list(pieces(buffer, 8, 18)) == [
        (Piece("q.weight", (4, 5), boxes["q.weight"], 8, 10), 8, 10),
        (Piece("o.weight", (5, 4), boxes["o.weight"], 0, 2), 16, 18),
    ]


@given(tables())
def test_what_is_no_segment_is_a_gap(table):
    for buffer in buffers(table):
        taken = [(s.start, s.stop) for s in buffer.segments if s.start < s.stop]
        places = [n for start, stop in [*taken, *gaps(buffer)] for n in range(start, stop)]
        assert sorted(places) == list(range(buffer.length))
