"""Overlap: against the picture of its file, and against the slow and obvious way."""

import itertools
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from howdah.plan.boxes import Box, Piece, Run, intersect, overlap, whole, whole_piece


def numbers(piece):
    """The numbers that the elements of a piece have in the whole tensor, row by row."""
    tensor = np.arange(prod(piece.shape)).reshape(piece.shape)
    corner, size = piece.box.corner, piece.box.size
    part = tensor[tuple(slice(c, c + n) for c, n in zip(corner, size, strict=True))]
    return part.reshape(-1)[piece.start : piece.stop].tolist()


@st.composite
def spans(draw, length):
    start = draw(st.integers(0, length))
    return start, draw(st.integers(start, length))


@st.composite
def pieces_of(draw, shape):
    # Whole extents are drawn often: rows are joined only across dims that are not cut.
    cuts = [draw(st.just((0, n)) | spans(n)) for n in shape]
    box = Box(tuple(a for a, _ in cuts), tuple(b - a for a, b in cuts))
    return Piece("t", shape, box, *draw(st.just((0, box.elements)) | spans(box.elements)))


shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)
pairs = shapes.flatmap(lambda shape: st.tuples(pieces_of(shape), pieces_of(shape)))


@given(pairs)
@settings(max_examples=400)
def test_overlap_is_the_common_elements_at_their_offsets(pair):
    there, here = pair
    a, b = numbers(there), numbers(here)
    found = []
    for run in overlap(there, here):
        assert run.length > 0
        assert 0 <= run.there <= run.there + run.length <= there.elements
        assert 0 <= run.here <= run.here + run.length <= here.elements
        values = a[run.there : run.there + run.length]
        assert values == b[run.here : run.here + run.length]
        found += values
    assert found == sorted(set(a) & set(b))  # each once, in row-by-row order


@given(pairs)
def test_overlap_is_symmetric(pair):
    there, here = pair
    mirrored = [Run(run.here, run.there, run.length) for run in overlap(here, there)]
    assert mirrored == list(overlap(there, here))


@given(pairs)
def test_runs_are_as_long_as_they_can_be(pair):
    runs = list(overlap(*pair))
    for first, second in itertools.pairwise(runs):
        end = first.there + first.length, first.here + first.length
        assert end != (second.there, second.here)


@given(shapes.flatmap(pieces_of))
def test_a_piece_overlaps_itself_in_one_run(piece):
    expected = [Run(0, 0, piece.elements)] if piece.elements else []
    assert list(overlap(piece, piece)) == expected


@given(pairs)
def test_intersection_is_what_both_boxes_hold(pair):
    a, b = (Piece(p.name, p.shape, p.box, 0, p.box.elements) for p in pair)
    both = intersect(a.box, b.box)
    shared = [] if both is None else numbers(Piece("t", a.shape, both, 0, both.elements))
    assert shared == sorted(set(numbers(a)) & set(numbers(b)))


def test_the_picture():
    tensor = np.array(list(".........abc...def...ghi...jkl")[6:]).reshape(4, 6)
    piece = Piece("t", (4, 6), Box((0, 3), (4, 3)), 2, 7)
    assert [tensor.reshape(-1)[n] for n in numbers(piece)] == list("cdefg")
    assert list(overlap(whole_piece("t", (4, 6)), piece)) == [
        Run(5, 0, 1),
        Run(9, 1, 3),
        Run(15, 4, 1),
    ]


def test_equal_boxes_share_one_run_and_columns_one_per_row():
    shape = (4, 6)
    first, second = Piece("t", shape, whole(shape), 0, 13), Piece("t", shape, whole(shape), 7, 24)
    assert list(overlap(first, second)) == [Run(7, 0, 6)]
    left, right = Box((0, 0), (4, 3)), Box((0, 2), (4, 4))
    a, b = (Piece("t", shape, box, 0, box.elements) for box in (left, right))
    assert list(overlap(a, b)) == [Run(2 + 3 * row, 4 * row, 1) for row in range(4)]


def test_scalars_and_empty_tensors():
    scalar, empty = whole_piece("t", ()), whole_piece("t", (3, 0))
    assert list(overlap(scalar, scalar)) == [Run(0, 0, 1)]
    assert list(overlap(empty, empty)) == []


def test_boxes_apart_share_nothing():
    assert intersect(Box((0, 0), (2, 6)), Box((2, 0), (2, 6))) is None


def test_long_rows_are_one_step():
    # Visiting every element would take minutes.
    shape = (2, 10**9)
    left, right = Box((0, 0), (2, 9 * 10**8)), Box((0, 10**8), (2, 9 * 10**8))
    a, b = (Piece("t", shape, box, 0, box.elements) for box in (left, right))
    length = 8 * 10**8
    runs = [Run(10**8, 0, length), Run(10 * 10**8, 9 * 10**8, length)]
    assert list(overlap(a, b)) == runs


def test_a_small_piece_of_a_large_box_costs_only_its_own_rows():
    # Visiting every row of the box would take minutes.
    shape = (10**9, 4)
    columns = Box((0, 1), (10**9, 2))
    piece = Piece("t", shape, columns, 10**9 - 1, 10**9 + 2)
    runs = [Run(2 * 10**9 - 2, 0, 1), Run(2 * 10**9 + 1, 1, 2)]
    assert list(overlap(whole_piece("t", shape), piece)) == runs
