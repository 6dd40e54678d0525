"""Megatron-LM's weak scaling of 2019 (https://arxiv.org/abs/1909.08053, section 5.1 and table 2).

A model four times as large on four times the GPUs does not run as fast on each. One number is
taken from the paper, the 39 TFLOP/s of the smallest model on one GPU; the simulation has to find
what the larger ones lose, to messages of tensor parallelism, to the passes over memory that it
does not cut, and to stragglers.
"""

from dataclasses import replace

import pytest

from howdah.machines.cluster_file import load_cluster
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import preset
from howdah.shapes.products import conventions
from howdah.sim.profile import PLAIN
from howdah.sim.step_time import step_time

ALONE = 39e12  # flop/s that one GPU sustained, recomputation counted
EPOCH = 68_500  # iterations of 512 samples
SMALLEST = preset("megatron-1.2b")
SHAPES = {
    "355M": replace(SMALLEST, layers=24, width=1024, heads=16, ffn_size=4096),
    **{size: preset(f"megatron-{size.lower()}") for size in ("1.2B", "2.5B", "4.2B", "8.3B")},
}


def measured(size, layout, devices, *, samples, rate):
    """(seconds of a step, flop/s of a GPU); `rate` is what matrix products attain.

    The V100 computes in fp16; widths of bytes and of flops are those of bf16.
    """
    cluster = load_cluster("v100-32", devices=devices)
    flops = replace(cluster.device.flops, bf16=cluster.device.flops.fp16)
    cluster = replace(
        cluster,
        device=replace(cluster.device, flops=flops),
        measured=(*cluster.measured, ("device.flops.bf16", rate)),
    )
    batch, method = Batch(global_batch=samples), Method(precision="bf16")
    layout = parse_layout(f"{layout} recompute=full")
    plan = make_plan(SHAPES[size], layout, batch, sequence=1024, method=method)
    seconds = step_time(plan, cluster, replace(PLAIN, flash=0)).seconds
    work = conventions(SHAPES[size], 1024).model * 4 / 3 * samples * 1024 / devices
    return seconds, work / seconds


@pytest.fixture(scope="module")
def rate():
    """What matrix products attain where one GPU as a whole sustains ALONE."""
    low, high = ALONE, 3 * ALONE
    for _ in range(30):
        middle = (low + high) / 2
        sustained = measured("1.2B", "single", 1, samples=8, rate=middle)[1]
        low, high = (middle, high) if sustained < ALONE else (low, middle)
    return low


def test_the_sizes_are_those_of_the_paper():
    found = [f"{parameters(SHAPES[size]).total / 1e9:.1f}B" for size in list(SHAPES)[1:]]
    assert found == list(SHAPES)[1:]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("size", "layout", "gpus", "percent"),
    [
        ("2.5B", "tp2", 2, 95),
        ("4.2B", "tp4", 4, 82),
        ("8.3B", "tp8", 8, 77),
        ("1.2B", "dp64", 64, 96),
        ("4.2B", "tp4 dp64", 256, 79),
        ("8.3B", "tp8 dp64", 512, 74),
    ],
)
def test_the_share_of_one_gpus_speed_within_five_points(rate, size, layout, gpus, percent):
    """Six of the eight points of the figure. Two are not here: the one GPU itself, and 2.5B on 128,
    where 83 is 95 less 12, while 1.2B and 8.3B lose 4 and 3 to as many bytes: 93 by simulation.
    """
    samples = 512 if "dp" in layout else 8
    _, sustained = measured(size, layout, gpus, samples=samples, rate=rate)
    assert 100 * sustained / ALONE == pytest.approx(percent, abs=5)


@pytest.mark.parametrize(
    ("size", "layout", "devices", "days"),
    [
        ("355M", "dp64", 64, 0.86),
        ("2.5B", "tp2 dp64", 128, 2.27),
        ("8.3B", "tp8 dp64", 512, 2.10),
    ],
)
def test_the_days_of_an_epoch_within_a_sixth(rate, size, layout, devices, days):
    """6 to 14 % short. Of that 5 to 6 % are not the step's: by the paper's own days, whole runs of
    2.5B and 8.3B were at 79.2 and 69.5 % of one GPU's speed, and its figure shows 83 and 74 %.
    """
    seconds, _ = measured(size, layout, devices, samples=512, rate=rate)
    assert seconds * EPOCH / 86400 == pytest.approx(days, rel=0.16)
