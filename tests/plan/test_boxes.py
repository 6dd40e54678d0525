"""Overlap and reads: against the pictures of the file, and against the slow and obvious way."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from howdah.plan.boxes import (
    Box,
    Missing,
    Overlap,
    Piece,
    Read,
    intersect,
    overlap,
    reads,
    whole,
    whole_piece,
)


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
    mirrored = [Overlap(run.here, run.there, run.length) for run in overlap(here, there)]
    assert mirrored == list(overlap(there, here))


@given(pairs)
def test_runs_are_as_long_as_they_can_be(pair):
    runs = list(overlap(*pair))
    for first, second in itertools.pairwise(runs):
        end = first.there + first.length, first.here + first.length
        assert end != (second.there, second.here)


@given(shapes.flatmap(pieces_of))
def test_a_piece_overlaps_itself_in_one_run(piece):
    expected = [Overlap(0, 0, piece.elements)] if piece.elements else []
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
        Overlap(5, 0, 1),
        Overlap(9, 1, 3),
        Overlap(15, 4, 1),
    ]


def test_equal_boxes_share_one_run_and_columns_one_per_row():
    shape = (4, 6)
    first, second = Piece("t", shape, whole(shape), 0, 13), Piece("t", shape, whole(shape), 7, 24)
    assert list(overlap(first, second)) == [Overlap(7, 0, 6)]
    left, right = Box((0, 0), (4, 3)), Box((0, 2), (4, 4))
    a, b = (Piece("t", shape, box, 0, box.elements) for box in (left, right))
    assert list(overlap(a, b)) == [Overlap(2 + 3 * row, 4 * row, 1) for row in range(4)]


def test_scalars_and_empty_tensors():
    scalar, empty = whole_piece("t", ()), whole_piece("t", (3, 0))
    assert list(overlap(scalar, scalar)) == [Overlap(0, 0, 1)]
    assert list(overlap(empty, empty)) == []


def test_boxes_apart_share_nothing():
    assert intersect(Box((0, 0), (2, 6)), Box((2, 0), (2, 6))) is None


def test_long_rows_are_one_step():
    # Visiting every element would take minutes.
    shape = (2, 10**9)
    left, right = Box((0, 0), (2, 9 * 10**8)), Box((0, 10**8), (2, 9 * 10**8))
    a, b = (Piece("t", shape, box, 0, box.elements) for box in (left, right))
    length = 8 * 10**8
    runs = [Overlap(10**8, 0, length), Overlap(10 * 10**8, 9 * 10**8, length)]
    assert list(overlap(a, b)) == runs


def test_a_small_piece_of_a_large_box_costs_only_its_own_rows():
    # Visiting every row of the box would take minutes.
    shape = (10**9, 4)
    columns = Box((0, 1), (10**9, 2))
    piece = Piece("t", shape, columns, 10**9 - 1, 10**9 + 2)
    runs = [Overlap(2 * 10**9 - 2, 0, 1), Overlap(2 * 10**9 + 1, 1, 2)]
    assert list(overlap(whole_piece("t", shape), piece)) == runs


# -- who reads what from whom --------------------------------------------------


@st.composite
def layouts_of(draw, name, shape):
    """Pieces that hold every element of a tensor once: a grid of boxes, each cut into ranges."""
    edges = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else ()
        edges.append(list(itertools.pairwise([0, *sorted(inner), size])))
    found = []
    for cell in itertools.product(*edges):
        box = Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        inner = draw(st.sets(st.integers(0, box.elements), max_size=2))
        ends = itertools.pairwise([0, *sorted(inner), box.elements])
        found += [Piece(name, shape, box, start, stop) for start, stop in ends]
    return found


def tensors(shapes):
    """Every element of every tensor has a number of its own."""
    names = [f"t{number}" for number in range(len(shapes))]
    return dict(zip(names, shapes, strict=True))


models = st.lists(shapes, min_size=1, max_size=3).map(tensors)


def cut(model, draw):
    """A layout of all tensors; for names that differ, so do the numbers of their elements."""
    return [p for name, shape in model.items() for p in draw(layouts_of(name, shape))]


def values(piece):
    return [(piece.name, number) for number in numbers(piece)]


def follow(plan, wanted, held):
    """Read what the plan says; an element that is read twice fails, and one that is not is None."""
    out = [[None] * piece.elements for piece in wanted]
    for read in plan:
        run = read.run
        source = values(held[read.holder][read.source])
        assert run.length > 0
        assert out[read.piece][run.here : run.here + run.length] == [None] * run.length
        part = source[run.there : run.there + run.length]
        assert len(part) == run.length
        out[read.piece][run.here : run.here + run.length] = part
    return out


@given(models, st.integers(1, 4), st.data())
@settings(max_examples=200)
def test_reads_fill_any_layout_from_any_other(model, holders, data):
    wanted, theirs = cut(model, data.draw), cut(model, data.draw)
    held = {holder: [] for holder in range(holders)}
    for piece in theirs:  # each piece on one or several holders
        for holder in data.draw(st.sets(st.integers(0, holders - 1), min_size=1)):
            held[holder].append(piece)
    plan = reads(wanted, held)
    assert follow(plan, wanted, held) == [values(piece) for piece in wanted]
    assert plan == reads(wanted, held)


@pytest.mark.slow
@given(shapes, st.data())
@settings(max_examples=200)
def test_reads_find_whatever_is_held_or_name_the_first_element_that_is_not(shape, data):
    """Pieces that overlap in any way, and leave out what they like."""
    wanted = data.draw(pieces_of(shape))
    held = data.draw(
        st.dictionaries(st.sampled_from("abc"), st.lists(pieces_of(shape), max_size=3))
    )
    known = {number for theirs in held.values() for piece in theirs for number in numbers(piece)}
    lacking = [number for number in numbers(wanted) if number not in known]
    if not lacking:
        plan = reads([wanted], held, local=data.draw(st.none() | st.sampled_from("abc")))
        assert follow(plan, [wanted], held) == [values(wanted)]
        return
    element = [int(n) for n in np.unravel_index(lacking[0], shape)]
    with pytest.raises(Missing) as missing:
        reads([wanted], held)
    assert str(missing.value) == f"nobody holds element {element} of t {list(shape)}"


@given(shapes, st.data())
def test_what_is_local_is_read_locally(shape, data):
    wanted, own = data.draw(pieces_of(shape)), data.draw(pieces_of(shape))
    held = {"first": [whole_piece("t", shape)], "local": [own], "last": [whole_piece("t", shape)]}
    plan = reads([wanted], held, local="local")
    local = sum(read.run.length for read in plan if read.holder == "local")
    assert local == len(set(numbers(wanted)) & set(numbers(own)))


def test_replicas_share_the_reads():
    model = [whole_piece(f"t{number}", (10,)) for number in range(6)]
    held = {"a": model, "b": model, "c": model}
    assert [read.holder for read in reads(model, held)] == ["a", "b", "c", "a", "b", "c"]


def test_the_picture_of_reads():
    def piece(start, stop):
        return Piece("t", (36,), whole((36,)), start, stop)

    held = {0: [piece(0, 13)], 1: [piece(4, 25)], 2: [piece(18, 32)]}
    assert reads([piece(0, 32)], held) == [
        Read(0, 0, 0, Overlap(0, 0, 13)),
        Read(0, 1, 0, Overlap(9, 13, 12)),
        Read(0, 2, 0, Overlap(7, 25, 7)),
    ]


def test_one_run_fills_several_gaps():
    """Columns first, so that the second holder's one run has holes."""
    columns = Piece("t", (3, 4), Box((0, 1), (3, 2)), 0, 6)
    everything = whole_piece("t", (3, 4))
    assert reads([everything], {"columns": [columns], "all": [everything]}) == [
        *(Read(0, "columns", 0, Overlap(2 * row, 4 * row + 1, 2)) for row in range(3)),
        Read(0, "all", 0, Overlap(0, 0, 1)),
        Read(0, "all", 0, Overlap(3, 3, 2)),
        Read(0, "all", 0, Overlap(7, 7, 2)),
        Read(0, "all", 0, Overlap(11, 11, 1)),
    ]


def test_a_tensor_of_another_name_or_shape_is_no_source():
    wanted = whole_piece("t", (2, 3))
    for other in (whole_piece("u", (2, 3)), whole_piece("t", (3, 2))):
        with pytest.raises(Missing, match=r"^nobody holds element \[0, 0\] of t \[2, 3\]$"):
            reads([wanted], {0: [other]})
