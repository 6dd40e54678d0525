"""`howdah bench collectives`: what is asked for, what is counted as wrong, what is printed."""

import sys
from dataclasses import replace
from math import isclose
from xml.etree import ElementTree

import pytest
import torch

from howdah.base.errors import UserError
from howdah.bench.collectives import BOUND, LEAST, Blocks, copying, measure, take_turns
from howdah.bench.plot import bound, draw_bandwidth, series
from howdah.bench.table import (
    COPIES,
    FACTORS,
    REDUCIBLE,
    WIDTHS,
    Row,
    bound_bytes,
    check_memory,
    heading,
    line,
    read_request,
    read_sizes,
    verdict,
)
from howdah.bench.trials import MAKERS, Memory, allocate, check, make_trial, numbers, views
from howdah.comm.meeting import Kind
from howdah.comm.reduction import REDUCIBLE as REDUCIBLE_BY_TORCH

HOWDAH = [sys.executable, "-m", "howdah", "bench", "collectives"]
KINDS: list[Kind] = ["engine", "torch"]


def request(op="all", sizes="8,40,1M", **others):
    given = {"dtype": "float32", "ranks": 2, "repeats": 1} | others
    return replace(read_request(op, sizes, **given), block=1e-4)


def row(op="all_reduce", size=1000, ranks=4, place="own", seconds=(2e-6, 1e-6, 4e-6)):
    return Row(op, size, ranks, "float32", "engine", place, seconds, (5e-7, 6e-7, 7e-7), 0)


# -- sizes, dtypes, words --------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", (8,)),
        ("1M,8, 64K,8", (8, 1 << 16, 1 << 20)),
        ("1GiB,2kb", (2048, 1 << 30)),
        ("8:100", (8, 16, 32, 64)),
        ("8:64M:64", (8, 512, 1 << 15, 1 << 21)),
        ("4K:4K", (4096,)),
    ],
)
def test_sizes_are_lists_or_ranges(text, sizes):
    assert read_sizes(text) == sizes


@pytest.mark.parametrize(
    "text",
    ["", "x", "8,", "-8", "0", "8.5K", "8T", "٣", "8:", "8:4", "8:64:1", "8:64:2:2", "8:64:x"],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match=r"^--sizes"):
        read_sizes(text)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"op": "al_reduce"}, "no collective 'al_reduce'; did you mean 'all_reduce'"),
        ({"op": "broadcast,"}, "no collective ''"),
        ({"dtype": "flaot32"}, "no dtype 'flaot32'; did you mean 'float32'"),
        ({"dtype": "bool"}, "bool cannot be reduced, as all_reduce does"),
        ({"sizes": "6"}, "6 bytes are no whole number of float32 elements"),
        ({"sizes": "8G"}, "over 1073741824 elements"),
        ({"ranks": 1}, "2 to 64 ranks"),
        ({"ranks": 65}, "2 to 64 ranks"),
        ({"repeats": 0}, "1 to 1000 blocks"),
        ({"transport": "gloo"}, "no transport 'gloo'; known are: engine, torch"),
    ],
)
def test_what_cannot_be_measured_is_said(words, sentence):
    with pytest.raises(UserError, match=sentence):
        request(**words)


def test_words_of_a_wish():
    assert request("all").ops == tuple(FACTORS) == tuple(MAKERS) == tuple(COPIES)
    assert request("reduce, gather,reduce").ops == ("reduce", "gather")
    assert request("gather", dtype="bool", sizes="3").width == 1
    assert request(dtype="bf16").dtype == "bfloat16"


def test_dtypes_are_those_that_torch_has_and_howdah_reduces():
    assert {getattr(torch, name) for name in REDUCIBLE} == set(REDUCIBLE_BY_TORCH)
    assert {name: getattr(torch, name).itemsize for name in WIDTHS} == WIDTHS


def test_memory_is_asked_for_before():
    check_memory(request(sizes="1M", ranks=4), 4 * 10 * 2**20)
    check_memory(request(sizes="1M", ranks=4), None)
    with pytest.raises(UserError, match="on 4 ranks need up to"):
        check_memory(request(sizes="1M", ranks=4), 4 * 10 * 2**20 - 1)


