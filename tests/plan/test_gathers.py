"""The gathers of weights: rows of zero3 with a second copy, and in 8 bits; what they refuse."""

from dataclasses import replace

import pytest

from howdah.base.errors import UserError
from howdah.foreign.refusals import problems as foreign_problems
from howdah.plan.batch import Batch
from howdah.plan.flat_buffers import share
from howdah.plan.gather_order import gather_counts
from howdah.plan.gathers import copied, gathers
from howdah.plan.layout import Layout, parse_layout
from howdah.plan.method import Method
from howdah.plan.method_problems import own_problems
from howdah.plan.plan import make_plan
from howdah.plan.quantised import BLOCK, message_bytes
from howdah.plan.recording import Traffic, Wires
from howdah.plan.sharding import local_buffers
from howdah.shapes.presets import preset
from howdah.sim.traffic import step_traffic

LAPTOP = preset("laptop")
INT8 = Method(gather_dtype="int8")


def plan_of(words, method=Method()):  # noqa: B008 (frozen)
    return make_plan(LAPTOP, parse_layout(words), Batch(micro_batch=2), sequence=64, method=method)


def rows(words, rank, often=4, method=None):
    plan = plan_of(words, method or Method())
    (buffer,) = [one for one in local_buffers(plan, rank) if one.unit == "layers.0"]
    return plan, buffer, [*gathers(plan, rank, buffer, often)]


def test_all_gathers_but_the_first_are_of_neighbours():
    _, buffer, (first, others) = rows("dp8 zero3 hpz4 x2", 5)
    assert (list(first.ranks), first.times) == ([*range(8)], 1)
    assert (list(others.ranks), others.times) == ([4, 5, 6, 7], 3)
    assert {(row.elements, row.width) for row in (first, others)} == {(buffer.length, 4)}


@pytest.mark.parametrize(
    ("words", "often", "expected"),
    [
        ("dp4 zero3 x1", 3, [([0, 1, 2, 3], 3)]),
        ("dp4 zero3 hpz2 x1", 1, [([0, 1, 2, 3], 1)]),
        ("dp4 zero3 hpz2 x1", 0, []),
        ("dp8 zero3 shard4 hpz2 x1", 2, [([0, 1, 2, 3], 1), ([0, 1], 1)]),
        ("dp4 tp2 zero3 hpz2 x1", 2, [([0, 2, 4, 6], 1), ([0, 2], 1)]),
        ("dp4 zero1 x1", 1, [([0, 1, 2, 3], 1)]),
        ("x1", 1, []),
    ],
)
def test_who_takes_part(words, often, expected):
    _, _, found = rows(words, 0, often)
    assert [(list(row.ranks), row.times) for row in found] == expected


def test_second_copies_of_a_node_are_the_whole_message():
    for method in (Method(), INT8):
        plan, buffer, (first, _) = rows("dp8 zero3 hpz4 x1", 4, method=method)
        parts = [copied(plan, rank, buffer) for rank in range(4, 8)]
        assert parts == [share(first.elements, 4, index) for index in range(4)]
    plan, buffer, _ = rows("dp8 zero3 x1", 4)
    assert copied(plan, 4, buffer) == (0, 0)


@pytest.mark.parametrize("words", ["dp3 zero3 x1", "dp8 zero3 hpz2 x1", "pp2 dp2 zero3 x2"])
def test_blocks_are_of_one_weight_and_cut_by_no_share(words):
    plan = plan_of(words, INT8)
    for buffer in local_buffers(plan, 0):
        assert all(segment.start % BLOCK == 0 for segment in buffer.segments)
        assert buffer.length % (plan.layout.sharers * BLOCK) == 0
        plain = next(b for b in local_buffers(plan_of(words), 0) if b.unit == buffer.unit)
        assert [s.name for s in plain.segments] == [s.name for s in buffer.segments]


