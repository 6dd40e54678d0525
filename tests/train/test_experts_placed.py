"""Runs that place experts by load are those of runs that do not; one that goes on from a checkpoint
has the places, and the bits, of one that never stopped.
"""

import re

import pytest
from small_runs import (
    assert_same_bits,
    copy_until,
    losses,
    metrics,
    opened,
    tensors,
    train_on,
)

from howdah.base.errors import UserError
from howdah.checkpoint.facts import Routed, facts
from howdah.parallel.expert_counts import RoutedTokens, told
from howdah.plan.expert_places import mean_busiest, orders

STEPS, EVERY = 6, 2
EXPERTS = [
    *("model.experts.count=5", "model.experts.top_k=2", "model.experts.ffn_size=11"),
    *("model.experts.shared=9", "model.layers=3", "method.precision=float64"),
    *("batch.global_batch=5", "batch.micro_batch=2", "method.lr.schedule=constant"),
    *(f"train.steps={STEPS}", f"train.save_every={EVERY}", "train.keep_last=20"),
]
LOAD = "train.expert_placement=load"
PLACED = r"experts     placed by the load of 2 steps: the busiest rank of ep\d has \d.\d\d of"
slow = pytest.mark.slow


def lines_of(folder):
    return re.findall(rf"{PLACED}.*", (folder / "log.txt").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("dp2 ep2 zero1", []),
        pytest.param("dp4 ep2 zero3", [], marks=slow),
        pytest.param("dp4 ep2 zero2 shard2", [], marks=slow),
        pytest.param("dp4 ep4", ["method.routing.capacity=1.2"], marks=slow),
        pytest.param("pp2 dp2 ep2 zero1", [], marks=slow),
        pytest.param("cp2 ep2 tp2 sp", ["method.routing.capacity=0.8"], marks=slow),
        pytest.param("dp2 ep2 zero3 optimizer=disk", [], marks=slow),
        pytest.param("dp2 ep2 zero2", ["method.precision=bf16"], marks=slow),
        pytest.param("dp2 ep2 zero1", ["method.train=['layers.*.experts.up*']"], marks=slow),
        pytest.param("dp2 ep2 zero1", ["method.optimizer.average=0.9"], marks=slow),
    ],
)
def test_a_run_that_places_experts_by_load_is_one_that_does_not(
    workers, make_job, tmp_path, layout, more
):
    """And one that starts from its second checkpoint has the same bits in the end."""
    given = [f"layout={layout}", *EXPERTS, *more]
    train_on(workers, make_job("number", *given))
    train_on(workers, make_job("load", *given, LOAD))
    copy_until(tmp_path / "load", tmp_path / "again", 2 * EVERY)
    (tmp_path / "again" / "log.txt").unlink()
    train_on(workers, make_job("again", *given, LOAD))

    number, load, again = (tmp_path / name for name in ("number", "load", "again"))
    exact = "method.precision=bf16" not in more
    assert losses(load) == pytest.approx(losses(number), rel=1e-10 if exact else 1e-2)
    for name, tensor in tensors(number, STEPS).items() if exact else ():
        apart = (tensors(load, STEPS)[name] - tensor).abs().max()
        assert apart <= 1e-12 * max(tensor.abs().max(), 1e-30), name
    assert_same_bits(tensors(load, STEPS), tensors(again, STEPS))
    for folder, places in ((number, 0), (load, 2), (again, 1)):
        assert len(lines_of(folder)) == places
        if "method.routing.capacity=1.2" in more:
            assert re.findall(r"bytes, counted .*: (.*)", (folder / "log.txt").read_text())[-1] == (
                "equal"
            )


def test_the_places_follow_from_the_counts_of_the_steps_before(workers, make_job, tmp_path):
    train_on(workers, make_job("run", "layout=dp2 ep2", *EXPERTS, LOAD))
    rows = metrics(tmp_path / "run")
    for step in (EVERY, 2 * EVERY):
        routed = facts(opened(tmp_path / "run", step)).routed
        before = [rows[step - 1]["experts"], rows[step]["experts"]]
        summed = {
            name: tuple(a + b for a, b in zip(*(row[name] for row in before), strict=True))
            for name in before[0]
        }
        assert (routed.by_block, routed.steps) == (summed, EVERY)
    first = facts(opened(tmp_path / "run", EVERY)).routed
    by = orders(first.by_block, 2)
    assert [set(order) for order in by.values()] == [set(range(5))] * 3
    usual, will = (f"{mean_busiest(first.by_block, some, 2):.2f}" for some in ({}, by))
    lines = lines_of(tmp_path / "run")
    assert lines[0].startswith(told(first, 2, by, before={}))
    assert (" moved" in lines[0]) == any(order != (0, 1, 2, 3, 4) for order in by.values())
    assert f"has {will} of the mean, by number {usual}; it had {usual}" in lines[0]
    second = facts(opened(tmp_path / "run", 2 * EVERY)).routed.by_block
    assert f"; it had {mean_busiest(second, by, 2):.2f}" in lines[1]


def test_counts_are_those_since_the_last_checkpoint():
    counted = RoutedTokens(Routed())
    assert counted.take() == Routed()
    counted.add({"layers.0": [3, 1, 9]})
    counted.add({"layers.0": [1, 1, 0]})
    assert counted.take() == Routed(("layers.0",), ((4, 2),), 2)
    assert counted.take() == Routed(("layers.0",), ((4, 2),), 2)  # none were added
    counted.add({"layers.0": [0, 5, 0]})
    assert counted.take() == Routed(("layers.0",), ((0, 5),), 1)


def test_a_dense_model_has_no_experts_to_place(make_job):
    said = "train.expert_placement is load, and the model has no experts; use number"
    with pytest.raises(UserError, match=said):
        make_job("dense", LOAD)