# -- the table -------------------------------------------------------------------------


def test_bus_bandwidth_has_the_factors_of_nccl_tests():
    """doc/PERFORMANCE.md there; 1000 bytes on 4 ranks in a microsecond are 1 GB/s."""
    found = {op: row(op).bus_bandwidth / 1e9 for op in FACTORS}
    three = dict.fromkeys(FACTORS, 0.75)
    expected = three | {"all_reduce": 1.5, "broadcast": 1.0, "reduce": 1.0}
    assert found == pytest.approx(expected)
    assert isclose(row().algorithm_bandwidth, 1e9)
    assert isclose(row().share, 0.5)
    assert isclose(row().bound_bandwidth, 3e9)


def test_the_bound_reads_every_input_once_and_writes_every_result_once():
    """By hand for 2 and 4 ranks: (bytes read + bytes written, by all ranks) / 2 / ranks."""
    n = 1 << 20
    read_and_written = {
        "all_reduce": lambda p: (p * n, p * n),
        "reduce_scatter": lambda p: (p * n, n),
        "all_gather": lambda p: (n, (p - 1) * n),
        "broadcast": lambda p: (n, (p - 1) * n),
        "reduce": lambda p: (p * n, n),
        "gather": lambda p: (n - n // p, n - n // p),
        "scatter": lambda p: (n - n // p, n - n // p),
        "all_to_all": lambda p: (p * n, p * n),
    }
    for op, bytes_of in read_and_written.items():
        for ranks in (2, 4):
            assert bound_bytes(op, n, ranks, shared=True) == sum(bytes_of(ranks)) / 2 / ranks
    assert bound_bytes("all_reduce", n, 4, shared=False) == 3 * n / 2
    assert bound_bytes("gather", 4, 64, shared=True) == 1


def test_the_table():
    assert "\n".join([*heading(row()), line(row())]) == (
        "4 ranks, engine, float32; 3 blocks; bound: a copy in memory on all ranks at once\n"
        "op                   bytes  place     best us   median us  alg GB/s  bus GB/s"
        "  bound %   wrong\n"
        "all_reduce            1000    own        1.00        2.00    1.0000    1.5000"
        "     50.0       0"
    )
    assert verdict([row()]) == "every element was what it must be"


# -- the drawing -----------------------------------------------------------------------


def test_the_lines_of_the_drawing():
    rows = [row(size=2000), row(size=1000), row("broadcast", place="arena")]
    assert series(rows) == {
        ("all_reduce", "own"): [(1000, rows[1].bus_bandwidth), (2000, rows[0].bus_bandwidth)],
        ("broadcast", "arena"): [(1000, rows[2].bus_bandwidth)],
    }
    assert bound(rows) == [(1000, rows[1].bound_bandwidth), (2000, rows[0].bound_bandwidth)]


@pytest.mark.parametrize("sizes", [[8], [8, 64, 512, 2**30]])
def test_the_drawing_is_sound_and_keeps_its_points_inside(sizes):
    rows = [row(op, size=size) for op in FACTORS for size in sizes]
    picture = ElementTree.fromstring(draw_bandwidth(rows))
    width, height = (float(picture.get(name)) for name in ("width", "height"))
    dots = [each for each in picture.iter() if each.tag.endswith("circle")]
    assert len(dots) == len(rows)
    assert all(0 < float(dot.get("cx")) < width for dot in dots)
    assert all(0 < float(dot.get("cy")) < height for dot in dots)
    faster = [float(dot.get("cy")) for dot in dots[: len(sizes)]]
    assert faster == sorted(faster, reverse=True)


# -- measuring -------------------------------------------------------------------------


def test_numbers_tell_ranks_and_places_apart():
    mine = numbers([1], 0, 2_100_000, dtype=torch.int8)
    assert torch.equal(mine[7:], numbers([1], 7, 2_100_000, dtype=torch.int8))
    for other in (numbers([2], 0, 4000, dtype=torch.int8), mine[1:4001], mine[1000:5000]):
        assert (other != mine[:4000]).float().mean() > 0.7
    both = numbers([1, 2], 5, 4000, dtype=torch.float32)
    parts = (numbers([rank], 5, 4000, dtype=torch.float32) for rank in (1, 2))
    assert torch.equal(both, sum(parts))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_operation_of_every_transport_is_right(workers, kind, ranks):
    asked = request(ranks=ranks, repeats=2, sizes="4,40,200K")
    first, *others = workers.run(measure, asked, ranks=ranks, transport=kind)
    assert all(found == first for found in others)
    assert [(r.op, r.bytes) for r in first] == [(o, s) for o in asked.ops for s in asked.sizes]
    for found in first:
        assert (found.ranks, found.transport, found.place, found.wrong) == (ranks, kind, "own", 0)
        assert len(found.seconds) == len(found.bound) == 2
        assert min(found.seconds + found.bound) > 0


def test_the_arena_is_measured_where_there_is_one(workers):
    for kind, places in (("engine", {"own", "arena"}), ("torch", {"own"})):
        asked = replace(request(sizes="1K"), arena=True)
        rows = workers.run(measure, asked, ranks=2, transport=kind)[0]
        assert {found.place for found in rows} == places
        assert [found.wrong for found in rows] == [0] * len(rows)


def turns(transport, limit):
    trials = {"sum": make_trial(transport, "all_reduce", views(allocate(4096), 4096, torch.int8))}
    bound = copying(transport, 4096)
    return take_turns(transport, trials, bound, repeats=LEAST + 2, block=1e-4, limit=limit)


@pytest.mark.parametrize(("limit", "blocks"), [(0.0, LEAST), (1e6, LEAST + 2)])
def test_turns_end_when_their_time_is_over_but_not_before_a_few(workers, limit, blocks):
    first, second = workers.run(turns, limit, ranks=2)
    assert list(first) == ["sum", BOUND] and first == second
    for found in first.values():
        assert isinstance(found, Blocks) and len(found.seconds) == blocks
        assert found.calls >= 1 and found.wrong == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float64"])
def test_sums_are_exact_in_every_dtype(workers, dtype):
    asked = request("all_reduce,reduce_scatter,reduce", dtype=dtype, sizes="4K")
    assert [found.wrong for found in workers.run(measure, asked)[0]] == [0, 0, 0]


class Broken:
    """A transport whose operation `op` is done in another way, `how`."""

    def __init__(self, transport, op, how):
        self.inner, self.op, self.how = transport, op, how

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        if name != self.op:
            return found
        return lambda *given: self.how(found, *given)


def nothing(call, *given):
    """The operation does not happen on this rank's tensors, only on others'."""
    call(*(g.clone() if isinstance(g, torch.Tensor) else g for g in given))


def miscount(transport, op, forgetful):
    """Wrong elements when nobody forgets, then when one rank does: what is there is the last's."""
    counts, x, out = [], torch.empty(1000), torch.empty(1100)
    for how in (lambda call, *given: call(*given), nothing):
        broken = Broken(transport, op, how) if transport.rank == forgetful else transport
        counts.append(check(transport, make_trial(broken, op, Memory(x, out))))
    return counts


@pytest.mark.parametrize("op", list(FACTORS))
def test_a_result_that_is_wrong_is_counted(workers, op):
    forgetful = 0 if op in ("reduce", "gather") else 1  # only the root gets anything there
    right, forgot = zip(*workers.run(miscount, op, forgetful, ranks=2), strict=True)
    assert right == (0, 0)
    assert forgot[forgetful] > 300
    assert forgot[1 - forgetful] == 0


def measure_broken(transport, asked):
    return measure(Broken(transport, "scatter", nothing) if transport.rank else transport, asked)


def test_what_is_wrong_on_any_rank_is_told_by_all(workers):
    first, second = workers.run(
        measure_broken, request("scatter", "4K"), ranks=2, transport="engine"
    )
    assert first[0].wrong == second[0].wrong > 300
    assert "elements wrong" in verdict(first)
