"""The lines of a run about memory: what is said of a card."""

from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import for_gpus, make_plan
from howdah.search.closest import closest
from howdah.shapes.presets import preset
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory, peak
from howdah.train.report import allocated


def plan(**how):
    batch = Batch(global_batch=8, micro_batch=8)
    made = make_plan(preset("laptop"), parse_layout("dp1 x1"), batch, sequence=256, **how)
    return for_gpus(made)


def test_what_torch_allocated_stands_beside_the_plan_for_a_card():
    one = plan(method=Method("bf16"))
    counted = peak(memory(one, 0, kernels_of(one)))
    line = allocated(one, 0, counted * 103 // 100)
    assert f"the plan counts {counted / 2**20:,.1f}: +3.0%" in line
    assert allocated(one, 0, counted // 2).endswith("-50.0%")


def test_a_plan_that_is_offered_in_place_of_one_for_cards_is_judged_by_their_kernels():
    """What is cut from a plan for GPUs was judged by a CPU's kernels, which keep more."""
    one = plan(method=Method("bf16"))
    again = make_plan(
        one.shape, parse_layout("dp1 x1 recompute=full"), one.batch, sequence=256, method=one.method
    )
    most = peak(memory(for_gpus(again), 0, kernels_of(for_gpus(again))))
    assert most < peak(memory(again, 0, kernels_of(again)))
    assert closest(one, most) == again.layout