def test_a_quarter_of_the_bytes_and_the_scales():
    assert message_bytes(1 << 20) == (1 << 20) + 4 * 4096
    sent = {}
    for name, method in (("full", Method()), ("int8", INT8)):
        rows_of = step_traffic(plan_of("dp4 zero3 x2", method), 1)
        sent[name] = rows_of[Traffic("dp", "all_gather", "tcp")]
    assert sent["int8"] / sent["full"] == pytest.approx(0.25 * 260 / 256, rel=0.01)


def test_only_a_unit_s_first_gather_leaves_the_node():
    wires = Wires("shared", "tcp", node=4)
    plan = plan_of("dp8 zero3 hpz4 x3")
    counts = gather_counts(plan, 0)
    held = {b.unit: b.length for b in local_buffers(plan, 0)}
    own = {unit: share(length, 8, 0)[1] for unit, length in held.items()}
    near = {unit: share(length, 4, 0)[1] for unit, length in held.items()}
    found = step_traffic(plan, 0, wires)
    assert found[Traffic("dp", "all_gather", "tcp")] == sum(own.values()) * 4 * 4
    inside = sum(own.values()) * 3 * 4
    inside += sum(near[unit] * 3 * 4 * (counts[unit] - 1) for unit in held)
    assert found[Traffic("dp", "all_gather", "shared")] == inside
    plain = step_traffic(plan_of("dp8 zero3 x3"), 0, wires)
    assert plain[Traffic("dp", "all_gather", "tcp")] > 4 * found[Traffic("dp", "all_gather", "tcp")]


# -- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dp4 zero2 hpz2", "hpz2 keeps a second copy of the weights that zero3 gathers; add zero3"),
        ("dp4 zero3 hpz1", "whole on every rank; use release=step, or hpz2 or more"),
        ("dp4 zero3 hpz2 release=step", "release=step keeps them; drop one of both"),
        ("dp4 ep2 zero3 hpz2", "hpz2 with ep2 is not built"),
        ("dp4 zero3 hpz2 weights=host optimizer=host", "weights=host are not; drop one of both"),
        ("dp6 zero3 hpz4", "hpz4 does not divide the 6 ranks that share out weights; use hpz3"),
        ("dp8 zero3 shard2 hpz4", "hpz4 does not divide the 2 ranks"),
        ("dp2 zero3 hpz", "'hpz' needs a number: ranks of a node"),
        ("dp4 zero3 hpz0", "hpz0 must be at least hpz1"),
    ],
)
def test_second_copies_are_refused_where_there_are_none(words, said):
    with pytest.raises(UserError) as refused:
        parse_layout(words)
    assert said in str(refused.value) and str(refused.value).count(": hpz") <= 1


def test_a_second_copy_of_all_ranks_is_the_first():
    assert parse_layout("dp4 zero3 hpz4") == parse_layout("dp4 zero3") == Layout(dp=4, zero=3)
    assert str(parse_layout("hpz2 dp8 shard4 zero3")) == "dp8 zero3 shard4 hpz2"


@pytest.mark.parametrize(
    ("words", "method", "said"),
    [
        ("dp2 zero2", INT8, "is of weights that zero3 gathers; use a layout such as dp2 zero3"),
        ("single", INT8, "is of weights that zero3 gathers"),
        ("dp2 zero3 shard1", INT8, "is of weights that zero3 gathers"),
        ("dp2 tp2 zero3", INT8, "tp2 cuts weights, so that blocks would be others; drop tp2"),
        ("dp4 ep2 zero3", INT8, "ep2 cuts weights"),
        ("dp2 zero3 weights=host optimizer=host", INT8, "weights=host is not built"),
        ("dp2 zero3", replace(INT8, precision="fp8"), "would round weights twice"),
    ],
)
def test_weights_in_eight_bits_are_refused_where_blocks_are_not_whole(words, method, said):
    (problem,) = own_problems(parse_layout(words), method)
    assert problem.startswith("method.gather_dtype=int8") and said in problem
    assert not [*own_problems(parse_layout(words), replace(method, gather_dtype="full"))]


def test_a_foreign_model_has_no_second_copy():
    (problem,) = foreign_problems(parse_layout("dp4 zero3 hpz2"))
    assert problem.startswith("hpz2 keeps a second copy of weights")
