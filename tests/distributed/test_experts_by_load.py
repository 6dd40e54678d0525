"""Experts that are placed by load and not by number: equal to one device, with the same bytes.

    places   0 1 | 2 3 4        experts   3 0 | 4 1 2

They are drawn, saved and summed by number; only the rank that holds them is another.
"""

from dataclasses import replace

import pytest
from small_cases import case_of, prove

from howdah.plan.flat_buffers import boxes
from howdah.plan.method import Routing
from howdah.plan.sharding import local_buffers
from howdah.shapes.presets import preset
from howdah.verify.case import small_shape
from howdah.verify.compare import compare
from howdah.verify.evidence import gather
from howdah.verify.reference import reference

MIXTRAL = small_shape(preset("mixtral-8x7b"), context=19)
DEEPSEEK = small_shape(preset("deepseek-v3"), context=19)
DROPPING = Routing(balance_loss=0.3, z_loss=0.1, capacity=0.8)
MIXED = (3, 0, 4, 1, 2)
slow = pytest.mark.slow


def case_with(layout, shape, routing):
    case = replace(case_of(layout), sequence=19)
    count = shape.experts.count
    order = MIXED if count == len(MIXED) else (*range(1, count, 2), *range(0, count, 2))
    orders = {f"layers.{n}": order for n in range(shape.layers) if shape.sparse(n)}
    method = replace(case.method, routing=routing)
    return replace(case, shape=shape, method=method, orders=orders)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("routing", [Routing(), DROPPING], ids=["dropless", "capacity"])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("dp2 ep2 zero1 x2", MIXTRAL),
        ("cp2 ep2 x2", MIXTRAL),
        pytest.param("dp4 ep2 zero3 x1", DEEPSEEK, marks=slow),
        pytest.param("dp2 ep2 tp2 sp zero2 recompute=full x2", MIXTRAL, marks=slow),
        pytest.param("pp2 dp2 ep2 zb-h1 x2", MIXTRAL, marks=slow),
        pytest.param("dp2 cp2 ep4 zero3 x1", DEEPSEEK, marks=slow),
        pytest.param("dp2 ep2 zero3 x1 optimizer=disk", MIXTRAL, marks=slow),
    ],
)
def test_any_places_equal_one_device(workers, layout, shape, routing):
    prove(case_with(layout, shape, routing), workers)


def forget_places(context):
    """Tokens go to experts by number, where others are."""
    for block in context.placed.model.layers.values():
        block.numbering = None
    return context


def test_wrong_places_are_noticed(workers):
    case = case_with("dp2 ep2 x2", MIXTRAL, DROPPING)
    found = workers.run(gather, case, forget_places, ranks=2)[0]
    assert any(difference.used > 1 for difference in compare(case, found, reference(case), None))


def test_a_rank_has_as_many_experts_and_knows_which():
    case = case_with("dp2 ep2 x2", MIXTRAL, DROPPING)
    for rank, mine in enumerate((MIXED[:2], MIXED[2:])):
        found, plain = (
            {buffer.unit: buffer for buffer in local_buffers(case.plan, rank, orders)}
            for orders in (case.orders, {})
        )
        there = found["layers.1.experts"]
        for segment in there.segments:
            held = [box for box, _ in boxes(segment)]
            corners = [(box.corner[0], box.corner[0] + box.size[0]) for box in held]
            assert [n for start, stop in corners for n in range(start, stop)] == [*mine]
            assert sum(box.elements for box in held) == segment.box.elements
        assert there.length == plain["layers.1.experts"].length
        assert found["layers.1"] == plain["layers.1"]
