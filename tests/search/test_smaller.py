"""What a run could change that ran out of memory: it fits, can run, and is the same step."""

from dataclasses import replace

import pytest

from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.mesh_axes import axis
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.plan.support import unsupported
from howdah.search.smaller import smaller
from howdah.shapes.presets import preset
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory, peak

SHAPE = replace(preset("gpt2-124m"), layers=4)


def plan(layout, samples=32, micro=None, shape=SHAPE):
    batch = Batch(samples, micro)
    return make_plan(
        shape, resolve(parse_layout(layout), None), batch, sequence=512, method=Method("bf16")
    )


def takes(one):
    stages = axis(one.layout, "pp").group(0)
    return max(peak(memory(one, rank, kernels_of(one))) for rank in stages)


@pytest.mark.parametrize(
    ("layout", "share", "named"),
    [
        ("single x4", 0.9, [("single x8", 4), ("single x4 recompute=full", 8)]),
        ("single x4", 0.75, [("single x32", 1), ("single x16 recompute=full", 2)]),
        ("dp2 x2", 0.8, [("dp2 x8", 2), ("dp2 zero1 x2", 8)]),
        ("dp2 x16", 0.75, [("dp2 zero1 x16", 1)]),
        ("pp2 1f1b x4", 0.6, [("pp2 1f1b x32 recompute=full", 1)]),
        ("single x32", 0.5, []),
    ],
)
def test_the_cheapest_ways_are_named_first(layout, share, named):
    before = plan(layout)
    found = smaller(before, share * takes(before))
    assert [(one.layout, one.micro_batch) for one in found] == named


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("layout", ["single x4", "dp2 x2", "dp4 x1", "pp2 1f1b x4", "tp2 dp2 x2"])
@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_what_is_named_can_be_run_and_is_the_same_step(layout, share):
    before = plan(layout)
    most = share * takes(before)
    found = smaller(before, most)
    assert len(found) <= 2 and len({one.layout for one in found}) == len(found)
    for one in found:
        after = plan(one.layout, samples=32, micro=one.micro_batch)  # as a recipe would say it
        assert after.batch.global_batch == before.batch.global_batch
        assert after.layout.world == before.layout.world
        assert takes(after) == one.bytes <= most
        assert unsupported(SHAPE, after.layout) == []


def test_of_one_sample_and_one_rank_there_is_little_to_save():
    assert smaller(plan("single", samples=1), 10**6) == []
